"""PyTorch's optimizers (optim_db): each configuration in each implementation, several steps on a small model.

Parameters, gradients and the optimizer's state are compared after four steps. An implementation is what a keyword
chooses: none, foreach, fused, capturable or differentiable. Two lists of devices in torch.optim say where capturable
ones may be, and where foreach is taken if nobody chooses; the CPU is in neither. Eager runs with the CPU in both.
"""

from __future__ import annotations

import contextlib
import copy
import io
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch.testing._internal.common_optimizers import (
    OptimizerErrorEnum,
    OptimizerInfo,
    OptimizerInput,
    optim_db,
)

from .call import Call, seed_all, seed_of
from .cases import Case, chosen, run_cases
from .parts import At, Found, How

DTYPES = ("float32", "float64", "bfloat16", "complex64")
IMPLEMENTATIONS = ("plain", "default", "foreach", "fused", "capturable", "capturable_foreach", "differentiable")
CHECKS = (*IMPLEMENTATIONS, "closure", "groups", "state_dict", "scheduler", "errors")
MAY_REFUSE = ("errors",)
STEPS = 4
#: Numbers in an optimizer's state that may be tensors on the CPU whatever the device ("t" is LBFGS' rate).
ON_CPU = ("step", "eta", "mu", "mu_product", "t")

OPTIMIZERS: dict[str, OptimizerInfo] = {info.name: info for info in optim_db}


def names(dtype: str) -> list[str]:
    complex_too = getattr(torch, dtype).is_complex
    return [name for name, info in OPTIMIZERS.items() if info.supports_complex or not complex_too]


def _flags(info: OptimizerInfo, implementation: str) -> dict[str, bool] | None:
    """The keywords that choose it; None where the optimizer has no such implementation."""
    known = [f for f in info.supported_impls if f != "fused" or "cpu" in info.supports_fused_on]
    off = dict.fromkeys(known, False)
    if implementation == "default":
        return {}
    if implementation == "plain":
        return off
    wanted = dict.fromkeys(implementation.split("_"), True)
    if wanted.pop("capturable", False):
        if not info.has_capturable_arg or not all(flag in known for flag in wanted):
            return None
        return off | wanted | {"capturable": True}
    return off | wanted if all(flag in known for flag in wanted) else None


def _inputs(info: OptimizerInfo, implementation: str) -> list[OptimizerInput]:
    """The configurations of an implementation: those for "cuda" have the ones for capturable among them."""
    capturable = "capturable" in implementation
    inputs = info.optim_inputs_func("cuda" if capturable else "cpu")
    return [i for i in inputs if not capturable or i.kwargs.get("capturable", False)]


@contextlib.contextmanager
def _as_on_a_device(info: OptimizerInfo) -> Iterator[None]:
    """Lets the CPU be among the devices with capturable optimizers, and with foreach where nobody chooses."""
    name = "_get_capturable_supported_devices"
    with contextlib.ExitStack() as stack:
        foreach = mock.patch.object(
            sys.modules["torch.optim.optimizer"], "_get_foreach_kernels_supported_devices", lambda: ["cpu", "dtorch"]
        )
        stack.enter_context(foreach)
        for module in {sys.modules[kind.__module__] for kind in info.optim_cls.__mro__}:  # type: ignore[attr-defined]
            if hasattr(module, name):
                stack.enter_context(mock.patch.object(module, name, lambda *_, **__: ["cpu", "dtorch"]))
        yield


def _numbers(dtype: torch.dtype, name: str) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Two weights, a bias and a number (of matrices alone for Muon), and the gradients of all steps."""
    shapes: list[tuple[int, ...]] = [(6, 4), (3, 6), (6,), ()]
    if name == "Muon":
        shapes = shapes[:2]
    seed_all(seed_of(name))
    params = [torch.randn(shape, dtype=dtype) for shape in shapes]
    grads = [torch.randn((STEPS, *shape), dtype=dtype) for shape in shapes]
    return params, grads


class Training:
    """Parameters on the call's device, their optimizer, and steps with the gradients that were drawn for them."""

    def __init__(self, info: OptimizerInfo, call: Call, kwargs: dict[str, Any], groups: bool = False) -> None:
        values, self.grads = call.args
        self.sparse = info.only_supports_sparse_grads
        self.params = [torch.nn.Parameter(value) for value in values]
        given: Any = self.params
        if groups:
            given = [{"params": self.params[:1]}, {"params": self.params[1:], "lr": 0.02}]
        self.optimizer = info.optim_cls(given, **copy.deepcopy(kwargs))  # type: ignore[operator]
        self.done = 0

    def set_gradients(self) -> None:
        for param, grads in zip(self.params, self.grads, strict=True):
            grad = grads[self.done % STEPS].clone()
            param.grad = grad.to_sparse() if self.sparse else grad
        self.done += 1

    def closure(self) -> torch.Tensor:
        """A loss whose gradients are computed; each parameter is pulled towards its first gradient."""
        self.optimizer.zero_grad()
        loss = torch.stack(
            [(p - g[0]).abs().square().sum() for p, g in zip(self.params, self.grads, strict=True)]
        ).sum()
        loss.backward()
        if self.sparse:
            for p in self.params:
                assert p.grad is not None
                p.grad = p.grad.to_sparse()
        return loss.detach()

    def step(self) -> None:
        self.set_gradients()
        self.optimizer.step()

    def seen(self) -> Any:
        """Parameters and state; what may be on the CPU whatever the device, as numbers."""
        return [p.detach() for p in self.params], [dict(sorted(self._state(p).items())) for p in self.params]

    def _state(self, p: torch.Tensor) -> dict[str, Any]:
        def plain(key: str, value: Any) -> Any:
            return value.item() if key in ON_CPU and torch.is_tensor(value) else value

        return {key: plain(key, value) for key, value in self.optimizer.state.get(p, {}).items()}


def _steps(info: OptimizerInfo, kwargs: dict[str, Any], call: Call) -> Any:
    if info.step_requires_closure:
        return _closure(info, kwargs, call)
    training = Training(info, call, kwargs)
    for _ in range(STEPS):
        training.step()
    return training.seen()


def _differentiable(info: OptimizerInfo, kwargs: dict[str, Any], call: Call) -> Any:
    """A step through which gradients flow, to the parameters' and the gradients' own sources."""
    sources = [(p.requires_grad_(), g[0].detach().requires_grad_()) for p, g in zip(*call.args, strict=True)]
    params = [p.clone() for p, _ in sources]
    for p, (_, g) in zip(params, sources, strict=True):
        p.grad = g.clone()
    optimizer = info.optim_cls(params, **copy.deepcopy(kwargs))  # type: ignore[operator]
    optimizer.step()
    loss = torch.stack([p.abs().square().sum() for p in params]).sum()
    leaves = [t for pair in sources for t in pair]
    return [p.detach() for p in params], torch.autograd.grad(loss, leaves, allow_unused=True)


def _closure(info: OptimizerInfo, kwargs: dict[str, Any], call: Call) -> Any:
    training = Training(info, call, kwargs)
    losses = [training.optimizer.step(training.closure) for _ in range(2)]
    return losses, training.seen()


def _groups(info: OptimizerInfo, kwargs: dict[str, Any], call: Call) -> Any:
    training = Training(info, call, kwargs, groups=True)
    for _ in range(2):
        training.step()
    return training.seen()


def _state_dict(info: OptimizerInfo, kwargs: dict[str, Any], call: Call) -> Any:
    """Two steps, and two more by another optimizer that loads what torch.save wrote of the first."""
    first = Training(info, call, kwargs)
    second = Training(info, Call(call.device, args=([p.detach().clone() for p in call.args[0]], call.args[1])), kwargs)

    def two(training: Training) -> None:
        for _ in range(2):
            if info.step_requires_closure:
                training.optimizer.step(training.closure)
            else:
                training.step()

    two(first)
    file = io.BytesIO()
    torch.save(first.optimizer.state_dict(), file)
    file.seek(0)
    with torch.no_grad():
        for mine, theirs in zip(second.params, first.params, strict=True):
            mine.copy_(theirs)
    second.done = first.done
    second.optimizer.load_state_dict(torch.load(file))
    two(second)
    return first.seen(), second.seen()


def _scheduled(info: OptimizerInfo, kwargs: dict[str, Any], call: Call, which: int) -> Any:
    training = Training(info, call, kwargs)
    schedulers = [make(training.optimizer) for make in info.scheduler_inputs[which]]
    for _ in range(STEPS):
        loss = training.optimizer.step(training.closure)
        for scheduler in schedulers:
            plateau = isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau)
            scheduler.step(loss) if plateau else scheduler.step()
    return [group["lr"] for group in training.optimizer.param_groups], training.seen()


def _cases(info: OptimizerInfo, how: How, found: Found) -> Iterator[Case]:
    dtype = getattr(torch, how.dtype)
    numbers = _numbers(dtype, info.name)
    seed = seed_of(info.name)

    def case(check: str, words: str, do: Callable[..., Any], kwargs: dict[str, Any], *more: Any) -> Case:
        def action(call: Call) -> Any:
            with _as_on_a_device(info):
                return do(info, kwargs, call, *more)

        return Case(check, words, numbers, action, seed)

    for implementation in IMPLEMENTATIONS:
        flags = _flags(info, implementation)
        if flags is None:
            continue
        for index, given in chosen(_inputs(info, implementation), how, found):
            kwargs = {**given.kwargs, **flags}
            words = f"input {index} {given.desc}"
            yield case(implementation, words, _differentiable if flags.get("differentiable") else _steps, kwargs)
            if implementation in ("differentiable", "default"):
                continue
            yield case("state_dict", f"{implementation}, {words}", _state_dict, kwargs)
            if implementation in ("plain", "foreach", "fused"):
                yield case("closure", f"{implementation}, {words}", _closure, kwargs)
                if info.supports_param_groups:
                    yield case("groups", f"{implementation}, {words}", _groups, kwargs)
    for which in range(len(info.scheduler_inputs)):
        yield case("scheduler", f"scheduler {which}", _scheduled, {}, which)
    yield from _errors(info, dtype)


def _errors(info: OptimizerInfo, dtype: torch.dtype) -> Iterator[Case]:
    if info.optim_error_inputs_func is None:
        return
    seed_all(seed_of(info.name))
    for number, error in enumerate(info.optim_error_inputs_func(device="cpu", dtype=dtype)):
        given = error.optimizer_error_input
        params = given.params or [torch.randn(2, 3, dtype=dtype)]

        def action(call: Call, error: Any = error, kwargs: dict[str, Any] = given.kwargs) -> Any:
            with warnings.catch_warnings():
                if issubclass(error.error_type, Warning):
                    warnings.simplefilter("error", error.error_type)
                optimizer = info.optim_cls(call.args[0], **copy.deepcopy(kwargs))  # type: ignore[operator]
            if error.error_on == OptimizerErrorEnum.STEP_ERROR:
                for group in optimizer.param_groups:
                    for p in group["params"]:
                        p.grad = torch.ones_like(p)
                optimizer.step()

        yield Case("errors", f"call {number} {given.desc}", (params,), action, seed_of(info.name))


def run(name: str, how: How, at: At) -> Found:
    info, found = OPTIMIZERS[name], Found()
    return run_cases(_cases(info, how, found), how, at, found)

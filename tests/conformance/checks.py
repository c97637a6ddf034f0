"""The ways in which an operator is called; each gives what is compared with eager.

A check is a function of an operator and a sample that yields (what, action). Every action runs once on the CPU and
twice on dtorch: the first call of a geometry may ask the worker, the second uses what the client remembers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.testing._internal.opinfo.core import OpInfo, SampleInput
from torch.utils._pytree import tree_leaves, tree_map

from .call import Call
from .observe import Action
from .samples import copy_to

Check = Callable[[OpInfo, SampleInput], Iterator[tuple[str, Action]]]


def _call(op: OpInfo, call: Call) -> Any:
    if op.is_factory_function and "device" not in call.kwargs:  # it makes tensors on the default device
        with torch.device(call.device):
            return op(call.input, *call.args, **call.kwargs)
    return op(call.input, *call.args, **call.kwargs)


def _weights(outputs: list[torch.Tensor]) -> list[torch.Tensor]:
    """A fixed random gradient of every output."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(t.shape, dtype=t.dtype, generator=generator).to(t.device) for t in outputs]


def _differentiable(leaves: list[Any]) -> list[torch.Tensor]:
    return [t for t in leaves if isinstance(t, torch.Tensor) and t.requires_grad]


def _grads(call: Call, result: Any) -> list[Any]:
    """Gradients of the leaves for a fixed random gradient of every result that has one."""
    outputs = _differentiable(tree_leaves(call.output_for_grad(result)))
    inputs = _differentiable(call.tensors())
    if not outputs or not inputs:
        return []
    return list(torch.autograd.grad(outputs, inputs, _weights(outputs), allow_unused=True))


def _second_grads(call: Call, result: Any) -> list[Any]:
    """Gradients of the gradients: of the leaves, and of what the first gradients were weighed with."""
    outputs = _differentiable(tree_leaves(call.output_for_grad(result)))
    inputs = _differentiable(call.tensors())
    if not outputs or not inputs:
        return []
    weights = [w.requires_grad_() for w in _weights(outputs)]
    first = torch.autograd.grad(outputs, inputs, weights, create_graph=True, allow_unused=True)
    again = _differentiable(list(first))
    if not again:
        return []
    return list(torch.autograd.grad(again, [*inputs, *weights], _weights(again), allow_unused=True))


def forward(op: OpInfo, sample: SampleInput) -> Iterator[tuple[str, Action]]:
    """The plain call."""
    yield "", lambda call: _call(op, call)


def backward(op: OpInfo, sample: SampleInput) -> Iterator[tuple[str, Action]]:
    """Gradients of the plain call."""
    if op.supports_autograd:
        yield "", lambda call: _grads(call, _call(op, call))


def double_backward(op: OpInfo, sample: SampleInput) -> Iterator[tuple[str, Action]]:
    """Gradients of the gradients of the plain call."""
    if op.supports_autograd and op.supports_gradgrad:
        yield "", lambda call: _second_grads(call, _call(op, call))


def inplace(op: OpInfo, sample: SampleInput) -> Iterator[tuple[str, Action]]:
    """The in-place variant on a copy of the input, and its gradients."""
    variant = op.inplace_variant
    if variant is None or sample.broadcasts_input or not isinstance(sample.input, torch.Tensor):
        return

    def action(call: Call) -> Any:
        target = call.input.clone()
        result = variant(target, *call.args, **call.kwargs)
        return target, result

    yield "", action
    if op.supports_inplace_autograd and sample.input.requires_grad:
        yield "backward", lambda call: _grads(call, action(call)[1])


def out(op: OpInfo, sample: SampleInput) -> Iterator[tuple[str, Action]]:
    """out= given an empty tensor (resized), one of the wrong size (resized), and one that is not contiguous."""
    if not op.supports_out:
        return
    try:
        with torch.no_grad():
            expected = _call(op, copy_to(sample, "cpu", op.name))
    except Exception:
        return  # forward compares the exception
    if not all(isinstance(t, torch.Tensor) and t.layout == torch.strided for t in tree_leaves(expected)):
        return

    def empty(t: torch.Tensor, device: str) -> torch.Tensor:
        return torch.empty(0, dtype=t.dtype, device=device)

    def larger(t: torch.Tensor, device: str) -> torch.Tensor:
        return torch.full([n + 1 for n in t.shape] or [2], 1, dtype=t.dtype, device=device)

    def strided(t: torch.Tensor, device: str) -> torch.Tensor:
        return torch.full([2 * n for n in reversed(t.shape)], 1, dtype=t.dtype, device=device)[
            tuple(slice(None, None, 2) for _ in t.shape)
        ].permute(tuple(reversed(range(t.dim()))))

    def writing(make: Callable[[torch.Tensor, str], torch.Tensor]) -> Action:
        def action(call: Call) -> Any:
            with torch.no_grad():
                outs = tree_map(lambda t: make(t, call.device), expected)
                result = op(call.input, *call.args, **call.kwargs, out=outs)
                return list(tree_leaves(outs)), list(tree_leaves(result))

        return action

    yield "empty", writing(empty)
    yield "larger", writing(larger)
    yield "strided", writing(strided)


def noncontiguous(op: OpInfo, sample: SampleInput) -> Iterator[tuple[str, Action]]:
    """The plain call and its gradients on views with steps; run.py gives this check such samples."""
    yield "", lambda call: _call(op, call)
    if op.supports_autograd:
        yield "backward", lambda call: _grads(call, _call(op, call))


#: By name, in the order in which they run. "errors" is forward on the calls that PyTorch refuses.
CHECKS: dict[str, Check] = {
    "forward": forward,
    "backward": backward,
    "double_backward": double_backward,
    "inplace": inplace,
    "out": out,
    "noncontiguous": noncontiguous,
    "errors": forward,
}

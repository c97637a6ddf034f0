"""The older tests of torch.nn (module_tests, get_new_module_tests(), criterion_tests): layers, functions and losses.

A test is a constructor with an input, and for a loss a target. Its module is made on the CPU and moved; functions that
hold tensors of their own bring them to their input's device. What PyTorch checks of a test is checked here: its second
derivative, its in-place variant, integers, pickling.
"""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import torch
from torch.testing._internal.common_nn import (
    CriterionTest,
    NewModuleTest,
    criterion_tests,
    get_new_module_tests,
    module_tests,
)
from torch.testing._internal.common_utils import set_default_dtype
from torch.utils._pytree import tree_map

from .call import Call, seed_all, seed_of
from .cases import Case, gradients, noncontiguous, run_cases, second_gradients
from .parts import At, Found, How

DTYPES = ("float64", "float32")
CHECKS = ("forward", "backward", "double_backward", "inplace", "noncontiguous", "integers", "pickle")
MAY_REFUSE = ("errors",)


@cache
def _tests() -> dict[str, NewModuleTest | CriterionTest]:
    """By name; descriptions without one of their own are numbered."""
    seed_all(seed_of("layers"))  # the descriptions hold random tensors
    found: dict[str, NewModuleTest | CriterionTest] = {}
    described = [(NewModuleTest, d) for d in [*module_tests, *get_new_module_tests()]]
    described += [(CriterionTest, d) for d in criterion_tests]
    for kind, description in described:
        given = dict(description)
        given.pop("decorator", None)
        if "constructor" not in given:
            given["constructor"] = getattr(torch.nn, given.pop("module_name"))
        for mode in ("train", "eval") if given.get("check_eval") else ("train",):
            test = kind(**given)
            base = test.get_name().removeprefix("test_") + ("" if mode == "train" else "_eval")
            number = sum(name.partition("#")[0] == base for name in found)
            found[f"{base}#{number + 1}" if number else base] = test
            test.training = mode == "train"
    return found


def names(dtype: str) -> list[str]:
    return list(_tests())


def _converted(value: Any, dtype: torch.dtype) -> Any:
    def one(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or not (leaf.is_floating_point() or leaf.is_complex()):
            return leaf
        wanted = dtype.to_complex() if leaf.is_complex() else dtype
        return leaf.detach().to(wanted).requires_grad_(leaf.requires_grad)

    return tree_map(one, value)


def _arguments(test: Any, name: str, dtype: torch.dtype) -> tuple[Any, ...]:
    """Of the module's forward: its inputs, and a loss's target and what follows it."""
    seed_all(seed_of(name))
    given = test._get_input()
    inputs = given if isinstance(given, tuple) else (given,)
    if isinstance(test, CriterionTest):
        inputs = (*inputs, test._get_target(), *test.extra_args)
    return tuple(_converted(inputs, dtype))


class Made:
    """The test's module on the call's device, with its arguments."""

    def __init__(self, test: Any, call: Call, dtype: torch.dtype, seed: int, **more: Any) -> None:
        self.args = call.args
        self.seed = seed
        seed_all(seed)
        self.module = test.constructor(*copy.deepcopy(test.constructor_args), **more)
        self.module.to(device=call.device, dtype=dtype).train(test.training)
        self.inputs = [t for t in [*call.tensors(), *self.module.parameters()] if t.requires_grad]

    def run(self) -> Any:
        seed_all(self.seed)
        return self.module(*self.args)


def _forward(made: Made) -> Any:
    return made.run()


def _backward(made: Made) -> Any:
    return gradients(made.run(), made.inputs)


def _double_backward(made: Made) -> Any:
    return second_gradients(made.run(), made.inputs)


def _strided(made: Made) -> Any:
    result = made.run()
    return result, gradients(result, made.inputs, steps=True)


def _in_place(made: Made) -> Any:
    made.args = tuple(a.clone() if isinstance(a, torch.Tensor) else a for a in made.args)
    result = made.run()
    return result, made.args, gradients(result, made.inputs)


def _integers(made: Made) -> Any:
    made.module.requires_grad_(False)._apply(lambda t: (100 * t).long())
    made.args = tuple((100 * a.detach()).long() for a in made.args)
    return made.run()


def _pickled(made: Made) -> Any:
    made.run()
    file = io.BytesIO()
    torch.save(made.module, file)
    file.seek(0)
    made.module = torch.load(file, weights_only=False)
    return made.run()


def _checks(test: Any) -> Iterator[tuple[str, Callable[[Made], Any], dict[str, Any]]]:
    """What is checked of a test: check, what is done, further arguments of the constructor."""
    yield "forward", _forward, {}
    if test.check_forward_only:
        return
    yield "backward", _backward, {}
    if test.check_gradgrad:
        yield "double_backward", _double_backward, {}
    if isinstance(test, CriterionTest):
        return
    yield "noncontiguous", _strided, {}
    if test.check_inplace:
        yield "inplace", _in_place, {"inplace": True}
    if test._extra_kwargs.get("check_with_long_tensor"):
        yield "integers", _integers, {}
    if test.should_test_pickle:
        yield "pickle", _pickled, {}


def _cases(test: Any, name: str, how: How) -> Iterator[Case]:
    dtype, seed = getattr(torch, how.dtype), seed_of(name)
    plain = _arguments(test, name, dtype)
    for check, do, more in _checks(test):

        def action(call: Call, do: Callable[[Made], Any] = do, more: dict[str, Any] = more) -> Any:
            return do(Made(test, call, dtype, seed, **more))

        yield Case(check, "its input", noncontiguous(plain) if check == "noncontiguous" else plain, action, seed)


def run(name: str, how: How, at: At) -> Found:
    found = Found(samples=1, of=1)
    with set_default_dtype(getattr(torch, how.dtype)):
        return run_cases(_cases(_tests()[name], name, how), how, at, found)

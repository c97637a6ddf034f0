"""Operators on lists of tensors (the foreach databases): plain, in place, backward, with steps, and wrong calls."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Any

import torch
from torch.testing._internal import common_methods_invocations as databases
from torch.testing._internal.opinfo.core import ForeachFuncInfo, SampleInput

from .call import Call, seed_all, seed_of
from .cases import Case, chosen, gradients, run_cases
from .observe import Action
from .parts import At, Found, How

DTYPES = ("float32", "float64", "bfloat16", "complex64", "int64", "bool")
CHECKS = ("forward", "backward", "inplace", "noncontiguous", "empty", "errors")
MAY_REFUSE = ("errors", "backward")  # of samples some have no gradient

OPERATORS: dict[str, ForeachFuncInfo] = {
    op.name: op
    for op in chain(
        databases.foreach_unary_op_db,
        databases.foreach_binary_op_db,
        databases.foreach_pointwise_op_db,
        databases.foreach_reduce_op_db,
        databases.foreach_other_op_db,
    )
}


def names(dtype: str) -> list[str]:
    return [name for name, op in OPERATORS.items() if getattr(torch, dtype) in op.dtypes]


def _arguments(sample: SampleInput) -> tuple[Any, ...]:
    return (sample.input, sample.args, sample.kwargs)


def _forward(op: ForeachFuncInfo) -> Action:
    def action(call: Call) -> Any:
        given, args, kwargs = call.args
        return op(given, *args, **kwargs)

    return action


def _backward(op: ForeachFuncInfo) -> Action:
    def action(call: Call) -> Any:
        given, args, kwargs = call.args
        return gradients(op(given, *args, **kwargs), [t for t in call.tensors() if t.requires_grad])

    return action


def _in_place(op: ForeachFuncInfo) -> Action:
    """On copies: a leaf that has a gradient cannot be written."""

    def action(call: Call) -> Any:
        given, args, kwargs = call.args
        targets = [t.clone() for t in given]
        result = op.inplace_variant(targets, *args, **kwargs)
        return targets, result, gradients(targets, [t for t in call.tensors() if t.requires_grad])

    return action


def _shortened(arguments: Any) -> Any:
    """Of lists of 10,000 empty tensors, which are for kernels of a GPU, a few."""
    if isinstance(arguments, list):
        return arguments[:5]
    if isinstance(arguments, tuple):
        return tuple(map(_shortened, arguments))
    return arguments


def _cases(op: ForeachFuncInfo, how: How, found: Found) -> Iterator[Case]:
    dtype = getattr(torch, how.dtype)
    differentiable = op.supports_autograd and (dtype.is_floating_point or dtype.is_complex)

    def samples(**options: Any) -> list[SampleInput]:
        seed_all(seed_of(op.name))
        return list(op.sample_inputs("cpu", dtype, requires_grad=differentiable, **options))

    for check, options in (("forward", {}), ("noncontiguous", {"noncontiguous": True})):
        for index, sample in chosen(samples(**options), how, found):
            arguments, seed = _arguments(sample), seed_of(op.name, index)
            if op.supports_out:  # where there is a variant that is not in place, in the words of this database
                yield Case(check, f"sample {index}", arguments, _forward(op), seed)
                if differentiable:
                    kind = "backward" if check == "forward" else check
                    yield Case(kind, f"sample {index} backward", arguments, _backward(op), seed)
            if not op.has_no_in_place:
                kind = "inplace" if check == "forward" else check
                yield Case(kind, f"sample {index} in place", arguments, _in_place(op), seed)
    seed_all(seed_of(op.name))
    for index, sample in enumerate(op.sample_zero_size_inputs("cpu", dtype)):
        action = _forward(op) if op.supports_out else _in_place(op)
        yield Case("empty", f"sample {index}", _shortened(_arguments(sample)), action, seed_of(op.name, index))
    if op.error_inputs_func is not None:
        seed_all(seed_of(op.name))
        for index, error in enumerate(op.error_inputs("cpu")):
            arguments, seed = _arguments(error.sample_input), seed_of(op.name, index)
            yield Case("errors", f"call {index}", arguments, _forward(op), seed)
            if not op.has_no_in_place:
                yield Case("errors", f"call {index} in place", arguments, _in_place(op), seed)


def run(name: str, how: How, at: At) -> Found:
    op, found = OPERATORS[name], Found()
    return run_cases(_cases(op, how, found), how, at, found)

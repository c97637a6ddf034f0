"""PyTorch's operators (op_db): plain, in place, out=, backward, from views with steps, and wrong calls."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch.testing._internal.opinfo.core import OpInfo, SampleInput

from . import samples
from .call import Call, seed_of
from .checks import CHECKS as TABLE
from .compare import compare
from .observe import Action, Strictness
from .parts import At, Found, How

#: Operators whose result is memory that nothing has written. They are called in deterministic mode, in which PyTorch
#: fills such memory: otherwise there would be no values to compare.
UNWRITTEN = {"empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided"}

DTYPES = ("float32", "float64", "bfloat16", "complex64", "int64", "bool")
CHECKS = tuple(TABLE)
#: A result may not fit into the input, and PyTorch may refuse what it made of a sample: with steps, as_strided_scatter.
MAY_REFUSE = ("errors", "inplace", "out", "noncontiguous", "double_backward")


def names(dtype: str) -> list[str]:
    return sorted(samples.operators(getattr(torch, dtype)))


def _calls(
    op: OpInfo, chosen: list[tuple[int, SampleInput]], how: How
) -> Iterator[tuple[str, str, SampleInput, Action, int]]:
    """Everything to compare: check, which of its cases, arguments, action, seed."""
    name = samples.name_of(op)
    for index, sample in chosen:
        for check, cases in TABLE.items():
            if check == "errors" or not how.wants(check):
                continue
            if check == "noncontiguous":
                if samples.is_sparse(sample):
                    continue
                arguments = sample.noncontiguous()
            else:
                arguments = sample
            for case, action in cases(op, arguments):
                yield check, f"sample {index} {case}".rstrip(), arguments, action, seed_of(name, index)
    if how.wants("errors"):
        for index, wrong in enumerate(samples.errors(op)):
            for _, action in TABLE["errors"](op, wrong):
                yield "errors", f"call {index}", wrong, action, seed_of(name, index)


def _deterministic(action: Action) -> Action:
    def wrapped(call: Call) -> Any:
        torch.use_deterministic_algorithms(True)
        try:
            return action(call)
        finally:
            torch.use_deterministic_algorithms(False)

    return wrapped


def run(name: str, how: How, at: At) -> Found:
    dtype = getattr(torch, how.dtype)
    op = samples.operators(dtype)[name]
    everything = samples.all_of(op, dtype)
    chosen = [(i, everything[i]) for i in samples.spread(len(everything), how.most)]
    found = Found(samples=len(chosen), of=len(everything))
    for check, case, arguments, action, seed in _calls(op, chosen, how):
        at(f"{check}, {case}")
        if name in UNWRITTEN:
            action = _deterministic(action)
        strict = Strictness(how.tolerance, versions=check != "out")
        problem = compare(partial(samples.copy_to, arguments, op=op.name), action, seed, strict)
        found.add(check, case, problem, strict.loosened, strict.refused)
    return found

"""What the parts beside op_db share: one thing to compare, a choice of inputs, and gradients as plain results."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch.testing._internal.common_utils import noncontiguous_like
from torch.utils._pytree import tree_leaves, tree_map

from .call import Call, Copier
from .compare import compare
from .observe import Action, Strictness
from .parts import At, Found, How
from .samples import spread

T = TypeVar("T")


class Case(NamedTuple):
    """One comparison: the action runs on copies of the arguments, on each side."""

    check: str
    words: str  # which of the check's cases
    arguments: tuple[Any, ...]
    action: Action
    seed: int


def run_cases(cases: Iterable[Case], how: How, at: At, found: Found) -> Found:
    """Compare those that are wanted, and note what came of each."""
    for case in cases:
        if not how.wants(case.check):
            continue
        at(f"{case.check}, {case.words}")
        strict = Strictness(how.tolerance)
        problem = compare(partial(_call, case.arguments), case.action, case.seed, strict)
        found.add(case.check, case.words, problem, strict.loosened, strict.refused)
    return found


def _call(arguments: tuple[Any, ...], device: str) -> Call:
    return Call(device, args=Copier(device).tree(arguments))


def chosen(inputs: Sequence[T], how: How, found: Found) -> list[tuple[int, T]]:
    """As many of the inputs as are to be run, with their numbers; ``found`` counts them."""
    some = [(i, inputs[i]) for i in spread(len(inputs), how.most)]
    found.samples += len(some)
    found.of += len(inputs)
    return some


def tensors_of(value: Any) -> list[torch.Tensor]:
    """Every tensor in it, in order."""
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def noncontiguous(value: Any) -> Any:
    """The same with every tensor that has elements laid out with steps."""

    def one(leaf: Any) -> Any:
        steps = isinstance(leaf, torch.Tensor) and leaf.layout == torch.strided and leaf.numel() > 1
        return noncontiguous_like(leaf) if steps else leaf

    return tree_map(one, value)


def weights_for(outputs: Sequence[torch.Tensor], *, steps: bool = False) -> list[torch.Tensor]:
    """Fixed random gradients for these results; with ``steps`` they are not contiguous."""
    generator = torch.Generator().manual_seed(0)
    made = [torch.randn(t.shape, dtype=t.dtype, generator=generator) for t in outputs]
    made = noncontiguous(made) if steps else made
    return [w.to(t.device) if not steps else _moved(w, t.device) for w, t in zip(made, outputs, strict=True)]


def _moved(t: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A copy with the same steps, which ``to`` would drop."""
    whole = t.as_strided([t.untyped_storage().nbytes() // t.element_size()], [1], 0).clone().to(device)
    return whole.as_strided(t.size(), t.stride(), t.storage_offset())


def gradients(results: Any, inputs: Sequence[torch.Tensor], *, steps: bool = False) -> list[Any]:
    """Gradients of the inputs for a fixed random gradient of every result that has one."""
    outputs = [t for t in tensors_of(results) if t.requires_grad]
    if not outputs or not inputs:
        return []
    return list(torch.autograd.grad(outputs, inputs, weights_for(outputs, steps=steps), allow_unused=True))


def second_gradients(results: Any, inputs: Sequence[torch.Tensor]) -> list[Any]:
    """The gradients, and theirs: for the inputs, and for what the first ones were weighed with."""
    outputs = [t for t in tensors_of(results) if t.requires_grad]
    if not outputs or not inputs:
        return []
    above = [w.requires_grad_() for w in weights_for(outputs)]
    first = torch.autograd.grad(outputs, inputs, above, create_graph=True, allow_unused=True)
    again = [g for g in first if g is not None and g.requires_grad]
    if not again:
        return list(first)
    return [*first, *torch.autograd.grad(again, [*inputs, *above], weights_for(again), allow_unused=True)]

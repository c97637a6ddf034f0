"""What can be seen of a call, as plain data, and the first way in which two sides differ.

Aliases are seen by storage: ``results share with arguments`` and ``results share with each other``. Values are compared
as bytes: dtorch promises eager's bits. A tensor given as out= may count more versions than eager's: PyTorch resizes it
through the dispatcher, which counts, on every device but its own two.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._pytree import tree_flatten

from tests.same import sparse_parts

from .call import Call

#: What a check does with a call: gives whatever shall be compared.
Action = Callable[[Call], Any]


@dataclass
class Seen:
    """One tensor."""

    facts: dict[str, Any]  # in the order in which they are worth reporting
    value: torch.Tensor | None  # on the CPU; None when there is none to compare
    parts: dict[str, Seen] = field(default_factory=dict)  # of a sparse tensor


@dataclass
class Strictness:
    """What is compared beside everything else."""

    tolerance: float = 0.0  # of values, relative to the largest; 0: equal bits, infinite: values are not compared
    versions: bool = True
    loosened: bool = False  # set by ``difference``: bits differ, and the values are within the tolerance
    refused: bool = False  # set by ``difference``: eager raised


@dataclass
class Outcome:
    """One side of a comparison: an exception, or what came of the call."""

    error: BaseException | None = None
    late: bool = False  # the call went well, and asking for its values raised `error`
    structure: str = ""
    leaves: list[Any] = field(default_factory=list)  # Seen, or a plain value
    arguments: list[Seen] = field(default_factory=list)


def outcome(action: Action, call: Call) -> Outcome:
    """Run the action and look at everything it gave."""
    result = Outcome()
    given = call.tensors()
    try:
        leaves, structure = tree_flatten(action(call))
    except Exception as error:
        result.error = error
        return result
    try:
        result.structure = str(structure)
        known = [*given]
        for leaf in leaves:
            if isinstance(leaf, torch.Tensor):
                result.leaves.append(_see(leaf, known, call.device))
                known.append(leaf)
            else:
                result.leaves.append(_plain(leaf, call.device))
        for t in given:
            result.arguments.append(_see(t, [], str(t.device), changed_only=True))
    except Exception as error:
        result.error, result.late = error, True
    return result


def difference(eager: Outcome, ours: Outcome, strict: Strictness) -> str | None:
    """The first way in which ``ours`` is not what eager did, in words; None when it is."""
    if eager.error is not None:
        strict.refused = True
        wanted = type(eager.error).__name__
        if ours.error is None:
            return f"no error; eager raises {wanted}: {_line(eager.error)}"
        if ours.late:
            return f"late {type(ours.error).__name__}; eager raises {wanted} at the call: {_line(ours.error)}"
        if type(ours.error) is not type(eager.error):
            return f"{type(ours.error).__name__} where eager raises {wanted}: {_line(ours.error)}"
        return None
    if ours.error is not None:
        when = "late " if ours.late else ""
        return f"{when}{type(ours.error).__name__}: {_line(ours.error)}"
    if ours.structure != eager.structure:
        return f"structure {ours.structure} where eager has {eager.structure}"
    for what, theirs, our in (("result", eager.leaves, ours.leaves), ("argument", eager.arguments, ours.arguments)):
        for i, (a, b) in enumerate(zip(theirs, our, strict=True)):
            if problem := _leaf_difference(a, b, strict):
                return f"{what} {i}: {problem}"
    return None


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300]


def _see(t: torch.Tensor, known: list[torch.Tensor], device: str, changed_only: bool = False) -> Seen:
    facts: dict[str, Any] = {"dtype": t.dtype, "shape": tuple(t.shape), "layout": t.layout}
    facts["device"] = "its own" if t.device.type == torch.device(device).type else t.device.type
    if t.is_meta:
        return Seen(facts, None)
    if t.layout != torch.strided:
        facts |= {"requires_grad": t.requires_grad, "version": t._version}
        facts["is"] = [i for i, other in enumerate(known) if other is t]
        if t.layout == torch.sparse_coo:
            facts["coalesced"] = t.is_coalesced()
        return Seen(facts, None, {name: _see(part, [], device) for name, part in sparse_parts(t).items()})
    facts |= {"stride": t.stride(), "offset": t.storage_offset(), "requires_grad": t.requires_grad}
    facts |= {"conj": t.is_conj(), "neg": t.is_neg(), "version": t._version}
    facts["is"] = [i for i, other in enumerate(known) if other is t]
    facts["shares storage with"] = [i for i, other in enumerate(known) if _shares(t, other)]
    if changed_only and t._version == 0:
        return Seen(facts, None)
    return Seen(facts, t.detach().resolve_conj().resolve_neg().cpu())


def _shares(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.layout == b.layout == torch.strided and a.untyped_storage()._cdata == b.untyped_storage()._cdata


def _plain(value: Any, device: str) -> Any:
    if isinstance(value, torch.device):
        return "its own" if value.type == torch.device(device).type else str(value)
    return value


def _leaf_difference(a: Any, b: Any, strict: Strictness) -> str | None:
    if not isinstance(a, Seen) or not isinstance(b, Seen):
        same = type(a) is type(b) and (a == b or repr(a) == repr(b))
        return None if same else f"{b!r} where eager gives {a!r}"
    for key, wanted in a.facts.items():
        if key == "version" and not strict.versions and b.facts.get(key, 0) >= wanted:
            continue
        if b.facts.get(key) != wanted:
            return f"{key} {b.facts.get(key)} where eager has {wanted}"
    for name, part in a.parts.items():
        if problem := _leaf_difference(part, b.parts[name], strict):
            return f"{name}: {problem}"
    if a.value is None or b.value is None or strict.tolerance == math.inf:
        return None
    problem = _value_difference(a.value, b.value)
    if problem and _within(a.value, b.value, strict.tolerance):
        strict.loosened = True
        return None
    return problem


def _within(a: torch.Tensor, b: torch.Tensor, tolerance: float) -> bool:
    """Whether no value differs by more than a part of the largest; not finite ones must be equal."""
    if not tolerance or not (a.is_floating_point() or a.is_complex()):
        return False
    largest = a.abs()[a.isfinite()].double().max().item() if a.isfinite().any() else 0.0
    return torch.allclose(a, b, rtol=0.0, atol=tolerance * largest, equal_nan=True)


def _bytes(t: torch.Tensor) -> torch.Tensor:
    return t.clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8)


def _value_difference(a: torch.Tensor, b: torch.Tensor) -> str | None:
    if a.numel() == 0 or torch.equal(_bytes(a), _bytes(b)):
        return None
    if a.is_floating_point() or a.is_complex():
        if torch.equal(torch.nan_to_num(a), torch.nan_to_num(b)) and torch.equal(a.isnan(), b.isnan()):
            return "bits differ only in the sign of a zero or of a nan"
        unequal = (a != b) & ~(a.isnan() & b.isnan())
        largest = (a - b).abs()[unequal].nan_to_num().max().item()
        return f"bits: {int(unequal.sum())} of {a.numel()} values differ, by at most {largest:.2g}"
    return f"values: {int((a != b).sum())} of {a.numel()} differ"

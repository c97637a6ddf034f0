"""Runs a call on both sides: once on the CPU and twice on dtorch, whose second call uses what the client remembers."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import dtorch

from .call import Call, seed_all
from .observe import Action, Outcome, Strictness, difference, outcome

#: Makes fresh arguments on a device, "cpu" or "dtorch:0".
Make = Callable[[str], Call]


class EngineLost(Exception):
    """The name cannot go on: its worker died or was killed."""


def compare(make: Make, action: Action, seed: int, strict: Strictness) -> str | None:
    """Run the action on both sides; what differs, in words."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.filterwarnings("error", message=".*an autograd kernel was not registered")
        return _compare(make, action, seed, strict)


def _compare(make: Make, action: Action, seed: int, strict: Strictness) -> str | None:
    def side(device: str) -> Outcome:
        call = make(device)
        seed_all(seed)
        return outcome(action, call)

    eager = side("cpu")
    for attempt in ("", "again: "):
        try:
            ours = side("dtorch:0")
        except NotImplementedError as refused:
            return f"cannot be moved: {refused}"
        if isinstance(ours.error, dtorch.WorkerDied | dtorch.ControllerDied):
            raise EngineLost
        if problem := difference(eager, ours, strict):
            return (
                f"eager differs from itself: {problem}" if difference(eager, side("cpu"), strict) else attempt + problem
            )
    return None

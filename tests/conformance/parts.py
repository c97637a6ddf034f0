"""What a part is: a collection of PyTorch's test material, as a module with the names of class ``Part``.

To add one, write such a module, with a docstring's first line that says what it is, and add its name to MODULES. Its
``run`` is called in a child process with an engine of one worker, ``dtorch:0``, and compares by means of compare.py.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol, cast

#: Parts by name, in the order of the report. Imported when asked for: some need seconds to import.
MODULES = ("operators", "modules", "layers", "optimizers", "foreach")


@dataclass(frozen=True)
class How:
    """How a name is to be run."""

    dtype: str
    most: int | None = None  # samples at most, spread over all there are; None: every one
    only: tuple[str, ...] = ()  # checks to run; () for all
    tolerance: float = 0.0  # of values, relative to the largest; 0: equal bits, infinite: values are not compared

    def wants(self, check: str) -> bool:
        return not self.only or check in self.only


@dataclass
class Found:
    """What running a name gave."""

    checks: dict[str, list[str]] = field(default_factory=dict)  # failures by check; a check that passed has none
    samples: int = 0  # that were run
    of: int = 0  # that there are
    comparisons: int = 0
    loosened: int = 0  # comparisons whose bits differed and whose values are within the tolerance
    done: dict[str, int] = field(default_factory=dict)  # comparisons by check
    refused: dict[str, int] = field(default_factory=dict)  # of them, those in which eager raised

    def add(self, check: str, case: str, problem: str | None, loosened: bool = False, refused: bool = False) -> None:
        """One comparison's outcome."""
        self.comparisons += 1
        self.loosened += loosened
        self.done[check] = self.done.get(check, 0) + 1
        self.refused[check] = self.refused.get(check, 0) + refused
        problems = self.checks.setdefault(check, [])
        if problem:
            problems.append(f"{case}: {problem}")

    def require_results(self, may_refuse: tuple[str, ...]) -> None:
        """Fail the checks in which eager raised every time: two sides that raise alike have compared nothing."""
        for check, done in self.done.items():
            if check not in may_refuse and self.refused.get(check) == done:
                self.checks[check].append(f"compared nothing: eager itself raises in all of {done}")


#: Told before each comparison what it is ("forward, sample 3"): it starts the time limit anew.
At = Callable[[str], None]


class Part(Protocol):
    """The names that a part's module has."""

    DTYPES: tuple[str, ...]  # what the whole run covers; ("float32",) where dtype means nothing
    CHECKS: tuple[str, ...]  # names for exclusions.txt and --checks
    MAY_REFUSE: tuple[str, ...]  # the checks in which eager may raise every time, in float32 too

    @staticmethod
    def names(dtype: str) -> list[str]: ...

    @staticmethod
    def run(name: str, how: How, at: At) -> Found: ...


def part(name: str) -> Part:
    """The part's module."""
    if name not in MODULES:
        raise ValueError(f"no part {name!r}; there are {', '.join(MODULES)}")
    return cast(Part, importlib.import_module(f"tests.conformance.{name}"))

"""What is known not to equal eager PyTorch: the lines of exclusions.txt, and what they make of results.

A line is ``PART NAME CHECK DTYPE REASON``; the first four are patterns (``*``). CHECK is a check of the part; ``run``
(the check itself raised); ``lost`` (the worker or the client died); ``values`` (they are undefined: all but them is
compared); or ``within:1e-6`` (values may differ by that, relative to the largest of the tensor).

An exclusion that passes is an error. That is said only of a line and a name whose samples were all run, in every dtype
that the run had, and never of ``values``: whether what is undefined happens to be equal is chance.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .run import Result

PATH = Path(__file__).with_name("exclusions.txt")
WITHIN = "within:"


@dataclass(frozen=True)
class Exclusion:
    """One line."""

    part: str
    name: str
    check: str
    dtype: str
    reason: str

    def covers(self, part: str, name: str, dtype: str) -> bool:
        pairs = ((part, self.part), (name, self.name), (dtype, self.dtype))
        return all(fnmatchcase(value, pattern) for value, pattern in pairs)

    def covers_check(self, check: str) -> bool:
        return fnmatchcase(check, self.check)

    @property
    def tolerance(self) -> float | None:
        """What it says of values; None when it is about a check."""
        if self.check == "values":
            return math.inf
        return float(self.check.removeprefix(WITHIN)) if self.check.startswith(WITHIN) else None


def read(path: Path = PATH) -> list[Exclusion]:
    """The file's lines; raises ValueError for one without a reason."""
    found = []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if not line.strip() or line.startswith("#"):
            continue
        parts = line.split(None, 4)
        if len(parts) < 5:
            raise ValueError(f"{path.name}:{number}: PART NAME CHECK DTYPE REASON, not {line!r}")
        found.append(Exclusion(*parts))
    return found


def tolerance(exclusions: list[Exclusion], part: str, name: str, dtype: str) -> float:
    """The tolerance of values that the lines give to a name: 0 where they give none."""
    return max((e.tolerance or 0.0 for e in exclusions if e.covers(part, name, dtype)), default=0.0)


def mark(result: Result, exclusions: list[Exclusion]) -> None:
    """Note the reasons of those failures that are excluded."""
    for e in exclusions:
        if not e.covers(result.part, result.name, result.dtype):
            continue
        if e.tolerance is not None:
            if e.tolerance == math.inf or result.found.loosened:
                result.excluded[e.check] = e.reason
        elif result.lost:
            if e.covers_check("lost"):
                result.excluded["lost"] = e.reason
        else:
            for check, problems in result.found.checks.items():
                if problems and e.covers_check(check):
                    result.excluded[check] = e.reason


def needless(results: list[Result], exclusions: list[Exclusion]) -> list[str]:
    """Lines that excluded nothing of a name that was run in full."""
    wrong = []
    for e in exclusions:
        if e.tolerance == math.inf:
            continue
        covered: dict[tuple[str, str], list[Result]] = defaultdict(list)
        for r in results:
            if e.covers(r.part, r.name, r.dtype):
                covered[r.part, r.name].append(r)
        for (part, name), of_name in covered.items():
            if all(r.whole and _passes(e, r) for r in of_name):
                wrong.append(f"{part} {name} {e.check} {e.dtype}: passes, yet is excluded: {e.reason}")
    return wrong


def _passes(e: Exclusion, r: Result) -> bool:
    if e.tolerance is not None:
        return not r.found.loosened
    return not r.lost and not any(problems and e.covers_check(c) for c, problems in r.found.checks.items())

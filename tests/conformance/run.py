"""Runs children over operators, restarts those that crash, and settles what they found with the exclusions.

A verdict belongs to an operator and a check. An exclusion names both, and a reason; one that passes is an error.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
EXCLUSIONS = HERE / "exclusions.txt"


@dataclass
class Result:
    """What became of one operator."""

    name: str
    found: dict[str, list[str]] = field(default_factory=dict)  # failures by check that ran
    lost: str = ""  # how the worker or the client ended
    excluded: dict[str, str] = field(default_factory=dict)  # reason by check that failed as expected
    needless: list[str] = field(default_factory=list)  # checks that are excluded and passed

    @property
    def failures(self) -> dict[str, list[str]]:
        """By check: what neither passed nor is excluded."""
        if self.lost:
            return {} if "lost" in self.excluded else {"lost": [self.lost]}
        return {check: what for check, what in self.found.items() if what and check not in self.excluded}

    @property
    def verdict(self) -> str:
        if self.failures or self.needless:
            return "failed"
        return "excluded" if self.excluded else "passed"


@dataclass(frozen=True)
class Exclusion:
    """One line of exclusions.txt: ``OPERATOR CHECK DTYPE REASON``; the first three are patterns (``*``)."""

    operator: str
    check: str
    dtype: str
    reason: str

    def covers(self, operator: str, check: str, dtype: str) -> bool:
        pairs = ((operator, self.operator), (check, self.check), (dtype, self.dtype))
        return all(fnmatchcase(value, pattern) for value, pattern in pairs)


def read_exclusions(path: Path = EXCLUSIONS) -> list[Exclusion]:
    """The file's lines; raises ValueError for one without a reason."""
    found = []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if not line.strip() or line.startswith("#"):
            continue
        parts = line.split(None, 3)
        if len(parts) < 4:
            raise ValueError(f"{path.name}:{number}: OPERATOR CHECK DTYPE REASON, not {line!r}")
        found.append(Exclusion(*parts))
    return found


def settle(result: Result, exclusions: list[Exclusion], dtype: str) -> None:
    """Mark the failures that are excluded, and the exclusions that are needless.

    Exclusions of "values" are not looked at: whether values that are undefined happen to be equal is chance.
    """
    for e in exclusions:
        for check in ["lost"] if result.lost else list(result.found):
            if not e.covers(result.name, check, dtype) or e.check == "values":
                continue
            if check == "lost" or result.found[check]:
                result.excluded[check] = e.reason
            elif "*" not in e.check:
                result.needless.append(f"{check} passes, yet is excluded: {e.reason}")


def run(
    names: list[str],
    *,
    exclusions: list[Exclusion],
    dtype: str = "float32",
    most: int = 2,
    limit: float = 60,
    threads: int = 1,
    only: tuple[str, ...] = (),
    tell: Callable[[Result], None] = lambda _: None,
) -> list[Result]:
    """Run the checks of these operators and settle them; ``tell`` hears each result as it comes.

    ``most`` samples an operator, ``limit`` seconds an operator, ``threads`` for eager and the worker alike; ``only``
    names checks (all by default).
    """
    results: list[Result] = []
    left = list(names)
    request: dict[str, Any] = {"dtype": dtype, "most": most, "limit": limit, "threads": threads, "only": list(only)}
    request["without_values"] = [n for n in names if any(e.covers(n, "values", dtype) for e in exclusions)]

    def settled(result: Result) -> None:
        settle(result, exclusions, dtype)
        results.append(result)
        tell(result)

    while left:
        done, running, at, status, output = _one_child({**request, "names": left}, settled)
        left = left[done:]
        if not left:
            break
        words = f"signal {-status}" if status < 0 else f"status {status}"
        lost = Result(left[0], lost=f"CRASHED the client ({words}) at {at}: {_tail(output)}")
        if not running:
            raise RuntimeError(f"the child ended with {words} before its first operator:\n{output}")
        settled(lost)
        left = left[1:]
    return results


def _one_child(request: dict[str, Any], tell: Callable[[Result], None]) -> tuple[int, str, str, int, str]:
    """Operators that were done, the one that was running, at what, the exit status, and what was on stderr."""
    reading, writing = os.pipe()
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    environment |= {"DTORCH_QUIET": "1"}
    with tempfile.TemporaryFile("w+") as log:
        child = subprocess.Popen(
            [sys.executable, "-m", "tests.conformance.child"],
            cwd=ROOT,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            pass_fds=[writing],
            text=True,
        )
        os.close(writing)
        assert child.stdin is not None
        child.stdin.write(json.dumps({**request, "results": writing}) + "\n")
        child.stdin.close()
        done, running, at = 0, "", ""
        try:
            with os.fdopen(reading) as lines:
                for line in lines:
                    what = json.loads(line)
                    if "begin" in what:
                        running, at = what["begin"], "its samples"
                    elif "at" in what:
                        at = what["at"]
                    else:
                        done += 1
                        running = ""
                        tell(Result(what["end"], what.get("found", {}), what.get("lost", "")))
            status = child.wait()
        finally:
            if child.poll() is None:
                child.terminate()  # its engine goes with it
                child.wait()
        log.seek(0)
        return done, running, at, status, log.read()


def _tail(output: str) -> str:
    lines = [line.strip() for line in output.strip().splitlines() if line.strip()]
    start = next((i for i, line in enumerate(lines) if "Fatal" in line or "Timeout" in line), max(0, len(lines) - 6))
    return " | ".join(lines[start : start + 8])[:600]

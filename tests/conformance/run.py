"""Runs children over many names, several at once, and starts another for each that crashes."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from .exclusions import Exclusion, mark, tolerance
from .parts import Found, How, part

ROOT = Path(__file__).resolve().parents[2]


@dataclass
class Result:
    """What became of one name in one dtype."""

    part: str
    name: str
    dtype: str
    found: Found = field(default_factory=Found)
    lost: str = ""  # how the worker or the client ended
    asked: bool = True  # all checks ran, not only some that were asked for
    seconds: float = 0.0
    day: str = field(default_factory=lambda: time.strftime("%Y-%m-%d"))
    commit: str = ""  # of dtorch
    excluded: dict[str, str] = field(default_factory=dict)  # reason by check that failed as expected

    @property
    def failures(self) -> dict[str, list[str]]:
        """By check: what neither passed nor is excluded."""
        if self.lost:
            return {} if "lost" in self.excluded else {"lost": [self.lost]}
        return {check: what for check, what in self.found.checks.items() if what and check not in self.excluded}

    @property
    def whole(self) -> bool:
        """Whether every sample and every check ran."""
        return self.asked and self.found.samples == self.found.of

    @property
    def verdict(self) -> str:
        if self.failures:
            return "failed"
        return "excluded" if self.excluded else "passed"


class Keeper(Protocol):
    """Where results are kept from run to run (kept.py)."""

    def get(self, task: Task) -> Result | None: ...

    def put(self, task: Task, result: Result) -> None: ...


@dataclass(frozen=True)
class Task:
    """One name to run."""

    part: str
    name: str
    how: How


def tasks(
    part_name: str,
    how: How,
    exclusions: list[Exclusion],
    wanted: Callable[[str], bool] = lambda _: True,
) -> list[Task]:
    """A part's names as tasks, with the tolerances that the exclusions give them."""
    return [
        Task(part_name, name, dataclasses.replace(how, tolerance=tolerance(exclusions, part_name, name, how.dtype)))
        for name in part(part_name).names(how.dtype)
        if wanted(name)
    ]


def _commit() -> str:
    """The commit of dtorch that runs, with a + where files differ from it."""

    def git(*words: str) -> str:
        done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False)
        return done.stdout.strip() if done.returncode == 0 else ""

    return git("rev-parse", "--short", "HEAD") + (
        "+" if git("status", "--porcelain", "dtorch", "native", "tests") else ""
    )


def run(
    work: Iterable[Task],
    *,
    exclusions: list[Exclusion],
    kept: Keeper | None = None,
    sets: int = 1,
    limit: float = 60,
    threads: int = 1,
    tell: Callable[[Result], None] = lambda _: None,
) -> list[Result]:
    """Run the tasks in ``sets`` children at once, each with an engine of its own; results in the order of the tasks.

    ``limit`` seconds for a comparison, ``threads`` for eager and the worker alike; ``tell`` hears each result, already
    marked with what is excluded, as it comes. What ``kept`` has is not run again, and what is run is added to it.
    """
    ordered = list(work)
    results: dict[int, Result] = {}
    left: deque[tuple[int, Task]] = deque()
    for number, task in enumerate(ordered):
        known = kept.get(task) if kept else None
        if known:
            mark(known, exclusions)
            results[number] = known
            tell(known)
        else:
            left.append((number, task))
    commit = _commit()
    lock = threading.Lock()
    errors: list[BaseException] = []
    children: set[_Child] = set()

    def take() -> tuple[int, Task] | None:
        with lock:
            return left.popleft() if left and not errors else None

    def settle(number: int, result: Result) -> None:
        mark(result, exclusions)
        with lock:
            if errors:
                return  # ended by us, perhaps
            if kept:
                kept.put(ordered[number], result)
            results[number] = result
            tell(result)

    def one_set() -> None:
        try:
            following = take()
            while following:
                with _Child(limit, threads) as child:
                    children.add(child)
                    while following and not child.ended:
                        number, task = following
                        started = time.monotonic()
                        result = child.run(task)
                        result.seconds, result.commit = time.monotonic() - started, commit
                        settle(number, result)
                        following = take()
                    children.discard(child)
        except BaseException as error:
            errors.append(error)

    crew = [threading.Thread(target=one_set) for _ in range(min(sets, len(left)))]
    for member in crew:
        member.start()
    try:
        for member in crew:
            member.join()
    except BaseException as error:  # interrupted: nothing goes on behind the caller's back
        errors.append(error)
        for child in list(children):
            child.terminate()
        for member in crew:
            member.join()
    if errors:
        raise errors[0]
    return [results[i] for i in range(len(ordered))]


class _Child:
    """A child process (child.py) that takes one task at a time."""

    def __init__(self, limit: float, threads: int) -> None:
        reading, writing = os.pipe()
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 (closed in __exit__)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.conformance.child"],
            cwd=ROOT,
            env=environment | {"DTORCH_QUIET": "1"},
            stdin=subprocess.PIPE,
            stdout=self._log,
            stderr=self._log,
            pass_fds=[writing],
            start_new_session=True,  # an interrupt reaches this process alone, which ends the children itself
            text=True,
        )
        os.close(writing)
        self._results = os.fdopen(reading)
        self.ended = False
        self._send({"results": writing, "limit": limit, "threads": threads})
        if not self._next():
            raise RuntimeError(f"the child ended with {self._status()} before its first name:\n{self._output()}")

    def run(self, task: Task) -> Result:
        """Hand it the task and wait for what came of it; afterwards the child may have ``ended``."""
        self._send({"part": task.part, "name": task.name, "how": dataclasses.asdict(task.how)})
        result = Result(task.part, task.name, task.how.dtype, asked=not task.how.only)
        at = "its start"
        while what := self._next():
            if "at" in what:
                at = what["at"]
            elif "lost" in what:
                result.lost = what["lost"]
                return result
            else:
                result.found = Found(**what["found"])
                return result
        self.ended = True
        result.lost = f"CRASHED the client ({self._status()}) at {at}: {_tail(self._output())}"
        return result

    def terminate(self) -> None:
        """End it now; whoever waits for it sees it end."""
        self._process.terminate()

    def _send(self, what: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(what) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # it has ended: there will be no results either

    def _next(self) -> dict[str, Any] | None:
        line = self._results.readline()
        return json.loads(line) if line else None

    def _status(self) -> str:
        status = self._process.wait()
        return f"signal {-status}" if status < 0 else f"status {status}"

    def _output(self) -> str:
        self._log.seek(0)
        return self._log.read()

    def __enter__(self) -> _Child:
        return self

    def __exit__(self, *_: object) -> None:
        """Let it end by itself, or end it when it was interrupted; its engine goes with it."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.close()
            self._process.wait(60)
        except (BrokenPipeError, subprocess.TimeoutExpired):
            self.terminate()
            self._process.wait()
        self._results.close()
        self._log.close()


def _tail(output: str) -> str:
    lines = [line.strip() for line in output.strip().splitlines() if line.strip()]
    start = next((i for i, line in enumerate(lines) if "Fatal" in line or "Timeout" in line), max(0, len(lines) - 6))
    return " | ".join(lines[start : start + 8])[:600]

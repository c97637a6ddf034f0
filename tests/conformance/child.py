"""The process that runs the checks: reads operators' names, writes what it found as lines of JSON.

It may crash: its parent (run.py) starts another. A worker that dies, or an operator that takes too long (its worker is
then killed, which wakes whoever waits for it), ends the operator's checks and gets a new engine.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import signal
import sys
import threading
import warnings
from collections.abc import Iterator
from typing import Any, TextIO

import torch
from torch.testing._internal.opinfo.core import OpInfo, SampleInput
from torch.utils._pytree import tree_leaves

import dtorch
from dtorch.client import engine

from . import samples
from .checks import CHECKS
from .observe import Action, Strictness, difference, outcome

#: Seconds that the client itself may hang, after its worker was killed, before the process ends with its stacks.
GRACE = 20


class EngineLost(Exception):
    """The operator cannot go on: its worker died or was killed."""


class Alarm:
    """Kills the worker when an operator takes longer than ``seconds``."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.rang = False

    def _ring(self) -> None:
        self.rang = True
        current = engine.current()
        pid = current.pids().get("worker-0") if current else None
        if pid:
            os.kill(pid, signal.SIGKILL)

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        self.rang = False
        timer = threading.Timer(self.seconds, self._ring)
        timer.daemon = True
        timer.start()
        faulthandler.dump_traceback_later(self.seconds + GRACE, exit=True)
        try:
            yield
        finally:
            faulthandler.cancel_dump_traceback_later()
            timer.cancel()


def start_engine(threads: int) -> None:
    dtorch.shutdown()
    dtorch.init(workers=1, device="cpu", threads_per_worker=threads)


def settle() -> str | None:
    """Wait for the worker; how it died, if it did. Reported failures belong to calls that were compared already."""
    try:
        dtorch.synchronize(0)
    except (dtorch.WorkerDied, dtorch.ControllerDied) as death:
        return words(death)
    except dtorch.DtorchError:
        pass
    current = engine.current()
    if current is None or current.is_over:
        return "the engine is over"
    return next((words(death) for death in current.dead_workers.values()), None)


def words(death: Exception) -> str:
    """How it died and what it said, without PyTorch's warnings."""
    return " ".join(line for line in str(death).split("\n") if "Warning" not in line)[:400]


def compare(op: OpInfo, sample: SampleInput, action: Action, seed: int, strict: Strictness) -> str | None:
    """Run the action on both sides; what differs, in words."""
    samples.seed_all(seed)
    eager = outcome(action, samples.copy_to(sample, "cpu", op.name))
    for attempt in ("", "again: "):
        try:
            call = samples.copy_to(sample, "dtorch:0", op.name)
        except NotImplementedError as refused:
            return f"cannot be moved: {refused}"
        samples.seed_all(seed)
        ours = outcome(action, call)
        if isinstance(ours.error, dtorch.WorkerDied | dtorch.ControllerDied):
            raise EngineLost
        if problem := difference(eager, ours, strict):
            samples.seed_all(seed)
            once_more = outcome(action, samples.copy_to(sample, "cpu", op.name))
            if difference(eager, once_more, strict):
                return f"eager differs from itself: {problem}"
            return attempt + problem
    return None


def calls(op: OpInfo, dtype: torch.dtype, most: int) -> Iterator[tuple[str, str, SampleInput, Action, int]]:
    """Everything to compare of an operator: check, which of its cases, arguments, action, seed."""
    name = samples.name_of(op)
    for index, sample in samples.chosen(op, dtype, most):
        for check, cases in CHECKS.items():
            if check == "errors":
                continue
            if check == "noncontiguous":
                if sparse(sample):
                    continue
                arguments = sample.noncontiguous()
            else:
                arguments = sample
            for case, action in cases(op, arguments):
                yield check, f"sample {index} {case}".rstrip(), arguments, action, samples.seed_of(name, index)
    for index, wrong in enumerate(samples.errors(op)):
        for _, action in CHECKS["errors"](op, wrong):
            yield "errors", f"call {index}", wrong, action, samples.seed_of(name, index)


def sparse(sample: SampleInput) -> bool:
    """Whether a tensor among the arguments has no strides."""
    leaves = tree_leaves((sample.input, sample.args, sample.kwargs))
    return any(isinstance(leaf, torch.Tensor) and leaf.layout != torch.strided for leaf in leaves)


def run_operator(
    op: OpInfo, dtype: torch.dtype, most: int, only: set[str], values: bool, say: Any
) -> dict[str, list[str]]:
    """Failures by check, each check that ran having an entry; without ``values`` all but the values are compared."""
    found: dict[str, list[str]] = {}
    for check, case, arguments, action, seed in calls(op, dtype, most):
        if only and check not in only:
            continue
        problems = found.setdefault(check, [])
        say({"at": f"{check}, {case}"})
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            warnings.filterwarnings("error", message=".*an autograd kernel was not registered")
            strict = Strictness(values, versions=check != "out")
            problem = compare(op, arguments, action, seed, strict)
        if problem:
            problems.append(f"{case}: {problem}")
    return found


def main(
    names: list[str],
    dtype: torch.dtype,
    most: int,
    limit: float,
    threads: int,
    only: set[str],
    without_values: set[str],
    out: TextIO,
) -> None:
    """Run these operators one after the other; the values of ``without_values`` are not compared."""
    torch.set_num_threads(threads)
    table = samples.operators(dtype)
    alarm = Alarm(limit)
    at = ""

    def say(what: dict[str, Any]) -> None:
        nonlocal at
        at = what.get("at", at)
        out.write(json.dumps(what) + "\n")
        out.flush()

    start_engine(threads)
    for name in names:
        say({"begin": name})
        found: dict[str, list[str]] = {}
        death = None
        with alarm.watching():
            try:
                found = run_operator(table[name], dtype, most, only, name not in without_values, say)
            except EngineLost:
                death = "the worker died"
            except Exception as error:  # the check itself, or a sample that cannot be made
                found = {"forward": [f"{at}: the check raised {type(error).__name__}: {error}"]}
            death = settle() or death
        if death:
            kind = "HUNG" if alarm.rang else "KILLED"
            start_engine(threads)
            say({"end": name, "lost": f"{kind} at {at}: {death}"})
        else:
            say({"end": name, "found": found})
    dtorch.shutdown()


if __name__ == "__main__":
    request = json.loads(sys.stdin.readline())
    faulthandler.enable()
    with os.fdopen(request.pop("results"), "w") as results:
        request["dtype"] = getattr(torch, request["dtype"])
        request["only"] = set(request["only"])
        request["without_values"] = set(request["without_values"])
        main(**request, out=results)

"""The process that runs names: reads one at a time, and writes what it found, as lines of JSON.

It may crash: its parent (run.py) starts another. A worker that dies, or a comparison that takes too long (its worker is
then killed, which wakes whoever waits for it), ends the name's run and gets a new engine.
"""

from __future__ import annotations

import dataclasses
import faulthandler
import json
import os
import signal
import sys
import threading
import time
from typing import Any

import torch

import dtorch
from dtorch.client import engine

from .compare import EngineLost
from .parts import Found, How, part

#: Seconds that the client itself may hang, after its worker was killed, before the process ends with its stacks.
GRACE = 20


class Alarm:
    """Kills the worker when more than ``seconds`` pass from one ``wind`` to the next."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.rang = False
        self._changed = threading.Condition()
        self._due: float | None = None
        threading.Thread(target=self._watch, daemon=True).start()

    def wind(self) -> None:
        """The time starts anew."""
        with self._changed:
            self.rang = False
            if self._due is None:
                self._changed.notify()
            self._due = time.monotonic() + self.seconds
        faulthandler.dump_traceback_later(self.seconds + GRACE, exit=True)

    def stop(self) -> None:
        """Nothing is watched until it is wound again."""
        faulthandler.cancel_dump_traceback_later()
        with self._changed:
            self._due = None

    def _watch(self) -> None:
        with self._changed:
            while True:
                left = None if self._due is None else self._due - time.monotonic()
                if left is not None and left <= 0:
                    self.rang = True
                    self._due = None
                    _kill_worker()
                    continue
                self._changed.wait(left)


def _kill_worker() -> None:
    current = engine.current()
    pid = current.pids().get("worker-0") if current else None
    if pid:
        os.kill(pid, signal.SIGKILL)


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


def main(results: int, limit: float, threads: int) -> None:
    """Run the names that stdin gives, each a line ``{"part", "name", "how"}``."""
    torch.set_num_threads(threads)
    alarm = Alarm(limit)
    out = os.fdopen(results, "w")

    def say(what: dict[str, Any]) -> None:
        out.write(json.dumps(what) + "\n")
        out.flush()

    last = ""

    def at(where: str) -> None:
        nonlocal last
        last = where
        say({"at": where})
        alarm.wind()

    start_engine(threads)
    say({"ready": True})
    for line in sys.stdin:
        task = json.loads(line)
        how = How(**{**task["how"], "only": tuple(task["how"]["only"])})
        found = Found()
        death = None
        at("its samples")
        try:
            found = part(task["part"]).run(task["name"], how, at)
            if how.dtype == "float32":  # of the others not every operator takes all
                found.require_results(part(task["part"]).MAY_REFUSE)
        except EngineLost:
            death = "the worker died"
        except Exception as error:  # the check itself, or a sample that cannot be made
            found.add("run", last, f"the check raised {type(error).__name__}: {error}")
        death = settle() or death
        rang = alarm.rang
        alarm.stop()
        if death:
            start_engine(threads)
            say({"lost": f"{'HUNG' if rang else 'KILLED'} at {last}: {death}"})
        else:
            say({"found": dataclasses.asdict(found)})
    dtorch.shutdown()


if __name__ == "__main__":
    faulthandler.enable()
    main(**json.loads(sys.stdin.readline()))

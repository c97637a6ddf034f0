"""A client to be ended in every way: ``python leaving_client.py WORK END``. Used by test_leaving.py.

WORK is what the workers do when it ends: "idle" nothing, "busy" a computation of a minute on worker 0, "starting" they
are not up yet. END is how it ends: by itself, or "wait", which leaves it to the test.
"""

from __future__ import annotations

import json
import os
import sys

import processes
import torch

import dtorch
from dtorch.client import engine


def announce() -> None:
    """Tell the test who there is: one line of JSON."""
    current = engine.current()
    assert current is not None
    print(json.dumps({"directory": current.directory, **current.pids()}), flush=True)


def value(worker: int) -> float:
    """Ask a worker for a value and wait for it."""
    return torch.full((3,), 2.0, device=f"dtorch:{worker}").sum().item()


def make_busy(worker: int) -> torch.Tensor:
    """Give a worker a minute's work, in single operators of many seconds each."""
    x = torch.ones(3000, 3000, device=f"dtorch:{worker}")
    x = x + torch.arange(3000, device=f"dtorch:{worker}").sin()
    total = torch.zeros((), device=f"dtorch:{worker}")
    for _ in range(4):
        total = total + torch.linalg.svdvals(x).sum()
    return total


def main(work: str, end: str) -> None:
    dtorch.init(workers=2, device="cpu")
    current = engine.current()
    assert current is not None
    result = None
    if work != "starting":
        assert current.wait_for_workers(60)
        value(1)
    if work == "busy":
        computing = processes.is_computing(current.pids()["worker-0"])
        result = make_busy(0)
        assert processes.wait_until(computing, 60)
    announce()
    if end == "wait":
        if result is not None:
            result.item()
        else:
            sys.stdin.read()
    elif end == "exception":
        raise KeyError("the program's own mistake")
    elif end == "_exit":
        os._exit(7)
    elif end == "exec":
        os.execv("/bin/sleep", ["sleep", "60"])
    elif end == "thread":
        import threading

        threading.Thread(target=dtorch.shutdown).start()
    elif end == "fork":
        pid = os.fork()
        if pid == 0:
            sys.exit(0)  # runs the exit handlers, which must do nothing here
        assert os.waitpid(pid, 0)[1] == 0
        value(1)
    else:
        assert end == "normal", end


if __name__ == "__main__":
    main(*sys.argv[1:])

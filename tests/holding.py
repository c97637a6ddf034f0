"""Keeping a worker from what the client issues: by giving it something else to do, or by stopping it.

Work is measured in multiplications, not in seconds: it takes a worker hundreds of milliseconds, and a client a
fraction of one to issue it and whatever follows. Tests compare counters and never time anything.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from dtorch.client.engine import Engine


def busy(worker: int = 0, rounds: int = 15) -> torch.Tensor:
    """Issue ``rounds`` products of two matrices of 1500 rows: 7 thousand million additions and multiplications each.

    The result, of shape (1500, 1500), is finite; asking for any of it waits for all of it. The matrices take turns in
    the same memory, so that the worker's heap is as it was.
    """
    x = torch.full((1500, 1500), 1e-4, device=f"dtorch:{worker}")
    y = torch.empty_like(x)
    for _ in range(rounds):
        torch.mm(x, x, out=y)
        x, y = y.add_(1e-4), x
    return x


@contextmanager
def held(engine: Engine, worker: int = 0) -> Iterator[None]:
    """Stop a worker that has nothing to do: what is issued inside the block is executed after it."""
    import dtorch

    dtorch.synchronize(worker)
    pid = engine.pids()[f"worker-{worker}"]
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)

"""Giving a worker something to do, so that what the client issues meanwhile has to wait.

The work is measured in multiplications, not in seconds: it takes a worker hundreds of milliseconds, and a client a
fraction of one to issue it and whatever follows. Tests compare counters and never time anything.
"""

from __future__ import annotations

import torch


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

"""State that is not in a call's arguments still counts: PyTorch's switches, CPU numbers among the arguments, a fork.

GEO-1 and SES-1 are invariants of ``native/client/geometry.h`` and ``native/client/session.h``.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
import torch

import dtorch

if TYPE_CHECKING:
    from dtorch.client.engine import Engine


@pytest.fixture
def _float64() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def test_geo1_a_result_follows_the_default_dtype(engine: Engine, _float64: None) -> None:
    n = dtorch.tensor([2, 3])
    for default in (torch.float32, torch.float64, torch.float32, torch.float64):
        torch.set_default_dtype(default)
        root = n.sqrt()
        assert root.dtype == default
        assert torch.equal(root.cpu(), torch.tensor([2, 3]).sqrt())


@pytest.mark.parametrize("write", ["add_", "mul_", "out"])
def test_a_cpu_number_takes_no_result(engine: Engine, write: str) -> None:
    """Written by the worker's copy of it only, the result would be lost without a word."""
    number, ours = torch.ones(()), dtorch.ones(())
    with pytest.raises(RuntimeError, match="same device"):
        if write == "out":
            torch.add(ours, 1, out=number)
        else:
            getattr(number, write)(ours * 2)
    assert number.item() == 1.0


def test_ses1_raising_a_workers_death_holds_nobody_up(no_engine: None) -> None:
    """One thread meets the dead worker again and again while another takes the session's lock with the GIL held."""
    dtorch.init(workers=2, device="cpu")
    engine = dtorch.client.lifecycle.running()
    assert engine.wait_for_workers(60)
    dead = torch.ones(3, device="dtorch:1")
    dead.cpu()
    os.kill(engine.pids()["worker-1"], 9)
    with pytest.raises(dtorch.WorkerDied):
        dead.cpu()
    done = threading.Event()

    def meet() -> None:
        for _ in range(200):
            with pytest.raises(dtorch.WorkerDied):
                dead + 1
        done.set()

    threading.Thread(target=meet, daemon=True).start()
    x = torch.ones(3, device="dtorch:0")
    while not done.wait(0):
        assert (x + 1).to_torch_async().get().tolist() == [2.0] * 3


def test_a_forked_child_may_start_an_engine_of_its_own(no_engine: None) -> None:
    dtorch.init(workers=1, device="cpu")
    assert dtorch.ones(2).tolist() == [1.0, 1.0]
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            dtorch.init(workers=1, device="cpu")
            status = 0 if (dtorch.ones(2) * 2).tolist() == [2.0, 2.0] else 2
            dtorch.shutdown()
        finally:
            os._exit(status)
    assert os.waitpid(pid, 0)[1] == 0
    assert dtorch.ones(2).tolist() == [1.0, 1.0]

"""Replies that come straight from the workers: who reads them, what goes the other way, and what a death leaves.

DIR-1 to DIR-3 are invariants of ``native/client/direct.h``, SES-3 of ``native/client/session.h``.
"""

from __future__ import annotations

import os
import signal
import threading
from typing import TYPE_CHECKING

import pytest
import torch

import dtorch
from dtorch.client import engine as engine_module
from dtorch.protocol import DIRECT_BYTES

if TYPE_CHECKING:
    from dtorch.client.engine import Engine
    from dtorch.client.futures import TensorFuture

PATIENCE = 60


def test_dir1_every_reply_reaches_the_thread_that_asked(engine: Engine) -> None:
    """Several threads wait for the same worker: each reads packets that are the others'."""
    wrong: list[tuple[int, float]] = []

    def ask(thread: int) -> None:
        for i in range(200):
            number = 1000 * thread + i
            got = torch.full((1,), number, dtype=torch.float64, device="dtorch:0").item()
            if got != number:
                wrong.append((number, got))

    threads = [threading.Thread(target=ask, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_dir1_futures_complete_while_another_thread_waits(engine: Engine) -> None:
    """A waiting thread takes in replies of futures; their callbacks run all the same."""
    done = threading.Semaphore(0)

    def tell(future: TensorFuture) -> None:
        done.release()

    rounds = 100
    for i in range(rounds):
        future = torch.full((1,), i, device="dtorch:0").to_torch_async()  # type: ignore[attr-defined]
        future.add_done_callback(tell)
        torch.ones(1, device="dtorch:0").item()
    for _ in range(rounds):
        assert done.acquire(timeout=PATIENCE), "every callback runs although nothing else happens"


def test_what_the_direct_way_cannot_take_comes_by_way_of_the_controller(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SES-3. While the reply thread is held up, the socket fills; the worker does not wait for it."""
    held, go_on = threading.Event(), threading.Event()
    tell = engine_module.on_completed

    def hold(requests: list[int]) -> None:  # on the reply thread
        held.set()
        assert go_on.wait(PATIENCE)
        tell(requests)

    monkeypatch.setattr(engine_module, "on_completed", hold)
    torch.ones(1, device="dtorch:0").to_torch_async().add_done_callback(lambda _: None)  # type: ignore[attr-defined]
    assert held.wait(PATIENCE)
    many = [torch.full((8000,), i, device="dtorch:0").to_torch_async() for i in range(200)]  # type: ignore[attr-defined]
    # It gives the other worker something after it has answered them all, 6 MB that nobody has read yet.
    torch.ones(1, device="dtorch:0").to("dtorch:1").item()
    go_on.set()
    assert [f.get(PATIENCE)[7999].item() for f in many] == list(range(200))


def test_a_long_reply_comes_whole(engine: Engine) -> None:
    """Longer than a packet: one row for each of many storages."""
    with dtorch.allocation_log(0) as log:
        for _ in range(DIRECT_BYTES // 10):
            torch.ones(1, device="dtorch:0")
    assert len(log) >= DIRECT_BYTES // 10


def test_dir2_what_a_worker_said_before_its_death_counts(no_engine: None) -> None:
    """A worker answers in order: what was answered is a beginning of what was asked, without holes.

    So few answers fit in the socket, whoever reads it when; none has to go by way of the controller.
    """
    for _ in range(3):
        dtorch.init(workers=1, device="cpu", threads_per_worker=1)
        try:
            x = torch.full((300, 300), 1e-3, device="dtorch:0")
            current = engine_module.current()
            assert current and current.wait_for_workers(PATIENCE)
            asked = [(x @ x)[0, :1].to_torch_async() for _ in range(100)]  # type: ignore[attr-defined]
            asked[20].get(PATIENCE)
            os.kill(current.pids()["worker-0"], signal.SIGKILL)
            answered: list[bool] = []
            for future in asked:
                try:
                    future.get(PATIENCE)
                    answered.append(True)
                except dtorch.WorkerDied:
                    answered.append(False)
            assert answered == sorted(answered, reverse=True)
            assert answered[20]
        finally:
            dtorch.shutdown()


def test_dir3_no_descriptor_is_left(no_engine: None) -> None:
    def cycle() -> None:
        dtorch.init(workers=2, device="cpu", threads_per_worker=1)
        torch.ones(1, device="dtorch:1").item()
        dtorch.shutdown()

    cycle()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        cycle()
    assert len(os.listdir("/proc/self/fd")) == before

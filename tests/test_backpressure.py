"""The client runs ahead of the workers, as far as its window allows, and no further.

SES-4 is an invariant of ``native/client/session.h``, ENG-4 of ``dtorch/client/engine.py``.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable

import processes
import pytest
import torch
from holding import busy

import dtorch
from dtorch.client import engine as engine_module
from dtorch.client.engine import Engine

PATIENCE = 60


def issued_and_executed(worker: int = 0) -> tuple[int, int]:
    """Records of a worker: issued by this process, and executed as far as it knows."""
    return dtorch.progress()[worker]


def fresh(monkeypatch: pytest.MonkeyPatch, **settings: int) -> Engine:
    """An engine of two workers, under these settings."""
    for name, value in settings.items():
        monkeypatch.setenv(f"DTORCH_{name.upper()}", str(value))
    dtorch.init(workers=2, device="cpu", threads_per_worker=1)
    engine = engine_module.current()
    assert engine is not None
    assert engine.wait_for_workers(PATIENCE)
    return engine


def most_memory(pid: int) -> int:
    """The most bytes a process had in memory so far."""
    with open(f"/proc/{pid}/status") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith("VmHWM"))


def test_ten_thousand_operators_are_issued_while_the_worker_is_busy(engine: Engine) -> None:
    x = dtorch.zeros(1) + 1
    x.item()
    wait = busy(rounds=30)
    held_at = issued_and_executed()[0]
    for _ in range(10_000):
        x = x + 1
    issued, executed = issued_and_executed()
    assert issued >= held_at + 10_000
    assert executed < held_at, "the worker was still in the operators before"
    assert dtorch.client_stats()["waits"] == 0
    assert x.item() == 10_001.0
    assert dtorch.worker_stats()["executed"] >= issued
    del wait


def test_each_worker_is_run_ahead_of(engine: Engine) -> None:
    waits = [busy(worker, rounds=15) for worker in range(2)]
    held_at = [issued_and_executed(worker)[0] for worker in range(2)]
    xs = [torch.zeros(1, device=f"dtorch:{worker}") for worker in range(2)]
    for _ in range(2_000):
        xs = [x + 1 for x in xs]
    for worker in range(2):
        issued, executed = issued_and_executed(worker)
        assert issued >= held_at[worker] + 2_000
        assert executed < held_at[worker]
    assert [x.item() for x in xs] == [2_000.0] * 2
    del waits


def test_ses4_a_small_window_holds_the_client_back_and_everything_is_right(
    no_engine: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    fresh(monkeypatch, inflight_mb=1)
    x = dtorch.zeros(1)
    wait = busy(rounds=8)
    n = 150_000
    for _ in range(n):
        x = x + 1
    stats = dtorch.client_stats()
    assert stats["bytes"] > 1 << 20
    assert stats["waits"] > 0
    assert x.item() == n
    dtorch.synchronize()
    assert dtorch.worker_stats()["storages"] == 2
    del wait


def test_ses4_memory_stays_bounded(no_engine: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Uploads that travel in records, 180 MB of them, through a window of one.

    What a worker's heap keeps for later use counts as well, so the bound is not the window's.
    """
    engine = fresh(monkeypatch, inflight_mb=1)
    source = torch.full((15_000,), 0.25)
    total = dtorch.zeros(()) + source.to("dtorch").sum() * 0
    busy(rounds=2)[0, 0].item()  # the matrices' memory counts as there from the start
    total.item()
    pids = {**engine.pids(), "client": os.getpid()}
    before = {name: most_memory(pid) for name, pid in pids.items()}
    wait = busy(rounds=15)
    for _ in range(3_000):
        total = total + source.to("dtorch").sum()
    assert dtorch.client_stats()["waits"] > 0
    assert total.item() == 15_000 * 3_000 / 4
    grown = {name: (most_memory(pid) - before[name]) >> 20 for name, pid in pids.items()}
    assert all(mib < 64 for mib in grown.values()), grown
    del wait


def uploads_under_way() -> int:
    """Segments of large uploads that this process still holds."""
    held = 0
    for fd in os.listdir("/proc/self/fd"):
        try:
            held += "dtorch-upload" in os.readlink(f"/proc/self/fd/{fd}")
        except OSError:
            continue
    return held


def test_ses4_large_uploads_are_bounded_too(no_engine: None, monkeypatch: pytest.MonkeyPatch) -> None:
    fresh(monkeypatch, upload_mb=8)
    source = torch.ones(1 << 19)  # 2 MiB
    wait = busy(rounds=8)
    sums, most = [], 0
    for i in range(40):
        sums.append((source + i).to("dtorch").sum())
        most = max(most, uploads_under_way())
    assert dtorch.client_stats()["waits"] > 0
    assert 4 <= most <= 6, "8 MiB, and the one that went over"
    assert [s.item() for s in sums] == [(1 << 19) * (i + 1.0) for i in range(40)]
    dtorch.synchronize()
    dtorch.empty_cache()  # what lies here to be used again
    assert uploads_under_way() == 0
    del wait


def flood() -> None:
    """Issue operators until something stops it."""
    x = dtorch.zeros(1)
    while True:
        x = x + 1


def once_it_is_held_back(act: Callable[[], None]) -> threading.Thread:
    """Do it, on another thread, as soon as the client is waiting for room in its window."""

    def run() -> None:
        if processes.wait_until(lambda: dtorch.client_stats()["waits"] > 0, PATIENCE):
            act()

    thread = threading.Thread(target=run)
    thread.start()
    return thread


def test_ctrl_c_ends_the_waiting(no_engine: None, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = fresh(monkeypatch, inflight_mb=1)
    os.kill(engine.pids()["worker-0"], signal.SIGSTOP)
    try:
        thread = once_it_is_held_back(lambda: os.kill(os.getpid(), signal.SIGINT))
        with pytest.raises(KeyboardInterrupt):
            flood()
        thread.join()
    finally:
        os.kill(engine.pids()["worker-0"], signal.SIGCONT)
    assert (dtorch.ones(3) + 1).tolist() == [2.0] * 3  # nothing is broken


def test_eng4_a_worker_that_dies_ends_the_waiting(no_engine: None, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = fresh(monkeypatch, inflight_mb=1)
    worker = engine.pids()["worker-0"]
    os.kill(worker, signal.SIGSTOP)
    thread = once_it_is_held_back(lambda: os.kill(worker, signal.SIGKILL))
    with pytest.raises(dtorch.WorkerDied) as caught:
        flood()
    thread.join()
    assert caught.value.worker == 0
    assert torch.ones(3, device="dtorch:1").sum().item() == 3.0  # the window is open for the other one


def test_shutdown_ends_the_waiting(no_engine: None, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = fresh(monkeypatch, inflight_mb=1)
    os.kill(engine.pids()["worker-0"], signal.SIGSTOP)
    thread = once_it_is_held_back(dtorch.shutdown)
    with pytest.raises(dtorch.EngineError, match="shut down"):
        flood()
    thread.join()


def test_other_threads_go_on_while_one_is_held_back(no_engine: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """SES-1: who waits for room holds no lock: values that are on their way arrive, and tensors can be dropped."""
    engine = fresh(monkeypatch, inflight_mb=1)
    ready = torch.ones(3, device="dtorch:1")
    ready.cpu()
    future = ready.to_torch_async()
    seen: list[float] = []
    os.kill(engine.pids()["worker-0"], signal.SIGSTOP)

    def use() -> None:
        nonlocal ready
        seen.append(future.get(timeout=PATIENCE).sum().item())
        del ready
        seen.append(float(len(dtorch.progress())))
        os.kill(engine.pids()["worker-0"], signal.SIGCONT)

    thread = once_it_is_held_back(use)
    x = dtorch.zeros(1)
    for _ in range(100_000):
        x = x + 1
    thread.join()
    assert seen == [3.0, 2.0]
    assert x.item() == 100_000.0

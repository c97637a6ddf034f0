"""Memory: what the client lets go of is freed on the worker right after its last use, however busy the worker is.

WIRE-2 is an invariant of ``dtorch/protocol.py``, EXE-2 of ``native/worker/executor.h``, SHM-2 of
``native/common/segment.h``.
"""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import processes
import pytest
import torch
from holding import busy
from mistakes import computed
from torch import nn

import dtorch
from dtorch import _client
from dtorch.protocol import INLINE_BYTES

if TYPE_CHECKING:
    from dtorch.client.engine import Engine

Log = list[tuple[int, int, int]]


@pytest.fixture(autouse=True)
def _engine(engine: Engine) -> Iterator[None]:
    gc.collect()
    dtorch.synchronize()
    yield


def storage(t: torch.Tensor) -> int:
    return _client.storage_of(t)["id"]


def most_alive(log: Log) -> int:
    """How many storages that were made inside the log lived at once."""
    alive: set[int] = set()
    most = 0
    for _, number, nbytes in log:
        if nbytes >= 0:
            alive.add(number)
        else:
            alive.discard(number)
        most = max(most, len(alive))
    return most


def freed_at(log: Log, number: int) -> int:
    """The record after which a storage was freed."""
    (seq,) = [seq for seq, n, nbytes in log if n == number and nbytes < 0]
    return seq


def made_at(log: Log, number: int) -> int:
    (seq,) = [seq for seq, n, nbytes in log if n == number and nbytes >= 0]
    return seq


def four_lines(n: int = 1000) -> torch.Tensor:
    a = dtorch.rand(n)
    b = a.exp()
    c = b.sin()
    d = c * 2
    return d  # noqa: RET504 (the four lines are the point: eager PyTorch holds four tensors here)


def test_four_lines_hold_two_tensors() -> None:
    four_lines()
    for _ in range(50):
        dtorch.synchronize()
        with dtorch.allocation_log() as log:
            result = four_lines()
        made = [number for _, number, nbytes in log if nbytes >= 0]
        assert len(made) == 4
        assert most_alive(log) <= 2
        assert len(log) == 7, "three of the four are freed"
        del result


def test_four_lines_hold_two_tensors_bytes() -> None:
    n = 100_000
    four_lines(n)
    dtorch.synchronize()
    dtorch.reset_peak_memory_stats()
    before = dtorch.memory_allocated()
    result = four_lines(n)
    assert dtorch.max_memory_allocated() - before <= 2 * 4 * n + 4096
    assert dtorch.memory_allocated() - before <= 4 * n + 4096
    del result
    assert dtorch.memory_allocated() - before <= 4096


def test_wire2_a_storage_is_freed_right_after_its_last_pending_use() -> None:
    with dtorch.allocation_log() as log:
        wait = busy()
        a = dtorch.rand(100)
        b = a + 1
        c = a * b
        d = c.sum()
        numbers = [storage(t) for t in (a, b, c, d)]
        del a, b
        for _ in range(100):
            d = d + 1
        del c
        e = d * 2  # and a batch more, whose record comes after all of these releases
        _client.flush()
        assert dtorch.progress()[0][1] < made_at_least(e), "the worker was still busy"
    na, nb, nc, nd = numbers
    assert freed_at(log, na) == freed_at(log, nb) == made_at(log, nc)
    assert freed_at(log, nc) == made_at(log, nd)
    assert freed_at(log, nd) == made_at(log, nd) + 1
    assert e.item() == 2 * (d.item())
    del wait


def made_at_least(t: torch.Tensor) -> int:
    """The number of the record that the client issued last for the worker of ``t``."""
    return dtorch.progress()[t.device.index][0]


def test_wire2_not_before_its_last_pending_use() -> None:
    for _ in range(20):
        a = dtorch.ones(1000)
        b = dtorch.zeros(1000)
        for _ in range(20):
            b = b + a
        del a
        assert b.unique().tolist() == [20.0]


def test_exe2_releases_act_ahead_of_queued_work() -> None:
    """Two hundred temporaries of a megabyte each, issued while the worker is busy: it never holds more than three."""
    n = 1 << 18
    total = dtorch.zeros(())
    total + dtorch.rand(n).mul(2).sum()
    dtorch.synchronize()
    dtorch.reset_peak_memory_stats()
    wait = busy(rounds=8)
    held = dtorch.progress()
    for _ in range(200):
        total = total + dtorch.rand(n).mul(2).sum()
    assert dtorch.progress()[0][0] >= held[0][0] + 600
    total.item()
    del wait
    most = dtorch.max_memory_allocated()
    assert most < (3 * 1500 * 1500 + 3 * n) * 4 + (1 << 20)


def test_what_no_operator_named_is_never_sent() -> None:
    before = dtorch.client_stats()
    for _ in range(10):
        x = dtorch.empty(1000)
        x.view(10, 100).t()[3]
        torch.empty_like(x)
        del x
    after = dtorch.client_stats()
    assert (after["records"], after["releases"]) == (before["records"], before["releases"])


@pytest.mark.parametrize(
    "view",
    [lambda x: x[1], lambda x: x.t(), lambda x: x.view(-1)[3:7], lambda x: x.detach(), lambda x: x.untyped_storage()],
    ids=["row", "transposed", "slice", "detached", "storage"],
)
def test_a_view_keeps_its_storage(view: Callable[[torch.Tensor], object]) -> None:
    before = dtorch.worker_stats()["storages"]
    x = dtorch.arange(12.0).view(3, 4)
    kept = view(x)
    del x
    assert dtorch.worker_stats()["storages"] == before + 1
    if isinstance(kept, torch.Tensor):
        assert kept.flatten()[1].item() in (1.0, 4.0, 5.0)
    del kept
    assert dtorch.worker_stats()["storages"] == before


def test_a_storage_that_set_replaced_goes() -> None:
    before = dtorch.worker_stats()["storages"]
    x, y = dtorch.ones(3), dtorch.zeros(5)
    x.set_(y)
    assert dtorch.worker_stats()["storages"] == before + 1
    x.data = dtorch.full((2,), 7.0)
    del y
    assert dtorch.worker_stats()["storages"] == before + 1
    assert x.tolist() == [7.0, 7.0]


def test_backward_lets_go_of_what_forward_saved() -> None:
    layers = nn.Sequential(*(nn.Linear(64, 64) for _ in range(6))).to("dtorch")
    x = dtorch.rand(256, 64)
    layers(x).sum().backward()  # the gradients exist from here on
    gc.collect()
    before = dtorch.worker_stats()
    loss = layers(x).sum()
    during = dtorch.worker_stats()
    assert during["storages"] > before["storages"] + 5
    loss.backward()
    after = dtorch.worker_stats()
    assert after["storages"] == before["storages"] + 1  # the loss
    assert after["allocated"] <= before["allocated"] + 4096


def test_training_does_not_grow() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(20, 16), nn.Linear(16, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 20))
    model.to("dtorch")
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    ids = dtorch.tensor([[1, 2, 3, 4]])

    def step() -> torch.Tensor:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten())
        loss.backward()
        optimizer.step()
        return loss.detach()

    for _ in range(3):
        last = step()
    before, client = dtorch.worker_stats(), dtorch.client_stats()
    for i in range(200):
        last = step()
        if i % 50 == 0:
            last.item()
    after, client_after = dtorch.worker_stats(), dtorch.client_stats()
    assert after["storages"] == before["storages"]
    assert abs(after["allocated"] - before["allocated"]) <= 4096
    assert after["loans"] == 0
    # A step's records and releases are the same each time, and what is made is let go.
    assert client_after["geometry_misses"] == client["geometry_misses"]
    assert client_after["releases"] - client["releases"] >= 200


def test_client_stats_count() -> None:
    x = dtorch.ones(3) + 1  # the operator has its number from here on
    dtorch.synchronize(0)
    before = dtorch.client_stats()
    assert set(before) >= {"records", "releases", "batches", "bytes", "waits", "geometry_misses"}
    for _ in range(10):
        x = x + 1
    dtorch.synchronize(0)
    after = dtorch.client_stats()
    assert after["records"] - before["records"] == 11  # ten operators and the SYNC
    assert after["releases"] - before["releases"] == 10
    assert after["batches"] > before["batches"]
    assert after["bytes"] > before["bytes"]
    assert after["waits"] == before["waits"]


def test_releases_from_other_threads_and_from_the_garbage_collector() -> None:
    before = dtorch.worker_stats()["storages"]
    kept = [dtorch.ones(10) * i for i in range(100)]

    def drop() -> None:
        while kept:
            try:
                kept.pop()
            except IndexError:
                return

    threads = [threading.Thread(target=drop) for _ in range(4)]
    for t in threads:
        t.start()
    for i in range(200):
        dtorch.ones(3) + i
    for t in threads:
        t.join()
    cycle: list[object] = [dtorch.ones(3)]
    cycle.append(cycle)
    del cycle
    gc.collect()
    assert dtorch.worker_stats()["storages"] == before


def test_a_failed_operator_leaves_no_storages() -> None:
    before = dtorch.worker_stats()["storages"]
    for _ in range(20):
        bad = nn.functional.embedding(computed([9]), dtorch.rand(3, 2)) * 2
        with pytest.raises(dtorch.RemoteError):
            bad.cpu()
        del bad
        with pytest.raises(RuntimeError):
            dtorch.rand(2, 3) @ dtorch.rand(2, 3)
    assert dtorch.worker_stats()["storages"] == before


@pytest.mark.parametrize("n", [10, INLINE_BYTES])
def test_copies_between_workers_leave_nothing(n: int) -> None:
    x = torch.ones(n, device="dtorch:0")
    before = [dtorch.worker_stats(i)["storages"] for i in range(2)]
    for _ in range(30):
        y = (x + 1).to("dtorch:1")
        x.copy_(y)
    assert x.unique().tolist() == [31.0]
    del y
    stats = [dtorch.worker_stats(i) for i in range(2)]
    assert [s["storages"] for s in stats] == before
    # The reader gives a loan back when its tensor goes, on its own time.
    assert processes.wait_until(lambda: [dtorch.worker_stats(i)["loans"] for i in range(2)] == [0, 0], 10)


def descriptors(pid: int | str) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def test_shm2_no_descriptor_stays_open(engine: Engine) -> None:
    pids = engine.pids()
    source = torch.ones(INLINE_BYTES)

    def rounds(n: int) -> None:
        for _ in range(n):
            x = source.to("dtorch:0")
            y = x.to("dtorch:1")
            assert y.cpu()[0] == 1.0
            (y + 1).to_torch_async()
        dtorch.synchronize()
        for worker in range(2):
            dtorch.worker_stats(worker)

    rounds(5)
    before = {name: descriptors(pid) for name, pid in pids.items()} | {"client": descriptors("self")}
    rounds(50)
    after = {name: descriptors(pid) for name, pid in pids.items()} | {"client": descriptors("self")}
    assert all(after[name] <= before[name] + 2 for name in before), (before, after)


def test_the_log_is_empty_without_work_and_ends_with_the_block() -> None:
    with dtorch.allocation_log() as log:
        pass
    assert log == []
    with dtorch.allocation_log("dtorch:1") as log:
        x = torch.ones(5, device="dtorch:1")
        dtorch.ones(7)  # on the other worker
    assert [(number, nbytes) for _, number, nbytes in log] == [(storage(x), 20)]
    x + 1
    dtorch.synchronize(1)
    assert len(log) == 1

"""The pool of a worker's memory, in this process: any order of allocations keeps its blocks apart and together."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dtorch import _worker

GRANULE = 2 << 20
MIB = 1 << 20

SIZES = st.one_of(st.integers(1, 300), st.integers(1, 200_000), st.sampled_from([64, 4096, MIB, 3 * MIB + 1]))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.booleans(), SIZES, st.integers(0, 1 << 30)), max_size=120))
def test_pool1_blocks_tile_the_segment_whatever_comes_and_goes(steps: list[tuple[bool, int, int]]) -> None:
    blocks: dict[int, int] = {}
    for make, size, choice in steps:
        if make or not blocks:
            address = _worker.pool_allocate(size)
            assert address
            assert address % 64 == 0
            assert all(address + size <= other or other + n <= address for other, n in blocks.items())
            blocks[address] = size
        else:
            address = sorted(blocks)[choice % len(blocks)]
            del blocks[address]
            _worker.pool_free(address)
        _worker.pool_check()
    for address in blocks:
        _worker.pool_free(address)
    _worker.pool_check()
    _worker.pool_trim()
    assert _worker.allocator_stats()["reserved"] == GRANULE


def test_pool2_free_pages_go_back_and_the_limit_holds() -> None:
    before = _worker.allocator_stats()["reserved"]
    address = _worker.pool_allocate(64 * MIB)
    assert _worker.allocator_stats()["reserved"] - before >= 62 * MIB
    _worker.pool_limit(80 * MIB)
    try:
        assert not _worker.pool_allocate(64 * MIB)
        _worker.pool_free(address)
        assert _worker.pool_trim() >= 62 * MIB
        again = _worker.pool_allocate(64 * MIB)
        assert again
        _worker.pool_free(again)
    finally:
        _worker.pool_limit(1 << 62)
    assert not _worker.pool_allocate(1 << 62)


@pytest.mark.parametrize("threads", [1, 4])
def test_operators_may_allocate_on_any_thread(threads: int) -> None:
    """In a process of its own, where PyTorch's allocator is the pool for good."""
    program = f"""
import os; os.environ["DTORCH_ROLE"] = "worker"
import threading, torch
from dtorch import _worker
_worker.install_allocator()
def work(seed):
    torch.manual_seed(seed)
    kept = []
    for i in range(300):
        kept.append(torch.rand(1 + 37 * i % 5000))
        if i % 3 == 0: kept.pop(i % len(kept)).sum()
threads = [threading.Thread(target=work, args=(i,)) for i in range({threads})]
[t.start() for t in threads]; [t.join() for t in threads]
_worker.pool_check()
print(_worker.allocator_stats()["allocated"])
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 200_000  # what the generators and the threads hold, none of the tensors

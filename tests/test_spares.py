"""Segments of uploads that come back and are filled again.

SPA-1 and SPA-2 are invariants of ``native/client/spares.h``.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
import torch
from holding import busy

import dtorch

if TYPE_CHECKING:
    from dtorch.client.engine import Engine

PATIENCE = 60
N = 1 << 18  # elements of float32: 1 MiB


@pytest.fixture(autouse=True)
def _nothing_here(engine: Engine) -> Iterator[None]:
    dtorch.empty_cache()
    yield
    dtorch.empty_cache()


def recycled() -> int:
    return dtorch.client_stats()["recycled_uploads"]


def spare_bytes() -> int:
    return dtorch.client_stats()["spare_bytes"]


def until_returned(nbytes: int) -> None:
    deadline = time.monotonic() + PATIENCE
    while spare_bytes() < nbytes:
        assert time.monotonic() < deadline, f"{spare_bytes()} of {nbytes} bytes came back"
        dtorch.synchronize()


def test_an_upload_takes_the_segment_of_one_that_is_gone() -> None:
    before = recycled()
    for i in range(5):
        x = torch.full((N,), float(i)).to("dtorch:0")
        assert x[N - 1].item() == i
        del x
        until_returned(4 * N)
    assert recycled() - before == 4
    assert dtorch.memory_allocated(0) == 0


def test_spa1_no_segment_is_filled_while_a_tensor_stands_on_it() -> None:
    first = torch.full((N,), 1.0).to("dtorch:0")
    view = first[: N // 2]
    del first
    dtorch.synchronize()
    second = torch.full((N,), 2.0).to("dtorch:0")
    assert (view.sum().item(), second.sum().item()) == (N // 2, 2 * N)


def test_spa1_a_fetched_value_stays_as_it_was() -> None:
    """It is mapped here from the worker's memory, which is the upload's segment."""
    x = torch.full((N,), 1.0).to("dtorch:0")
    value = x.cpu()
    del x
    dtorch.synchronize()
    y = torch.full((N,), 2.0).to("dtorch:0")
    dtorch.synchronize()
    assert value.sum().item() == N
    del value, y
    until_returned(8 * N)


def test_spa1_what_the_worker_has_not_executed_yet_is_not_written() -> None:
    """Many uploads of one size are issued while the worker is busy: none takes another's segment."""
    for _ in range(3):  # some are here already
        torch.zeros(N).to("dtorch:0")
    work = busy(rounds=5)
    sums = [torch.full((N,), float(i)).to("dtorch:0").sum() for i in range(20)]
    assert [s.item() for s in sums] == [i * N for i in range(20)]
    del work


def test_spa1_another_worker_may_get_it() -> None:
    for i in range(4):
        x = torch.full((N,), float(i)).to(f"dtorch:{i % 2}")
        assert x.sum().item() == i * N
        del x
        dtorch.synchronize()


def test_spa2_what_is_not_used_goes() -> None:
    torch.zeros(N).to("dtorch:0").sum().item()
    until_returned(4 * N)
    deadline = time.monotonic() + PATIENCE
    while spare_bytes():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_spa2_no_more_lies_here_than_is_allowed() -> None:
    large = 96 << 20
    many = [torch.zeros(large, dtype=torch.uint8).to("dtorch:0") for _ in range(12)]
    dtorch.synchronize()
    many.clear()
    until_returned(5 * large)
    dtorch.synchronize()
    assert spare_bytes() <= 1 << 30


def test_an_upload_in_another_size_does_not_take_one_that_is_much_larger() -> None:
    torch.zeros(4 * N).to("dtorch:0").sum().item()
    until_returned(16 * N)
    before = recycled()
    assert torch.full((N,), 3.0).to("dtorch:0").sum().item() == 3 * N
    assert recycled() == before


def test_writes_on_the_worker_stay_there() -> None:
    """The worker writes to the segment it has; the next upload in it brings its own values."""
    x = torch.full((N,), 1.0).to("dtorch:0")
    x.mul_(5)
    assert x.sum().item() == 5 * N
    del x
    until_returned(4 * N)
    source = torch.full((N,), 2.0)
    y = source.to("dtorch:0")
    y.add_(1)
    assert y.sum().item() == 3 * N
    assert source.sum().item() == 2 * N

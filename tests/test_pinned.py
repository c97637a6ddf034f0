"""Pinned memory: what is pinned, uploads from it without a copy of the client's, and its reuse.

PIN-1 and PIN-2 are invariants of ``native/client/pinned.h``.
"""

from __future__ import annotations

import gc
import itertools
import os
from typing import TYPE_CHECKING, Any

import pytest
import torch
from holding import held
from torch.utils.data import DataLoader, Dataset

import dtorch
from dtorch.protocol import INLINE_BYTES

if TYPE_CHECKING:
    from dtorch.client.engine import Engine

LARGE = 4 * INLINE_BYTES  # elements


def copied(t: torch.Tensor, **how: Any) -> int:
    """Bytes that the client copies to upload a tensor."""
    before = dtorch.client_stats()["upload_bytes"]
    there = t.to("dtorch:1", **how)
    n = dtorch.client_stats()["upload_bytes"] - before
    assert torch.equal(there.cpu(), t)
    return n


@pytest.mark.filterwarnings("ignore:The argument 'device' of Tensor")
def test_what_is_pinned(engine: Engine) -> None:
    x = torch.arange(10.0)
    p = x.pin_memory()
    assert p.is_pinned()
    assert torch.equal(p, x)
    assert not x.is_pinned()
    assert p.pin_memory() is p
    assert p[3:].is_pinned()
    assert torch.empty(3, 4, pin_memory=True).is_pinned()
    assert torch.zeros(3, dtype=torch.int64, pin_memory=True).tolist() == [0] * 3
    assert torch.empty_like(x, pin_memory=True).is_pinned()
    assert x.untyped_storage().pin_memory("dtorch").is_pinned("dtorch")
    assert not p.clone().is_pinned()
    assert torch.empty(0).pin_memory().numel() == 0
    assert p.device == torch.device("cpu")
    with pytest.raises(RuntimeError, match="pin"):
        x.to("dtorch").pin_memory()
    with pytest.raises(RuntimeError, match="pin"):
        torch.empty(3, device="dtorch", pin_memory=True)


def test_pinning_needs_no_engine(no_engine: None) -> None:
    assert torch.ones(3).pin_memory().is_pinned()
    assert not dtorch.is_initialized()


@pytest.mark.parametrize("workers", [0, 2])
def test_a_dataloader_that_pins_needs_no_engine(no_engine: None, workers: int) -> None:
    batches = list(DataLoader(Samples(), batch_size=6, num_workers=workers, pin_memory=True))
    assert all(batch["picture"].is_pinned() for batch in batches)
    assert not dtorch.is_initialized()  # so that the program can still say how many workers it wants


def test_an_upload_from_pinned_memory_costs_the_client_no_copy(engine: Engine) -> None:
    p = torch.randn(LARGE).pin_memory()
    assert copied(p, non_blocking=True) == 0
    assert copied(p[LARGE // 2 :], non_blocking=True) == 0
    assert copied(p.view(4, -1).t(), non_blocking=True) == 0
    assert copied(p) == p.nbytes  # it promises nothing about later writes, so the value is taken now
    assert copied(p.clone(), non_blocking=True) == p.nbytes


def test_what_a_blocking_upload_takes_is_the_value_of_that_moment(engine: Engine) -> None:
    p = torch.zeros(LARGE).pin_memory()
    with held(engine):
        x = p.to("dtorch")
        p.fill_(1)
    assert x.cpu().unique().tolist() == [0.0]


def test_a_result_comes_back_into_pinned_memory(engine: Engine) -> None:
    p = torch.empty(LARGE, pin_memory=True)
    p.copy_(torch.full((LARGE,), 3.0, device="dtorch"), non_blocking=True)
    assert p.unique().tolist() == [3.0]
    back = torch.ones(LARGE, device="dtorch").to("cpu", non_blocking=True)
    assert back.unique().tolist() == [1.0]


def test_pin1_memory_that_an_upload_reads_is_not_used_again_before(engine: Engine) -> None:
    old = torch.zeros(LARGE).pin_memory()
    place = old.data_ptr()
    with held(engine):
        x = old.to("dtorch", non_blocking=True)
        del old
        new = torch.ones(LARGE).pin_memory()
        assert new.data_ptr() != place
    assert x.cpu().unique().tolist() == [0.0]
    dtorch.synchronize()
    gc.collect()
    assert torch.empty(LARGE, pin_memory=True).data_ptr() == place


def test_blocks_do_not_overlap(engine: Engine) -> None:
    sizes = [1, 15, 16, 17, 100, 1000, 1023, 1025, 5000, 70_000, 1 << 20]
    tensors = [torch.full((n,), float(k)).pin_memory() for k, n in enumerate(sizes * 3)]
    del tensors[::2]
    tensors += [torch.full((n,), -float(k)).pin_memory() for k, n in enumerate(sizes)]
    assert all(len(t.unique()) == 1 for t in tensors)
    places = sorted((t.data_ptr(), t.nbytes) for t in tensors)
    assert all(a + n <= b for (a, n), (b, _) in itertools.pairwise(places))
    assert all(a % 64 == 0 for a, _ in places)


def _held_by_the_machine() -> int:
    """Bytes that the pinned segment of this process takes."""
    for name in os.listdir("/proc/self/fd"):
        try:
            if "dtorch-pinned" in os.readlink(f"/proc/self/fd/{name}"):
                return os.stat(f"/proc/self/fd/{name}").st_blocks * 512
        except FileNotFoundError:
            pass
    return 0


@pytest.mark.skipif(not hasattr(torch.accelerator, "empty_host_cache"), reason="this torch cannot ask for it")
def test_what_is_kept_can_be_given_back(engine: Engine) -> None:
    x = torch.ones(8 << 20).pin_memory()
    before = _held_by_the_machine()
    assert before >= x.nbytes
    del x
    gc.collect()
    assert _held_by_the_machine() == before  # kept for the next
    torch.accelerator.empty_host_cache()
    assert _held_by_the_machine() <= before - (32 << 20)
    assert torch.ones(8 << 20).pin_memory().unique().tolist() == [1.0]


def test_much_is_not_kept_at_all(engine: Engine) -> None:
    before = _held_by_the_machine()
    x = torch.empty(300 << 20, dtype=torch.uint8, pin_memory=True)
    x[:: 1 << 20] = 1
    assert _held_by_the_machine() > before
    del x
    gc.collect()
    assert _held_by_the_machine() <= before


def test_more_than_the_machine_has_is_refused(engine: Engine) -> None:
    with pytest.raises(dtorch.OutOfMemoryError, match="the machine has"):
        torch.empty(1 << 50, dtype=torch.uint8, pin_memory=True)
    assert torch.ones(3).pin_memory().is_pinned()


# -- DataLoader


class Samples(Dataset[dict[str, Any]]):
    """Samples with a name, a picture, which is large, and a label."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, i: int) -> dict[str, Any]:
        return {"name": f"sample {i}", "picture": torch.full((3, 100, 100), float(i)), "label": (i, [float(i)])}


@pytest.mark.parametrize("workers", [0, 2])
def test_a_dataloaders_batches_are_pinned_and_uploaded_without_a_copy(engine: Engine, workers: int) -> None:
    seen: list[float] = []
    for batch in DataLoader(Samples(), batch_size=4, num_workers=workers, pin_memory=True):
        label, (value,) = batch["label"]
        assert batch["picture"].is_pinned()
        assert label.is_pinned()
        assert value.is_pinned()
        assert batch["name"][0].startswith("sample")
        assert copied(batch["picture"], non_blocking=True) == 0
        there = batch["picture"].to("dtorch", non_blocking=True)
        seen += there[:, 0, 0, 0].tolist()
    assert seen == [float(i) for i in range(12)]


class Pins(Dataset[torch.Tensor]):
    """Pins what it makes, in the loader's worker process, and drops what was pinned before the fork."""

    def __init__(self, inherited: list[torch.Tensor]) -> None:
        self.inherited = inherited

    def __len__(self) -> int:
        return 8

    def __getitem__(self, i: int) -> torch.Tensor:
        if i == 0:
            assert self.inherited[0].unique().tolist() == [5.0]
        self.inherited.clear()
        mine = [torch.full((LARGE,), -1.0).pin_memory() for _ in range(4)]
        assert all(m.is_pinned() for m in mine)
        return torch.tensor(sum(m.mean().item() for m in mine))


def test_pin2_a_forked_child_leaves_the_parents_pinned_memory_alone(engine: Engine) -> None:
    mine = torch.full((LARGE,), 5.0).pin_memory()
    kept = torch.full((LARGE,), 6.0).pin_memory()
    del kept  # a free block that both processes know
    loader = DataLoader(Pins([mine]), batch_size=2, num_workers=2, multiprocessing_context="fork")
    assert [batch.tolist() for batch in loader] == [[-4.0, -4.0]] * 4
    assert mine.unique().tolist() == [5.0]
    assert torch.full((LARGE,), 7.0).pin_memory().unique().tolist() == [7.0]

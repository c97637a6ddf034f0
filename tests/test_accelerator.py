"""torch.accelerator, torch.dtorch and torch.amp as programs use them that do not know which device they have.

Devices and the current one are in test_api.py, streams and events in test_streams.py, pinned memory in test_pinned.py.
"""

from __future__ import annotations

import gc
import itertools
from typing import TYPE_CHECKING, Any

import pytest
import torch
from same import Device, eager_threads, same
from torch import nn

import dtorch

if TYPE_CHECKING:
    from dtorch.client.engine import Engine

MIB = 1 << 20


# -- memory


def test_memory_by_torch_accelerator_is_the_devices_own(engine: Engine) -> None:
    torch.accelerator.reset_peak_memory_stats(1)
    before = torch.accelerator.memory_allocated(1)
    other = torch.accelerator.memory_allocated(0)
    x = torch.ones(MIB, device="dtorch:1")
    y = x * 2
    assert torch.accelerator.memory_allocated(1) == dtorch.memory_allocated(1) == before + 8 * MIB
    del y
    assert torch.accelerator.memory_allocated("dtorch:1") == before + 4 * MIB
    assert torch.accelerator.max_memory_allocated(1) == dtorch.max_memory_allocated(1) >= before + 8 * MIB
    assert torch.accelerator.memory_reserved(1) == dtorch.memory_reserved(1) >= 4 * MIB
    assert torch.accelerator.max_memory_reserved(1) == dtorch.max_memory_reserved(1)
    assert torch.accelerator.memory_allocated() == other
    torch.accelerator.reset_peak_memory_stats(1)
    assert torch.accelerator.max_memory_allocated(1) == before + 4 * MIB
    del x


def test_what_was_made_and_freed_is_counted_from_the_last_reset(engine: Engine) -> None:
    gc.collect()
    dtorch.synchronize()
    torch.accelerator.reset_accumulated_memory_stats(0)
    x = torch.ones(MIB, device="dtorch")
    y = torch.ones(MIB).to("dtorch")  # a segment of the client's, which the worker takes over
    z = x + y
    dtorch.synchronize()  # or the sum would take the memory of one of them
    del x, y
    stats = torch.accelerator.memory_stats(0)
    assert stats["allocated_bytes.all.allocated"] >= 12 * MIB
    assert stats["allocated_bytes.all.allocated"] - stats["allocated_bytes.all.freed"] == 4 * MIB
    assert stats["allocation.all.allocated"] - stats["allocation.all.freed"] == 1
    ours = torch.dtorch.memory_stats(0)
    same_names = ours.keys() & stats.keys()
    assert len(same_names) > 10
    assert {name: stats[name] for name in same_names} == {name: ours[name] for name in same_names}
    del z
    dtorch.reset_accumulated_memory_stats()
    assert torch.accelerator.memory_stats()["allocated_bytes.all.freed"] == 0


def test_free_memory_is_told_and_given_back(engine: Engine) -> None:
    assert torch.accelerator.get_memory_info(1)[1] == dtorch.mem_get_info(1)[1]
    assert 0 < torch.accelerator.get_memory_info(1)[0] <= torch.accelerator.get_memory_info(1)[1]
    x = torch.ones(4 * MIB, device="dtorch:1")
    dtorch.synchronize()
    del x
    kept = torch.accelerator.memory_reserved(1)
    torch.accelerator.empty_cache()
    assert torch.accelerator.memory_reserved(1) <= kept - 14 * MIB


def test_asking_for_memory_starts_nothing(no_engine: None) -> None:
    assert torch.accelerator.memory_allocated() == 0
    assert torch.accelerator.memory_stats() == {}
    torch.accelerator.empty_cache()
    if hasattr(torch.accelerator, "empty_host_cache"):  # torch 2.11 has none yet
        torch.accelerator.empty_host_cache()
    torch.accelerator.synchronize()
    assert not dtorch.is_initialized()


# -- what the device is


def test_the_device_describes_itself(engine: Engine) -> None:
    assert torch.get_device_module("dtorch") is torch.dtorch
    assert torch.get_device_module() is torch.dtorch
    properties = torch.dtorch.get_device_properties(1)
    assert properties.name == torch.dtorch.get_device_name("dtorch:1") == "dtorch CPU worker 1"
    assert properties.total_memory == dtorch.mem_get_info(1)[1]
    assert properties.threads == engine.threads_per_worker
    dtypes = torch.accelerator.get_device_capability()["supported_dtypes"]
    assert {torch.float32, torch.bfloat16, torch.int64, torch.complex64, torch.float8_e4m3fn} <= dtypes
    assert torch.quint8 not in dtypes


def test_a_device_index_for_a_while(engine: Engine) -> None:
    with torch.accelerator.device_index(1):
        assert torch.ones(1, device="dtorch").device == torch.device("dtorch:1")
        with torch.accelerator.device_index(None):
            assert torch.accelerator.current_device_index() == 1
    assert torch.accelerator.current_device_index() == 0
    with pytest.raises(RuntimeError, match="dtorch:2 does not exist"):
        torch.accelerator.set_device_index(2)


# -- mixed precision


@pytest.mark.parametrize("overflow", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_training_with_autocast_and_a_scaler_is_eagers(engine: Engine, dtype: torch.dtype, overflow: bool) -> None:
    def program(on: Device) -> list[Any]:
        kind = torch.device(on.name).type
        model = on.module(lambda: nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)))
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
        scaler = torch.amp.GradScaler(kind, init_scale=2.0**10, growth_interval=2)
        rows = []
        for step in range(5):
            x = on(5, 8) * (float("inf") if overflow and step == 2 else 1.0)
            with torch.amp.autocast(kind, dtype=dtype):
                y = model(x)
                assert y.dtype == dtype
                loss = y.float().pow(2).mean()
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            rows.append([scaler.get_scale(), loss, norm])
        twin = torch.amp.GradScaler(kind)
        twin.load_state_dict(scaler.state_dict())
        assert twin.get_scale() == scaler.get_scale()
        return [rows, list(model.parameters()), scaler.state_dict()]

    with eager_threads(engine.threads_per_worker):
        rows = same(program, "dtorch:1")[0]
    scales = [row[0] for row in rows]
    assert any(after < before for before, after in itertools.pairwise(scales)) == overflow


def test_custom_functions_under_autocast(engine: Engine) -> None:
    def program(on: Device) -> list[Any]:
        kind = torch.device(on.name).type

        class Product(torch.autograd.Function):
            @staticmethod
            @torch.amp.custom_fwd(device_type=kind)
            def forward(ctx: Any, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
                ctx.save_for_backward(a, b)
                return a @ b

            @staticmethod
            @torch.amp.custom_bwd(device_type=kind)
            def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
                a, b = ctx.saved_tensors
                return (grad @ b.t()).float(), (a.t() @ grad).float()

        a, b = on.parameter(3, 4), on.parameter(4, 5)
        with torch.amp.autocast(kind, dtype=torch.bfloat16):
            y = Product.apply(a, b)
        y.float().sum().backward()
        return [y, a.grad, b.grad]

    with eager_threads(engine.threads_per_worker):
        same(program, "dtorch:0")

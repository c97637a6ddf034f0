"""Lending, donation, limits, statistics and history: what a worker's memory does beyond being freed in time."""

from __future__ import annotations

import gc
import json
import os
import re
import signal
import weakref
from collections.abc import Callable
from pathlib import Path

import processes
import pytest
import torch
import torch.nn.functional as F
from holding import busy
from same import Device, assert_same

import dtorch
from dtorch import _client
from dtorch.client.engine import Engine
from dtorch.protocol import INLINE_BYTES

pytestmark = pytest.mark.usefixtures("engine")

N = INLINE_BYTES  # floats: four times what still travels inside a message


def loans(worker: int = 0) -> int:
    return dtorch.worker_stats(worker)["loans"]


# -- lending


@pytest.mark.parametrize("fetch", [torch.Tensor.cpu, lambda t: t.to("cpu"), lambda t: t.to_torch()])
def test_shm2_a_fetched_value_is_mapped_and_given_back(fetch: Callable[[torch.Tensor], torch.Tensor]) -> None:
    x = dtorch.arange(N) * 2
    value = fetch(x)
    assert loans() == 1
    allocated = dtorch.memory_allocated()
    del x
    assert dtorch.memory_allocated() == allocated - 8 * N  # the client's alone from now on
    assert dtorch.worker_stats()["lent"] == 8 * N
    assert torch.equal(value, torch.arange(N) * 2)
    view = value[5:7]
    del value
    gc.collect()
    assert loans() == 1
    assert view.tolist() == [10, 12]
    del view
    gc.collect()
    assert loans() == 0
    assert dtorch.worker_stats()["lent"] == 0
    assert dtorch.memory_allocated() == allocated - 8 * N


def test_shm3_writing_to_a_fetched_value_changes_only_that() -> None:
    x = dtorch.ones(N)
    a, b = x.cpu(), x.cpu()
    a += 1
    assert b.unique().tolist() == [1.0]
    assert x.unique().tolist() == [1.0]
    assert a.unique().tolist() == [2.0]
    a.resize_(2 * N)[N:] = 3  # a normal tensor in every respect
    assert a[N - 1 : N + 1].tolist() == [2.0, 3.0]


WRITES: dict[str, Callable[[torch.Tensor], object]] = {
    "add_": lambda x: x.add_(1),
    "mul_scalar": lambda x: x.mul_(3),
    "a_slice": lambda x: x[:10].zero_(),
    "setitem": lambda x: x.__setitem__(slice(None, None, 2), -1.0),
    "out": lambda x: torch.exp(x, out=x),
    "index_put_": lambda x: x.index_put_((dtorch.tensor([1, 5]),), dtorch.tensor([8.0, 9.0])),
    "foreach": lambda x: torch._foreach_add_([x], 1.0),
    "copy_": lambda x: x.copy_(dtorch.zeros(N)),
    "random": lambda x: x.uniform_(),
    "running_mean": lambda x: F.batch_norm(dtorch.rand(4, N), x, dtorch.ones(N), training=True),
    "resize_": lambda x: x.untyped_storage().resize_(4 * N + 4096),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_shm2_what_is_lent_is_a_snapshot(write: Callable[[torch.Tensor], object]) -> None:
    x = dtorch.ones(N) * 2
    early, later = x.cpu(), x.to("dtorch:1")
    pending = x.to_torch_async()
    write(x)
    assert early.unique().tolist() == [2.0]
    assert pending.get().unique().tolist() == [2.0]
    assert later.unique().tolist() == [2.0]
    write_again = x.cpu()
    x.add_(1)
    assert_same(x, write_again + 1)


def test_a_slice_of_something_much_larger_does_not_keep_it() -> None:
    x = dtorch.rand(16 * N)
    before = dtorch.memory_allocated()
    value = x[: N + 5].cpu()
    assert loans() == 1
    del x
    assert dtorch.memory_allocated() <= before - 14 * 4 * N
    assert value.shape == (N + 5,)


def test_strided_and_conjugate_values_are_eagers() -> None:
    def program(on: Device) -> list[torch.Tensor]:
        x = on(300, 400)
        c = on(200, 300, dtype=torch.complex64)
        return [
            x.t(),
            x[::2],
            x[:, ::3].t(),
            x[::2, 1:].transpose(0, 1),
            c.conj(),
            c.imag,
            c.t().conj(),
            x.expand(2, 300, 400),
        ]

    copies: list[Callable[[torch.Tensor], torch.Tensor]] = [
        lambda t: t.to("cpu", copy=True),
        lambda t: t.to("cpu", memory_format=torch.contiguous_format, copy=True),
        lambda t: t.to("cpu", torch.complex128, copy=True),
    ]
    for ours, eager in zip(program(Device("dtorch")), program(Device("cpu")), strict=True):
        for copy in copies:
            got, want = copy(ours), copy(eager)
            assert (got.dtype, got.shape, got.stride()) == (want.dtype, want.shape, want.stride())
            assert torch.equal(got.resolve_conj(), want.resolve_conj())


def test_what_lies_in_shared_memory_is_copied_by_the_worker_alone() -> None:
    x = torch.arange(4 * N, dtype=torch.float32).share_memory_()
    before = dtorch.client_stats()["upload_bytes"]
    whole, part = x.to("dtorch", non_blocking=True), x[N : 3 * N].to("dtorch", non_blocking=True)
    assert dtorch.client_stats()["upload_bytes"] == before
    dtorch.synchronize()
    x.zero_()  # allowed from now on
    assert torch.equal(whole.cpu(), torch.arange(4 * N, dtype=torch.float32))
    assert torch.equal(part.cpu(), torch.arange(N, 3 * N, dtype=torch.float32))
    y = torch.ones(N).share_memory_()
    copied = y.to("dtorch")  # blocking: may be written to at once
    y.zero_()
    assert copied.unique().tolist() == [1.0]
    assert dtorch.client_stats()["upload_bytes"] == before + 4 * N


def test_a_data_loaders_batches_are_uploaded_as_they_are() -> None:
    data = torch.arange(8 * N, dtype=torch.float32).view(8, N)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(data), batch_size=2, num_workers=1)
    before = dtorch.client_stats()["upload_bytes"]
    total = sum(batch.to("dtorch", non_blocking=True).sum(1) for (batch,) in loader)
    assert dtorch.client_stats()["upload_bytes"] == before
    assert torch.equal(total.cpu(), sum(data[i : i + 2].sum(1) for i in range(0, 8, 2)))


def test_uploads_count_against_the_limit(no_engine: None) -> None:
    dtorch.init(workers=1, device="cpu", memory_limit=64 << 20)
    kept = torch.ones(8 << 20).to("dtorch")
    assert dtorch.memory_reserved() >= 32 << 20
    with pytest.raises(dtorch.OutOfMemoryError, match="an upload failed on worker 0"):
        torch.ones(12 << 20).to("dtorch").sum().item()
    assert kept.sum().item() == 8 << 20
    del kept
    assert torch.ones(12 << 20).to("dtorch").sum().item() == 12 << 20


def test_a_copy_between_workers_is_mapped_and_both_go_on() -> None:
    x = dtorch.arange(N) + 0.5
    y = x.to("dtorch:1")
    dtorch.synchronize()
    assert loans(0) == 1
    assert dtorch.worker_stats(1)["mapped"] == 4 * N
    y.add_(1)
    assert torch.equal(x.cpu(), torch.arange(N) + 0.5)
    z = y.to("dtorch:0")  # back again: what is borrowed is not lent on
    assert torch.equal(z.cpu(), torch.arange(N) + 1.5)
    allocated = dtorch.memory_allocated(0)
    del x
    assert dtorch.memory_allocated(0) == allocated
    del y
    assert processes.wait_until(lambda: dtorch.memory_allocated(0) <= allocated - 4 * N, 10)
    assert z.sum().item() == (torch.arange(N) + 1.5).sum().item()


def test_ses1_the_program_may_run_when_a_shared_uploads_owner_goes(no_engine: None) -> None:
    """The upload keeps the last reference to a storage whose finaliser uses dtorch; its worker dies with it."""
    dtorch.init(workers=2, device="cpu")
    running = dtorch.client.engine.current()
    assert running is not None
    assert running.wait_for_workers(60)
    other = dtorch.ones(4, device="dtorch:1")
    assert (other + 1).sum().item() == 8
    worker = running.pids()["worker-0"]
    os.kill(worker, signal.SIGSTOP)
    source = torch.randn(N).share_memory_()
    storage = source.untyped_storage()
    weakref.finalize(storage, lambda held=other + 1: None).atexit = False
    uploaded = source.to("dtorch:0", non_blocking=True)
    del source, storage
    _client.flush()
    os.kill(worker, signal.SIGKILL)
    with pytest.raises(dtorch.WorkerDied):
        uploaded.cpu()
    assert (other + 1).sum().item() == 8


def test_a_dead_readers_loans_come_back(no_engine: None) -> None:
    dtorch.init(workers=2, device="cpu")
    running = dtorch.client.engine.current()
    assert running is not None
    x = dtorch.ones(N)
    y = x.to("dtorch:1")
    dtorch.synchronize()
    before = dtorch.memory_allocated(0)
    del x
    assert dtorch.memory_allocated(0) == before
    os.kill(running.pids()["worker-1"], signal.SIGKILL)
    assert processes.wait_until(lambda: dtorch.memory_allocated(0) <= before - 4 * N, 10)
    assert loans(0) == 0
    del y


# -- donation


def donated(program: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, int]:
    """Its result, and how many of its operators took an argument's memory. The worker is busy until all is issued."""
    program()
    before = dtorch.worker_stats()["donations"]
    wait = busy(rounds=6)
    result = program()
    _client.flush()
    issued, executed = dtorch.progress()[0]
    assert executed < issued, "the worker was still busy"
    del wait
    return result, dtorch.worker_stats()["donations"] - before


#: Pointwise operators of every kind: unboxed and boxed, by out= and in place, with several arguments.
POINTWISE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "exp": torch.exp,
    "relu": torch.relu,
    "gelu": F.gelu,
    "silu": F.silu,
    "add_scalar": lambda x: x + 1,
    "with_itself": lambda x: x * x,
    "pow": lambda x: x**2,
    "abs": torch.abs,
    "clamp": lambda x: x.clamp(-0.5, 0.5),
    "erf": torch.erf,
    "log1p": torch.log1p,
    "floor_divide": lambda x: x // 0.3,
    "leaky_relu": lambda x: F.leaky_relu(x, 0.1),
    "hardswish": F.hardswish,
    "masked_fill": lambda x: x.masked_fill(MASK.to(x.device), 7.0),
    "where": lambda x: torch.where(MASK.to(x.device), x, x),
    "addcmul": lambda x: torch.addcmul(x, x, x, value=0.5),
    "lerp": lambda x: torch.lerp(x, x, 0.25),
    "floor": torch.floor,
    "logit": lambda x: torch.logit(x, eps=0.2),
    "nan_to_num": torch.nan_to_num,
    "softplus": F.softplus,
}
MASK = torch.arange(300).reshape(20, 15) % 3 == 0


@pytest.mark.parametrize("name", POINTWISE)
def test_exe4_a_pointwise_result_takes_the_memory_of_what_dies(name: str) -> None:
    op = POINTWISE[name]
    eager = torch.randn(20, 15, generator=torch.Generator().manual_seed(3))
    here = eager.to("dtorch")
    result, n = donated(lambda: op(here + 0))
    assert n >= 1
    assert_same(result, op(eager + 0))


def test_exe4_nothing_is_donated_that_somebody_still_has() -> None:
    here = dtorch.rand(64, 64)

    def held() -> torch.Tensor:
        return here.sin()

    def viewed() -> torch.Tensor:
        return torch.add(x := here.matmul(here), x.t())

    def other_dtype() -> torch.Tensor:
        return here.matmul(here) > 0

    def broadcast() -> torch.Tensor:
        return here.sum(0) + here

    def not_pointwise() -> torch.Tensor:
        return torch.cumsum(here.matmul(here), 0)

    for program in (held, viewed, other_dtype, broadcast, not_pointwise):
        result, n = donated(program)
        assert n == 0, program.__name__
        assert torch.equal(result.cpu(), program().cpu())


def test_exe4_a_lent_value_is_not_donated() -> None:
    wait = busy(rounds=6)
    x = dtorch.ones(N) * 3
    pending = x.to_torch_async()
    y = x.exp()
    del x
    z = y.to("dtorch:1")
    w = y.neg()
    del y
    _client.flush()
    assert dtorch.progress()[0][1] < dtorch.progress()[0][0], "the worker was still busy"
    assert pending.get().unique().tolist() == [3.0]
    assert z.unique().tolist() == [torch.tensor(3.0).exp().item()]
    assert w.unique().tolist() == [-torch.tensor(3.0).exp().item()]
    del wait


def test_four_pointwise_lines_hold_one_tensor() -> None:
    n = 1 << 20

    def four_lines() -> torch.Tensor:
        a = dtorch.rand(n)
        b = a.exp()
        c = b.sin()
        d = c * 2
        return d  # noqa: RET504 (the four lines are the point: eager PyTorch holds four tensors here)

    four_lines()
    dtorch.synchronize()
    dtorch.reset_peak_memory_stats()
    before = dtorch.memory_allocated()
    wait = busy(rounds=6)
    result = four_lines()
    _client.flush()
    issued, executed = dtorch.progress()[0]
    assert executed < issued, "the worker was still busy"
    two_matrices = 2 * 4 * 1500 * 1500
    assert dtorch.max_memory_allocated() - before <= two_matrices + 4 * n + 4096
    del wait, result


HALF_BACKWARDS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "pow": lambda p: p.abs() ** 2.7,
    "log2": lambda p: (p.abs() + 1).log2(),
    "exp2": torch.exp2,
    "erf": torch.erf,
    "addmm": lambda p: torch.addmm(p, p, p, beta=0.3, alpha=0.7),
    "selu": F.selu,
    "softplus": F.softplus,
    "elu": F.elu,
}


#: Defined for complex numbers too.
COMPLEX_BACKWARDS = ("pow", "exp2", "addmm")
BACKWARDS = [(name, dtype) for dtype in (torch.bfloat16, torch.float16) for name in HALF_BACKWARDS]
BACKWARDS += [(name, torch.complex64) for name in COMPLEX_BACKWARDS]


@pytest.mark.parametrize(("name", "dtype"), BACKWARDS)
def test_exe4_gradients_have_eagers_bits_in_every_type(name: str, dtype: torch.dtype) -> None:
    """Backward formulas multiply dying tensors by numbers: in place that would round otherwise in half precision."""

    def program(on: Device) -> list[torch.Tensor]:
        p = on(65, 65, dtype=dtype).requires_grad_()
        grad = on(65, 65, dtype=dtype)
        wait = busy(rounds=3) if on.name.startswith("dtorch") else None
        y = HALF_BACKWARDS[name](p)
        if not y.is_complex() and grad.is_complex():
            grad = grad.real
        y.backward(grad)
        del wait
        return [y.detach(), p.grad]

    assert_same(program(Device("dtorch")), program(Device("cpu")))


@pytest.mark.parametrize("n", [1, 5, 1027])
def test_exe4_complex_results_have_eagers_bits(n: int) -> None:
    def program(on: Device) -> list[torch.Tensor]:
        x, z = on(n, dtype=torch.complex64), on(n, dtype=torch.complex64)
        wait = busy(rounds=3) if on.name.startswith("dtorch") else None
        results = []
        for op in (torch.mul, torch.div, torch.add):
            t = x + 0
            w = op(t, z)
            del t
            results.append(w)
        del wait
        return results

    assert_same(program(Device("dtorch")), program(Device("cpu")))


# -- limits


def test_fetched_values_do_not_count_against_the_limit(no_engine: None) -> None:
    dtorch.init(workers=1, device="cpu", memory_limit=64 << 20)
    values = []
    for i in range(40):  # 160 MiB in all
        y = dtorch.full((1 << 20,), float(i))
        values.append(y.cpu())
        del y
    assert [v[-1].item() for v in values] == list(range(40))
    assert dtorch.worker_stats()["lent"] == 160 << 20
    del values
    gc.collect()
    assert dtorch.worker_stats()["lent"] == 0
    assert dtorch.memory_allocated() < 1 << 20


def test_what_a_full_worker_is_asked_fails_alone(no_engine: None) -> None:
    dtorch.init(workers=1, device="cpu", memory_limit=4 << 20)
    kept = []
    with pytest.raises(dtorch.OutOfMemoryError):
        for n in (1 << 18, 1 << 14, 1 << 10, 1 << 6):
            while True:
                kept.append(dtorch.ones(n))
                try:
                    dtorch.synchronize()
                except dtorch.OutOfMemoryError:
                    kept.pop()
                    if n == 1 << 6:
                        raise
                    break
    with pytest.raises(dtorch.OutOfMemoryError):
        dtorch.get_rng_state()
    assert kept[0].cpu().sum().item() == 1 << 18
    kept.clear()
    assert dtorch.get_rng_state().dtype == torch.uint8


def test_a_worker_that_does_not_exist_is_refused(engine: Engine) -> None:
    for call in (
        lambda: dtorch.allocation_log(7).__enter__(),
        lambda: dtorch.synchronize(7),
        lambda: dtorch.memory_allocated(7),
    ):
        with pytest.raises(RuntimeError, match="dtorch:7 does not exist"):
            call()
    assert dtorch.ones(1).item() == 1


def test_a_worker_keeps_to_its_limit_and_lives_on(no_engine: None) -> None:
    dtorch.init(workers=1, device="cpu", memory_limit=64 << 20)
    assert dtorch.mem_get_info()[1] == 64 << 20
    keep = dtorch.ones(4 << 20)  # 16 MiB
    with pytest.raises(dtorch.OutOfMemoryError) as caught:
        (dtorch.zeros(16 << 20) + keep[0]).sum().item()
    message = str(caught.value)
    assert "the worker's limit is 67108864" in message
    assert re.search(
        rf"16\.0 MiB  Tensor\[float32, \(4194304,\)\]  made at {re.escape(__file__)}:\d+ in test_", message
    )
    assert dtorch.memory_stats()["num_ooms"] == 1
    # What is freed can be used again, and what only the pool holds is given back for it.
    for _ in range(3):
        assert dtorch.ones(8 << 20).sum().item() == 8 << 20
        assert dtorch.ones(9 << 20).sum().item() == 9 << 20
    assert dtorch.max_memory_reserved() <= 64 << 20
    assert keep.sum().item() == 4 << 20


def test_a_short_worker_waits_for_releases_under_way(no_engine: None) -> None:
    """The second tensor has room only once the first is gone, whose release leaves a little later than the record."""
    dtorch.init(workers=1, device="cpu", memory_limit=48 << 20)
    waited = 0
    for attempt in range(400):
        x = dtorch.ones(8 << 20)
        dtorch.synchronize()
        before = dtorch.worker_stats()["retries"]
        y = dtorch.ones(8 << 20)
        _client.flush()  # the record is on its way, and the worker short of memory until it hears of the release
        for _ in range(attempt * 20):
            pass
        del x
        assert y[-1].item() == 1
        waited += dtorch.worker_stats()["retries"] - before
        del y
        if waited:
            break
    assert waited, "the release always came before the record was executed"
    assert dtorch.memory_stats()["num_ooms"] == 0


def test_init_refuses_other_limits_and_nonsense(engine: Engine) -> None:
    with pytest.raises(ValueError, match="memory_limit=0: a whole number of bytes"):
        dtorch.init(workers=2, memory_limit=0)
    with pytest.raises(dtorch.EngineError, match=r"init was asked for .*memory_limit=1000000"):
        dtorch.init(workers=2, device="cpu", memory_limit=1000000)


def test_the_fraction_is_of_the_machine() -> None:
    dtorch.set_per_process_memory_fraction(0.5)
    assert dtorch.get_per_process_memory_fraction() == pytest.approx(0.5, abs=0.01)
    dtorch.set_per_process_memory_fraction(1.0)
    with pytest.raises(ValueError, match="fraction=2"):
        dtorch.set_per_process_memory_fraction(2.0)


# -- statistics and history


def test_statistics_have_torch_cudas_names_and_meaning() -> None:
    dtorch.empty_cache()
    dtorch.reset_peak_memory_stats()
    before = dtorch.memory_allocated()
    x = dtorch.ones(1 << 20)
    assert dtorch.memory_allocated() - before == 4 << 20
    y = dtorch.cumsum(x, 0)
    stats = dtorch.memory_stats()
    assert stats["allocated_bytes.all.current"] == before + (8 << 20)
    del x, y
    assert dtorch.memory_allocated() == before
    assert dtorch.max_memory_allocated() - before in range(8 << 20, (8 << 20) + 4096)
    assert dtorch.memory_reserved() >= 8 << 20
    assert dtorch.max_memory_reserved() >= dtorch.max_memory_allocated()
    dtorch.empty_cache()
    assert dtorch.memory_reserved() <= dtorch.memory_allocated() + (8 << 20)
    dtorch.reset_peak_memory_stats()
    assert dtorch.max_memory_allocated() == dtorch.memory_allocated()
    cuda = {
        "allocated_bytes.all.peak",
        "reserved_bytes.all.current",
        "allocation.all.current",
        "num_alloc_retries",
        "num_ooms",
    }
    assert cuda <= stats.keys()
    free, total = torch.dtorch.mem_get_info()
    assert 0 < free < total
    kept = dtorch.ones(1 << 21)
    summary = dtorch.memory_summary()
    assert re.search(rf"8\.0 MiB  Tensor\[float32, \(2097152,\)\]  made at {re.escape(__file__)}:\d+", summary)
    assert "made at" not in dtorch.memory_summary(abbreviated=True)
    del kept


def test_the_history_names_who_held_the_peak(tmp_path: Path) -> None:
    path = tmp_path / "history.json"
    kept = dtorch.ones(1 << 20)
    with dtorch.record_memory_history(path):
        a = dtorch.rand(1 << 20)
        b = a.cumsum(0)
        del a
        b = b.cumsum(0)
    saved = json.loads(path.read_text())
    sizes = [row["bytes"] for row in saved["peak"]]
    assert sizes == sorted(sizes, reverse=True)
    assert sum(sizes) == saved["peak_bytes"]
    lines = [row["line"] for row in saved["peak"] if row["bytes"] == 4 << 20]
    assert len(lines) >= 3
    assert all(
        re.fullmatch(rf"{re.escape(__file__)}:\d+ in test_the_history_names_who_held_the_peak", line) for line in lines
    )
    assert saved["timeline"][-1][1] == sum(row["bytes"] for row in dtorch.live_tensors())
    assert path.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    del kept, b

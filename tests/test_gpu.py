"""CUDA workers: eager PyTorch CUDA's own bits, memory, errors, switches. Marked ``gpu``: skipped where there is none.

A program runs in eager PyTorch in this process and on a worker, which with one GPU is the same card; the two have the
same kernels, so their results have the same bits. Where PyTorch itself promises none (a convolution's gradient) both
are asked for deterministic algorithms.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gpu_training
import processes
import pytest
import torch
import torch.nn.functional as F
from mistakes import computed
from same import Device, Program, bits, named
from torch import nn
from torch.utils._pytree import tree_leaves

import dtorch
from dtorch.client import imports

if TYPE_CHECKING:
    from dtorch.client.engine import Engine

pytestmark = pytest.mark.gpu

ROOT = Path(__file__).resolve().parents[1]
MIB = 1 << 20
PATIENCE = 60
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
has_cupy = pytest.mark.skipif(importlib.util.find_spec("cupy") is None, reason="needs CuPy: pip install cupy-cuda12x")


def assert_equal(got: Any, want: Any, where: str = "the result") -> None:
    """``got`` (on a worker) has eager CUDA's dtype, shape, strides and bits."""
    if isinstance(want, (list, tuple)):
        assert len(got) == len(want)
        for i, (g, w) in enumerate(zip(got, want, strict=True)):
            assert_equal(g, w, f"{where}[{i}]")
        return
    assert got.device.type == "dtorch" and want.device.type == "cuda", where
    assert (got.dtype, got.shape, got.stride()) == (want.dtype, want.shape, want.stride()), where
    ours, eagers = got.detach().cpu(), want.detach().cpu()
    if not torch.equal(bits(ours), bits(eagers)):
        apart = (ours.double() - eagers.double()).abs()
        pytest.fail(f"{where}: bits differ, {int((apart > 0).sum())} of {apart.numel()} values, by up to {apart.max()}")


def same_on_gpu(program: Program, worker: str = "dtorch:0") -> Any:
    """Run the program in eager CUDA and on a worker, and compare."""
    want = program(Device("cuda:0"))
    got = program(Device(worker))
    assert_equal(got, want)
    return got


# -- operators


@named(
    add=lambda on, dt: on(100, 70, dtype=dt) + on(70, dtype=dt),
    pointwise=lambda on, dt: torch.tanh(on(1000, dtype=dt)) * 2 - on(1000, dtype=dt).exp(),
    strided=lambda on, dt: on(40, 60, dtype=dt).t()[3:, ::2] * 3,
    sums=lambda on, dt: [on(300, 200, dtype=dt).sum(0), on(300, 200, dtype=dt).mean(), on(50, 60, dtype=dt).var(1)],
    softmax=lambda on, dt: on(64, 300, dtype=dt).softmax(-1),
    mm=lambda on, dt: torch.mm(on(128, 200, dtype=dt), on(200, 96, dtype=dt)),
    addmm=lambda on, dt: torch.addmm(on(96, dtype=dt), on(128, 200, dtype=dt), on(200, 96, dtype=dt)),
    bmm=lambda on, dt: torch.bmm(on(8, 64, 32, dtype=dt), on(8, 32, 48, dtype=dt)),
    linear=lambda on, dt: F.linear(on(2, 33, 64, dtype=dt), on(128, 64, dtype=dt), on(128, dtype=dt)),
    conv=lambda on, dt: F.conv2d(on(2, 16, 28, 28, dtype=dt), on(32, 16, 3, 3, dtype=dt), on(32, dtype=dt), padding=1),
    layer_norm=lambda on, dt: F.layer_norm(on(30, 256, dtype=dt), (256,), on(256, dtype=dt), on(256, dtype=dt)),
    group_norm=lambda on, dt: F.group_norm(on(2, 32, 9, 9, dtype=dt), 8),
    sdpa=lambda on, dt: F.scaled_dot_product_attention(*(on(2, 4, 128, 64, dtype=dt) for _ in range(3))),
    causal=lambda on, dt: F.scaled_dot_product_attention(
        *(on(2, 4, 128, 64, dtype=dt) for _ in range(3)), is_causal=True
    ),
    gelu=lambda on, dt: F.gelu(on(5000, dtype=dt)),
    embedding=lambda on, dt: F.embedding(on.indices(50, 7, 9), on(50, 32, dtype=dt)),
    cat=lambda on, dt: torch.cat([on(3, 5, dtype=dt), on(4, 5, dtype=dt)]).flip(0),
)
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dt: str(dt).removeprefix("torch."))
@pytest.mark.usefixtures("gpu_engine")
def test_an_operator_gives_eager_cudas_bits(program: Callable[..., Any], dtype: torch.dtype) -> None:
    same_on_gpu(lambda on: program(on, dtype))


@named(
    sort=lambda on: list(on(1000).sort()),
    topk=lambda on: list(on(30, 100).topk(5)),
    cumsum=lambda on: on(30, 100).cumsum(1),
    indexing=lambda on: [on(9, 5)[on.indices(9, 20)], on(9, 5)[on(9) > 0]],
    nonzero=lambda on: on(200).relu().nonzero(),
    where=lambda on: torch.where(on(100) > 0, on(100), 0.0),
    integers=lambda on: on(100, dtype=torch.int64) // 3,
    complex=lambda on: on(64, dtype=torch.complex64) * 2,
    fft=lambda on: torch.fft.rfft(on(8, 256)),
    batch_norm=lambda on: F.batch_norm(on(4, 8, 9, 9), on(8), on(8).abs(), on(8), on(8), training=True),
    batch_norm_evaluated=lambda on: F.batch_norm(on(4, 8, 9, 9), on(8), on(8).abs(), on(8), on(8)),
    rms_norm=lambda on: F.rms_norm(on(30, 256), (256,), on(256)),
    channels_last=lambda on: F.group_norm(on(2, 32, 9, 9).to(memory_format=torch.channels_last), 8),
    lstm=lambda on: tree_leaves(on.module(lambda: nn.LSTM(8, 16, 2, bidirectional=True))(on(5, 3, 8))),
    gru=lambda on: list(on.module(lambda: nn.GRU(8, 16, batch_first=True))(on(3, 5, 8))),
    lstm_cell=lambda on: list(on.module(lambda: nn.LSTMCell(8, 16))(on(3, 8))),
    cross_entropy=lambda on: F.cross_entropy(on(64, 100), on.indices(100, 64)),
    pooling=lambda on: F.max_pool2d(on(2, 8, 32, 32), 2),
    sampling=lambda on: F.grid_sample(on(2, 3, 9, 9), on(2, 5, 5, 2), align_corners=True),
    interpolation=lambda on: F.interpolate(on(2, 3, 16, 16), scale_factor=2, mode="nearest"),
    empty=lambda on: on(0, 4) + 1,
    factories=lambda on: [torch.arange(7, device=on.name) * 2, torch.linspace(0, 1, 9, device=on.name)],
)
@pytest.mark.usefixtures("gpu_engine")
def test_another_operator_gives_eager_cudas_bits(program: Program) -> None:
    same_on_gpu(program)


# -- training


@pytest.fixture(scope="session")
def trained_in_eager(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[torch.Tensor]]:
    """What eager CUDA makes of `gpu_training.TRAININGS`."""
    file = tmp_path_factory.mktemp("gpu") / "trained.pt"
    environment = {**os.environ, "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    command = [sys.executable, gpu_training.__file__, str(file)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    return torch.load(file)  # type: ignore[no-any-return]


@pytest.fixture
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("name", gpu_training.TRAININGS)
@pytest.mark.usefixtures("gpu_engine", "deterministic")
def test_training_steps_give_eager_cudas_bits(name: str, trained_in_eager: dict[str, list[torch.Tensor]]) -> None:
    assert_equal(gpu_training.TRAININGS[name](Device("dtorch")), trained_in_eager[name])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.usefixtures("gpu_engine")
def test_autocast_follows_cudas_lists(dtype: torch.dtype) -> None:
    def program(on: Device) -> Any:
        x, w = on(32, 64), on(64, 64)
        with torch.autocast(on.name.split(":")[0], dtype=dtype):
            y = x @ w
            return [y, F.linear(y, w), y.softmax(-1), F.layer_norm(y, (64,)), y.pow(2), y + x, F.mse_loss(y, x)]

    same_on_gpu(program)


# -- random numbers


def _drawn(on: Device) -> Any:
    torch.manual_seed(7)
    x = torch.rand(1000, device=on.name)
    out = [x, torch.randn(33, 5, device=on.name), torch.randint(0, 99, (50,), device=on.name)]
    out += [torch.randperm(500, device=on.name), x.bernoulli(), F.dropout(x, 0.3), torch.empty_like(x).exponential_()]
    return [*out, torch.multinomial(x, 20), torch.rand(3, device=on.name)]


@pytest.mark.usefixtures("gpu_engine")
def test_a_seed_gives_eager_cudas_random_numbers() -> None:
    same_on_gpu(_drawn)


@pytest.mark.usefixtures("gpu_engine")
def test_the_generators_state_is_kept_and_set() -> None:
    torch.manual_seed(3)
    assert torch.equal(dtorch.get_rng_state(), torch.cuda.get_rng_state())
    state = dtorch.get_rng_state()
    first = torch.rand(5, device="dtorch").cpu()
    assert not torch.equal(torch.rand(5, device="dtorch").cpu(), first)
    dtorch.set_rng_state(state)
    assert torch.equal(torch.rand(5, device="dtorch").cpu(), first)


# -- values on their way


@pytest.mark.parametrize("nbytes", [4, 4096, MIB, 256 * MIB])
@pytest.mark.usefixtures("gpu_engine")
def test_a_value_comes_back_as_it_was_uploaded(nbytes: int) -> None:
    x = torch.arange(nbytes // 4, dtype=torch.int32)
    y = x.to("dtorch:1")
    assert torch.equal(y.cpu(), x)
    assert torch.equal((y + 1).cpu(), x + 1)
    assert torch.equal(x.pin_memory().to("dtorch:0", non_blocking=True).cpu(), x)


@pytest.mark.usefixtures("gpu_engine")
def test_a_fetched_value_is_a_snapshot() -> None:
    x = torch.arange(8 * MIB, device="dtorch")
    future = x.to_torch_async()  # type: ignore[attr-defined]
    x.add_(1)
    assert torch.equal(future.get(PATIENCE), torch.arange(8 * MIB))
    assert torch.equal(x.cpu(), torch.arange(8 * MIB) + 1)


@pytest.mark.usefixtures("gpu_engine")
def test_asking_for_a_value_does_not_wait_for_what_was_issued_behind_it() -> None:
    a = torch.randn(4096, 4096, device="dtorch") / 64
    asked = (a + 1).sum().to_torch_async()
    for _ in range(200):
        a = a @ a
    last = torch.Event("dtorch")
    last.record()
    asked.get(PATIENCE)
    assert not last.query(), "the value came after all the work behind it"
    last.synchronize()
    assert last.query()


@pytest.mark.parametrize("nbytes", [4, 4096, MIB, 64 * MIB])
@pytest.mark.usefixtures("gpu_engine")
def test_copies_between_workers_keep_the_bits(nbytes: int) -> None:
    x = torch.arange(nbytes // 4, dtype=torch.int32)
    here = x.to("dtorch:0")
    for i in range(20):
        there = here.to("dtorch:1")
        here.add_(1)  # the copy is of what was there
        assert torch.equal(there.cpu(), x + i)
    back = there
    for _ in range(20):
        back = back.to("dtorch:0").to("dtorch:1")
    assert torch.equal(back.cpu(), x + 19)


@pytest.mark.usefixtures("gpu_engine")
def test_copies_of_views_and_of_what_is_freed_at_once() -> None:
    x = torch.arange(1 << 20).view(1024, 1024)
    here = x.to("dtorch:0")
    assert torch.equal(here.t()[5:, ::3].to("dtorch:1").cpu(), x.t()[5:, ::3])
    copies = [(here * i).to("dtorch:1") for i in range(50)]
    others = [(copy + 1).to("dtorch:0") for copy in copies]
    dtorch.empty_cache()
    for i in range(50):
        assert torch.equal(others[i].cpu(), x * i + 1)
        assert torch.equal(copies[i].cpu(), x * i)


@has_cupy
def test_memory_that_cannot_be_shared_goes_through_the_host_and_is_said_once(
    no_engine: None, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.setenv(name, "expandable_segments:True")
    dtorch.init(workers=2, device="cuda")
    x = torch.arange(MIB)
    for _ in range(3):
        assert torch.equal(x.to("dtorch:0").to("dtorch:1").cpu(), x)
    dtorch.shutdown()
    said = capfd.readouterr().err
    assert said.count("go through host memory: memory of expandable segments") == 1, said


# -- memory


@pytest.mark.usefixtures("gpu_engine")
def test_memory_functions_tell_what_tensors_take() -> None:
    dtorch.synchronize()
    before = dtorch.memory_allocated(0)
    dtorch.reset_peak_memory_stats(0)
    x = torch.ones(64 * MIB, dtype=torch.uint8, device="dtorch:0")
    y = x + 1
    about = pytest.approx  # PyTorch's allocator rounds up to 512 bytes
    assert dtorch.memory_allocated(0) - before == about(128 * MIB, abs=MIB)
    assert dtorch.memory_allocated(1) < 64 * MIB
    del x
    assert dtorch.memory_allocated(0) - before == about(64 * MIB, abs=MIB)
    assert dtorch.max_memory_allocated(0) - before == about(128 * MIB, abs=MIB)
    assert dtorch.memory_reserved(0) >= dtorch.memory_allocated(0)
    free, total = dtorch.mem_get_info(0)
    assert 0 < free < total == torch.cuda.mem_get_info(0)[1]
    del y
    reserved = dtorch.memory_reserved(0)
    dtorch.empty_cache()
    assert dtorch.memory_reserved(0) <= reserved - 64 * MIB
    assert "dtorch:0" in dtorch.memory_summary(0)


@pytest.mark.usefixtures("gpu_engine")
def test_properties_are_the_gpus() -> None:
    ours, eager = dtorch.get_device_properties(0), torch.cuda.get_device_properties(0)
    for name in ("name", "total_memory", "major", "minor", "multi_processor_count"):
        assert getattr(ours, name) == getattr(eager, name)
    assert str(ours.uuid) == str(eager.uuid)


def _quarters(size: int) -> list[torch.Tensor]:
    return [torch.full((size,), 1, dtype=torch.uint8, device="dtorch") for _ in range(5)]


def test_out_of_memory_is_told_and_the_worker_lives_on(gpu_engine: Engine) -> None:
    held = _quarters(dtorch.mem_get_info(0)[1] // 4)
    with pytest.raises(dtorch.OutOfMemoryError) as caught:
        held[-1][-1].item()
    assert caught.value.filename == __file__
    assert caught.value.lineno == _quarters.__code__.co_firstlineno + 1
    assert held[0][-1].item() == 1
    del held
    dtorch.empty_cache()
    assert torch.ones(5, device="dtorch").sum().item() == 5
    assert not gpu_engine.dead_workers


def test_a_limit_is_held(no_engine: None) -> None:
    dtorch.init(workers=1, device="cuda", memory_limit=512 * MIB)
    x = torch.ones(256 * MIB, dtype=torch.uint8, device="dtorch")
    with pytest.raises(dtorch.OutOfMemoryError):
        torch.ones(512 * MIB, dtype=torch.uint8, device="dtorch")[0].item()
    assert x[5].item() == 1


# -- errors that end a CUDA context


def _wrong_index() -> torch.Tensor:
    weight = torch.randn(10, 4, device="dtorch:0")
    indices = computed([1, 99], "dtorch:0")
    return F.embedding(indices, weight)


def test_a_device_assert_names_the_line_and_ends_its_worker_alone(no_engine: None) -> None:
    dtorch.init(workers=2, device="cuda")
    from dtorch.client import engine

    running = engine.current()
    assert running is not None and running.wait_for_workers(PATIENCE)
    other = torch.ones(3, device="dtorch:1")
    with pytest.raises(dtorch.DtorchError) as caught:
        _wrong_index().cpu()
    said = str(caught.value)
    assert re.search(r"device-side assert|out of bounds|index out of range", said), said
    assert Path(__file__).name in said or getattr(caught.value, "filename", None) == __file__, said
    assert processes.wait_until(lambda: 0 in running.dead_workers, PATIENCE)
    with pytest.raises(dtorch.WorkerDied):
        torch.ones(3, device="dtorch:0").sum().item()
    assert other.sum().item() == 3
    dtorch.shutdown()
    dtorch.init(workers=2, device="cuda")
    assert [torch.ones(3, device=f"dtorch:{i}").sum().item() for i in range(2)] == [3, 3]


# -- who touches the GPU

NO_CONTEXT = """
import ctypes, os, torch, dtorch
from dtorch.client import engine
dtorch.init(workers=2, device="cuda")
x = torch.randn(512, 512, device="dtorch:0") / 30
y = x.to("dtorch:1")
asked = (y @ y).sum().to_torch_async()
for _ in range(200):
    y = y @ y
asked.get(60)

def contexts():
    cuda = ctypes.CDLL("libcuda.so.1")
    assert cuda.cuInit(0) == 0
    count = ctypes.c_int()
    assert cuda.cuDeviceGetCount(ctypes.byref(count)) == 0 and count.value
    active = 0
    for device in range(count.value):
        flags, state = ctypes.c_uint(), ctypes.c_int()
        assert cuda.cuDevicePrimaryCtxGetState(device, ctypes.byref(flags), ctypes.byref(state)) == 0
        active += state.value
    return active

def driver_in(pid):
    return "libcuda.so" in open(f"/proc/{pid}/maps").read()

pids = engine.current().pids()
server = int(open(f"/proc/{pids['worker-0']}/stat").read().rpartition(")")[2].split()[1])
print(driver_in(pids["controller"]), driver_in(server), driver_in(pids["worker-0"]), torch.cuda.is_initialized())
print(contexts())
"""


def test_neither_client_nor_controller_nor_fork_server_has_a_cuda_context() -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", NO_CONTEXT]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["False", "False", "True", "False", "0"]


# -- switches


@pytest.fixture
def seen(gpu_engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., dict[str, int]]]:
    """What a worker's switches are; and they are put back."""
    monkeypatch.setattr(imports, "_modules", {})
    operators = dtorch.import_on_workers("gpu_operators")

    def look(worker: int = 0) -> dict[str, int]:
        values = operators.seen(torch.empty(0, device=f"dtorch:{worker}")).tolist()
        return dict(zip(operators.NAMES, values, strict=True))

    before = (torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32)
    before_cudnn = (torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic)
    yield look
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before
    torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic = before_cudnn
    torch.use_deterministic_algorithms(False)


def _matmul_tf32(on: bool) -> None:
    torch.backends.cuda.matmul.allow_tf32 = on


def _cudnn_tf32(on: bool) -> None:
    torch.backends.cudnn.allow_tf32 = on


def _benchmark(on: bool) -> None:
    torch.backends.cudnn.benchmark = on


def _cudnn_deterministic(on: bool) -> None:
    torch.backends.cudnn.deterministic = on


@pytest.mark.parametrize(
    ("name", "switch"),
    [
        ("matmul_tf32", _matmul_tf32),
        ("cudnn_tf32", _cudnn_tf32),
        ("benchmark", _benchmark),
        ("cudnn_deterministic", _cudnn_deterministic),
        ("deterministic", torch.use_deterministic_algorithms),
    ],
)
def test_a_switch_set_on_the_client_holds_on_the_workers(
    seen: Callable[..., dict[str, int]], name: str, switch: Callable[[bool], None]
) -> None:
    for on in (True, False, True, False):
        switch(on)
        assert [seen(worker)[name] for worker in range(2)] == [on, on]


@pytest.mark.usefixtures("seen")
def test_tf32_gives_eager_cudas_bits_with_and_without() -> None:
    results = []
    for on in (False, True):
        _matmul_tf32(on)
        _cudnn_tf32(on)
        got = same_on_gpu(lambda d: [torch.mm(d(256, 256), d(256, 256)), F.conv2d(d(2, 16, 20, 20), d(8, 16, 3, 3))])
        results.append(got[0].cpu())
    if torch.cuda.get_device_capability() >= (8, 0):
        assert not torch.equal(*results)


@pytest.mark.usefixtures("seen")
def test_cudnn_benchmark_may_choose_other_kernels_but_not_other_values() -> None:
    _benchmark(True)
    on, eager = Device("dtorch"), Device("cuda:0")
    got, want = (F.conv2d(d(4, 32, 30, 30), d(64, 32, 3, 3)).cpu() for d in (on, eager))
    torch.testing.assert_close(got, want, rtol=1e-2, atol=1e-1)  # TF32 is on for convolutions by default


@pytest.mark.usefixtures("gpu_engine", "deterministic")
def test_deterministic_mode_refuses_what_eager_cuda_refuses() -> None:
    with pytest.raises(RuntimeError, match="does not have a deterministic implementation"):
        torch.histc(torch.randn(100, device="cuda:0"))
    with pytest.raises(RuntimeError, match="does not have a deterministic implementation"):
        torch.histc(torch.randn(100, device="dtorch")).cpu()
    with contextlib.suppress(dtorch.RemoteError):  # reported or not, nothing of it is left for the next test
        dtorch.synchronize()


def test_workers_take_the_gpus_by_turns_and_each_is_a_process(
    seen: Callable[..., dict[str, int]], gpu_engine: Engine
) -> None:
    found = [seen(worker) for worker in range(2)]
    assert [one["device"] for one in found] == [worker % torch.cuda.device_count() for worker in range(2)]
    assert [one["pid"] for one in found] == [gpu_engine.pids()[f"worker-{worker}"] for worker in range(2)]


# -- a kernel of one's own


@pytest.mark.parametrize("library", [pytest.param("cupy", marks=has_cupy), "triton", "torch"])
@pytest.mark.alarm(200)
def test_the_examples_kernel_runs_and_has_the_right_gradient(library: str) -> None:
    if library == "triton":
        pytest.importorskip("triton", reason="needs Triton")
    script = str(ROOT / "examples" / "custom_kernel.py")
    command = [sys.executable, script, "--device", "cuda", "--library", library, "--workers", "2", "--check"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=180, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "check passed" in done.stdout and "autograd kernel" not in done.stderr

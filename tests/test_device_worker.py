"""A worker on an accelerator (the test's own, ``accelerator/``): eager's bits, and that nothing is early, late or lost.

EXE-6 and EXE-7 are invariants of ``native/worker/executor.h``, STG-1 is of ``native/worker/staging.h``, SHM-2 of
``native/common/segment.h``. Streams are held where a test wants to see what happens meanwhile; what it waits for are
numbers that count up on the board.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import processes
import pytest
import torch
import torch.nn.functional as F
from accelerator import BOARD, LIBRARY, TESTS, Board, Worker, build
from mistakes import computed
from same import Device, Program, named, same
from torch import nn

import dtorch
from dtorch.client import engine as client_engine

if TYPE_CHECKING:
    from dtorch.client.engine import Engine

#: Seconds to wait for what is bound to happen.
PATIENCE = 30
#: What a value needs to be lent instead of sent.
LARGE = 100_000

_PROGRAM = (
    "import sys; from dtorch.controller.process import main; from dtorch.controller.workers import WorkerCode; "
    "main(sys.argv[1:], WorkerCode('accelerator.worker', 'accelerator.worker'))"
)
_engine: Engine | None = None


@pytest.fixture(scope="module")
def _board(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Board]:
    library = build()
    board = Board(tmp_path_factory.mktemp("accelerator") / "board")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(BOARD, str(board.path))
        patch.setenv(LIBRARY, str(library))
        patch.setenv("PYTHONPATH", f"{TESTS}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
        patch.setattr(client_engine, "CONTROLLER", ["-c", _PROGRAM])
        yield board
        dtorch.shutdown()


@pytest.fixture
def accelerator(_board: Board) -> Iterator[Board]:
    """Two workers on accelerators of their own, shared by the tests until one hurts them."""
    global _engine
    _board.reset()
    running = client_engine.current()
    if running is None or running is not _engine or running.is_over or running.dead_workers:
        dtorch.shutdown()
        dtorch.init(workers=2, device="cpu", threads_per_worker=1)
        running = _engine = client_engine.current()
        assert running is not None and running.wait_for_workers(60)
    for worker in range(2):
        with contextlib.suppress(dtorch.RemoteError):  # of the test before
            dtorch.synchronize(worker)
    yield _board
    if any(worker.fail == 1 for worker in _board.workers):
        dtorch.shutdown()
    _board.reset()


def kill(worker: int) -> None:
    assert _engine is not None
    os.kill(_engine.pids()[f"worker-{worker}"], signal.SIGKILL)


def until(true: Callable[[], bool]) -> None:
    assert processes.wait_until(true, PATIENCE)


def launched(worker: Worker, since: int, kernels: int) -> None:
    """Wait until so many kernels were launched since the count stood at ``since``."""
    until(lambda: worker.kernels >= since + kernels)


def settled(worker: int = 0) -> None:
    """The worker has done everything, and has noticed."""
    dtorch.synchronize(worker)
    assert processes.wait_until(lambda: dtorch.worker_stats(worker)["loans"] == 0, 5), (
        "a value of an earlier test lives"
    )


class Background:
    """A call in a thread of its own, whose end a test asks for."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self._result: Any = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(call,), daemon=True)
        self._thread.start()

    def _run(self, call: Callable[[], Any]) -> None:
        try:
            self._result = call()
        except BaseException as error:
            self._error = error

    @property
    def over(self) -> bool:
        return not self._thread.is_alive()

    def result(self) -> Any:
        self._thread.join(PATIENCE)
        assert self.over, "it still waits"
        if self._error is not None:
            raise self._error
        return self._result


def begun(call: Callable[[], Any], worker: int = 0) -> Background:
    """Make a call that issues one record; returns when the worker has executed that, be its answer out or not."""
    issued = dtorch.progress()[worker][0]
    background = Background(call)
    until(lambda: dtorch.progress()[worker][0] > issued)
    dtorch.worker_stats(worker)
    return background


def worker_died(worker: int) -> None:
    until(lambda: worker in _current().dead_workers)


def _current() -> Engine:
    running = client_engine.current()
    assert running is not None
    return running


# -- eager's bits


def _training(on: Device) -> Any:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(40, 64), nn.LayerNorm(64), nn.GELU(), nn.Dropout(0.2), nn.Linear(64, 10))
    model.to(on.name)
    step = torch.optim.AdamW(model.parameters(), lr=1e-2)
    torch.manual_seed(4)  # the model was made with the CPU's generator
    losses = []
    for _ in range(3):
        step.zero_grad()
        loss = F.cross_entropy(model(on(16, 40)), on.indices(10, 16))
        loss.backward()
        step.step()
        losses.append(loss.detach())
    return [losses, [p.detach() for p in model.parameters()]]


def _random(on: Device) -> Any:
    torch.manual_seed(11)
    own = torch.Generator(device=on.name).manual_seed(5)
    drawn = [torch.rand(20, device=on.name), torch.randn(7, 3, device=on.name, generator=own)]
    state = own.get_state()
    drawn += [torch.randperm(30, device=on.name), torch.rand(4, device=on.name, generator=own)]
    own.set_state(state)
    return [*drawn, torch.rand(4, device=on.name, generator=own)]


def _resized(on: Device) -> Any:
    x = on(6)
    x.resize_(2, 50)
    x[:, 3:].zero_()
    y = x.clone().resize_(4)
    return [x[:, 3:], y[:3], torch.empty(0, device=on.name).resize_(3).zero_()]


def _sparse(on: Device) -> Any:
    dense = on(30, 20).relu()
    coo = torch.sparse_coo_tensor(on.indices(5, 2, 9), on(9), (5, 5)).coalesce()
    csr = dense.to_sparse_csr()
    return [dense.to_sparse(), csr.values(), csr.to_dense(), coo, coo.to_dense(), torch.sparse.mm(coo, on(5, 3))]


@named(
    training=_training,
    random=_random,
    resize=_resized,
    sparse=_sparse,
    views=lambda on: [on(8, 9).t()[2:, ::2], on(4, 6).view(3, 8)[1], on(2, 3, 4).permute(2, 0, 1).contiguous()],
    in_place=lambda on: on(30, 10)[3:].mul_(2).add_(on(10)).clamp_(min=0).t(),
    cat=lambda on: torch.cat([on(3, 5), on(4, 5)]).flip(0),
    indexing=lambda on: [on(9, 5)[on.indices(9, 20)], on(50)[on(50) > 0], on(50).relu().nonzero()],
    written=lambda on: on(9, 5).index_put_((on.indices(9, 4),), on(4, 5), accumulate=True),
    large=lambda on: on(300, 400).mm(on(400, 200)).softmax(-1),
    half=lambda on: on(64, dtype=torch.bfloat16).exp() + on(64, dtype=torch.float16),
    conjugate=lambda on: [
        on(7, dtype=torch.complex64).conj(),
        on(7, dtype=torch.complex64).conj().imag,
        on(9)._neg_view(),
    ],
    conjugate_written=lambda on: on(7, dtype=torch.complex64).conj().mul_(2j),
    empty=lambda on: [on(0, 4) + 1, on(3, 0).sum(1), torch.cat([on(0, 4), on(2, 4)]), torch.empty(0, device=on.name)],
    scalars=lambda on: [on(5) * torch.tensor(2.0), on(5).sum() + 1, torch.full((), 3, device=on.name)],
    lists=lambda on: [torch._foreach_add([on(3), on(4)], 1.0), list(on(10).split(3)), list(on(20).sort())],
    out=lambda on: torch.mm(on(3, 4), on(4, 5), out=on(3, 5)),
    out_resized=lambda on: torch.add(on(3, 4), 1, out=on(0)),
    batch_norm=lambda on: F.batch_norm(on(6, 5), on(5), on(5).abs(), training=True),
)
@pytest.mark.filterwarnings("ignore:Sparse", "ignore:An output with")
def test_a_program_gives_eagers_bits(accelerator: Board, program: Program) -> None:
    torch.set_num_threads(1)
    same(program, "dtorch:0")


@pytest.mark.parametrize("n", [0, 1, 1000, LARGE])
def test_a_value_goes_up_and_comes_back(accelerator: Board, n: int) -> None:
    x = torch.randn(n)
    assert torch.equal(x.to("dtorch:0").cpu(), x)
    assert torch.equal((x.to("dtorch:0") * 2).cpu(), x * 2)


@named(
    transposed=lambda x: x.t(),
    strided=lambda x: x[3:, 1::2],
    row=lambda x: x[2],
    conjugate=lambda x: x.conj(),
    negative=lambda x: x.conj().imag,
    broadcast=lambda x: x[:, :1].expand(-1, 50),
    empty=lambda x: x[:, 3:3],
)
@pytest.mark.parametrize("shape", [(20, 30), (300, 400)])
def test_a_view_is_fetched_as_it_is(accelerator: Board, shape: tuple[int, int], program: Callable[..., Any]) -> None:
    x = torch.randn(shape, dtype=torch.complex64)
    assert torch.equal(program(x.to("dtorch:0")).cpu(), program(x))


def test_uploads_from_pinned_memory_and_files(accelerator: Board, tmp_path: Path) -> None:
    import json
    import struct

    x = torch.randn(LARGE)
    pinned = x.pin_memory()
    assert torch.equal(pinned.to("dtorch:0", non_blocking=True).cpu(), x)
    assert torch.equal(x.to("dtorch:0", non_blocking=True).cpu(), x)
    header = json.dumps({"x": {"dtype": "F32", "shape": [LARGE], "data_offsets": [0, 4 * LARGE]}}).encode()
    file = tmp_path / "x.safetensors"
    file.write_bytes(struct.pack("<Q", len(header)) + header + x.numpy().tobytes())
    assert torch.equal(dtorch.load_file(file, "dtorch:1")["x"].cpu(), x)
    assert torch.equal(x.to("dtorch:0").to("dtorch:1").cpu(), x)
    # A copy from pageable memory would wait for what the device computes (EXE-6).
    assert accelerator[0].pageable == accelerator[1].pageable == 0


def test_an_upload_is_a_snapshot_though_it_happens_later(accelerator: Board) -> None:
    with accelerator[0].held("compute"):
        x = torch.zeros(LARGE)
        before = accelerator[0].uploaded
        there = x.to("dtorch:0")
        small = x[:10].to("dtorch:0")
        x.fill_(7)
        dtorch.client_stats()
        until(lambda: accelerator[0].uploaded >= before + 2)
    assert not there.any().item() and not small.any().item()


def test_items_and_decisions(accelerator: Board) -> None:
    x = computed([3.0, 4.0], "dtorch:0")
    assert (x.sum().item(), bool((x > 3.5).any()), x.tolist()) == (7.0, True, [3.0, 4.0])
    assert len(x.nonzero()) == 2


def test_custom_operators_run_on_the_accelerator(accelerator: Board) -> None:
    ops = dtorch.import_on_workers("custom_operators")
    x, y = torch.randn(5, 6), torch.randn(5, 6)
    got = ops.mul_add(x.to("dtorch:0"), y.to("dtorch:0"), 3.0)
    assert torch.equal(got.cpu(), ops.mul_add(x, y, 3.0))


def test_an_operator_with_a_kernel_for_the_cpu_alone(accelerator: Board) -> None:
    ops = dtorch.import_on_workers("accelerator.operators")
    x = torch.randn(5, 6)
    assert torch.equal(ops.doubled(x.to("dtorch:0")).cpu(), x * 2)


@pytest.mark.parametrize("n", [6, LARGE])
def test_a_result_on_the_cpu_is_a_tensor_like_any(accelerator: Board, n: int) -> None:
    """As CUDA's operators give where their schema says so; operators on it are the CPU's, views of it too."""
    ops = dtorch.import_on_workers("accelerator.operators")
    x = torch.randn(n)
    there = ops.on_the_host(x.to("dtorch:0"))
    assert torch.equal(there.cpu(), x) and torch.equal(there[2:].cpu(), x[2:])
    dtorch.synchronize(0)
    kernels = accelerator[0].kernels
    assert torch.equal((there * 2).cpu(), x * 2)
    assert torch.equal((there[1:] * 2).cpu(), x[1:] * 2)
    fetch = there.to_torch_async()
    there.add_(1)
    there[:2].mul_(2)
    assert torch.equal(fetch.get(PATIENCE), x)
    assert accelerator[0].kernels == kernels
    want = torch.cat([(x[:2] + 1) * 2, x[2:] + 1])
    assert torch.equal(there.to("dtorch:1").cpu(), want)
    assert torch.equal(there.resize_(2 * n)[:n].cpu(), want)


# -- nothing is early, and nobody waits for the device


def test_exe6_a_fetch_is_answered_when_the_device_is_done(accelerator: Board) -> None:
    x = torch.ones(LARGE, device="dtorch:0")
    device = accelerator[0]
    before = device.kernels
    with device.held("compute"):
        y = x * 3
        fetch = y.to_torch_async()
        item = Background(lambda: y[0].item())
        launched(device, before, 1)
        for _ in range(20):
            x = x + 1
        launched(device, before, 20)  # they are launched behind it all the same
        assert not fetch.is_ready() and not item.over
        fetched = device.fetched
    assert bool((fetch.get(PATIENCE) == 3).all()) and item.result() == 3
    assert device.fetched > fetched
    assert x[0].item() == 21


def test_exe6_a_fetch_waits_for_its_own_stream_too(accelerator: Board) -> None:
    x = torch.ones(LARGE, device="dtorch:0")
    with accelerator[0].held("fetch"):
        fetch = x.to_torch_async()
        dtorch.synchronize(0)  # the compute stream is done
        assert not fetch.is_ready()
    assert bool((fetch.get(PATIENCE) == 1).all())


@pytest.mark.parametrize("n", [3, LARGE])
def test_exe6_what_is_written_while_it_is_fetched_is_fetched_as_it_was(accelerator: Board, n: int) -> None:
    device = accelerator[0]
    x = torch.ones(n, device="dtorch:0")
    dtorch.synchronize(0)
    before = device.kernels
    with device.held("fetch"):
        fetch = x.to_torch_async()
        x.mul_(5)
        x[1:].add_(1)
        torch.zeros(n, device="dtorch:0")  # takes memory that is free, should there be some
        dtorch.synchronize(0)
        launched(device, before, 3)
        assert not fetch.is_ready()
    assert bool((fetch.get(PATIENCE) == 1).all())
    assert x.cpu()[:2].tolist() == [5.0, 6.0]


def test_exe6_what_is_resized_while_it_is_fetched_is_fetched_as_it_was(accelerator: Board) -> None:
    x = torch.ones(LARGE, device="dtorch:0")
    with accelerator[0].held("fetch"):
        fetch, head = x.to_torch_async(), x[:10].to_torch_async()
        x.resize_(3 * LARGE).mul_(2)
        y = torch.full((LARGE,), 9.0, device="dtorch:0")
        dtorch.synchronize(0)
        assert not fetch.is_ready()
    assert bool((fetch.get(PATIENCE) == 1).all()) and bool((head.get(PATIENCE) == 1).all())
    assert bool((x[:LARGE].cpu() == 2).all()) and y[0].item() == 9


def test_exe6_a_tensor_dropped_while_it_is_fetched_is_fetched(accelerator: Board) -> None:
    x = torch.ones(LARGE, device="dtorch:0")
    allocated = dtorch.worker_stats(0)["allocated"]
    with accelerator[0].held("fetch"):
        fetch = (x * 7).to_torch_async()
        dtorch.synchronize(0)
        assert dtorch.worker_stats(0)["loans"] == 1
        again = [torch.zeros(LARGE, device="dtorch:0") for _ in range(5)]
        dtorch.synchronize(0)
    assert bool((fetch.get(PATIENCE) == 7).all())
    del again, fetch
    settled()
    assert dtorch.worker_stats(0)["allocated"] == allocated


def test_exe6_synchronize_waits_for_the_compute_stream(accelerator: Board) -> None:
    device = accelerator[0]
    before = device.kernels
    with device.held("compute"):
        x = torch.ones(5, device="dtorch:0") + 1
        sync = Background(lambda: dtorch.synchronize(0))
        launched(device, before, 2)
        torch.ones(5, device="dtorch:1").cpu()  # another worker's device is another one
        assert not sync.over
    sync.result()
    assert x[0].item() == 2


def test_exe6_an_event_has_happened_when_the_device_came_there(accelerator: Board) -> None:
    device = accelerator[0]
    stream = torch.Stream(device="dtorch:0")
    before = device.kernels
    with device.held("compute"):
        torch.ones(5, device="dtorch:0")
        event = stream.record_event()
        launched(device, before, 1)
        assert not event.query()
    event.synchronize()
    assert event.query()


def test_exe6_the_worker_never_waits_for_its_device(accelerator: Board) -> None:
    device = accelerator[0]
    x = torch.randn(LARGE)
    dtorch.synchronize(0)
    before = device.waits
    there = x.to("dtorch:0")
    pinned = x.pin_memory().to("dtorch:0", non_blocking=True)
    for _ in range(3):
        there = there * 2 + pinned
        assert there.cpu().shape == (LARGE,)
        assert there[:3].cpu().shape == (3,)
    there.to("dtorch:1").cpu()
    dtorch.synchronize(0)
    assert device.waits == before


def test_exe6_an_upload_stays_until_the_device_has_read_it(accelerator: Board) -> None:
    device = accelerator[0]
    values = [torch.full((LARGE,), float(i)) for i in range(6)]
    before = device.uploaded
    with device.held("compute"):
        there = [v.to("dtorch:0") for v in values]
        small = [v[:100].to("dtorch:0") for v in values]
        sync = Background(lambda: dtorch.synchronize(0))
        until(lambda: device.uploaded >= before + 12)
        assert not sync.over
    for i, (t, s) in enumerate(zip(there, small, strict=True)):
        assert bool((t.cpu() == i).all()) and bool((s.cpu() == i).all())


def test_exe6_many_fetches_end_in_any_order_of_streams(accelerator: Board) -> None:
    device = accelerator[0]
    with device.held("fetch"):
        x = torch.arange(1000, dtype=torch.float32, device="dtorch:0") * 1
        fetches = [(x + i).to_torch_async() for i in range(20)]
        dtorch.synchronize(0)
        y = torch.randn(200).to("dtorch:0")  # its pending end comes behind those of the fetches
        dtorch.synchronize(0)
        assert not any(fetch.is_ready() for fetch in fetches)
    for i, fetch in enumerate(fetches):
        assert fetch.get(PATIENCE)[0].item() == i
    assert y.cpu().shape == (200,)


def test_exe6_a_future_is_done_when_its_value_is_there(accelerator: Board) -> None:
    x = torch.ones(LARGE, device="dtorch:0")

    async def value() -> torch.Tensor:
        return await x

    assert bool((asyncio.run(value()) == 1).all())


# -- memory


def test_memory_statistics_are_the_devices(accelerator: Board) -> None:
    dtorch.empty_cache()
    settled()
    base = dtorch.memory_allocated(0)
    x = torch.empty(1 << 20, device="dtorch:0").fill_(0)
    assert dtorch.memory_allocated(0) == base + (4 << 20)
    dtorch.reset_peak_memory_stats(0)
    y = x + 1
    dtorch.synchronize(0)
    del y
    assert dtorch.memory_allocated(0) == base + (4 << 20)
    assert dtorch.max_memory_allocated(0) >= base + (8 << 20)
    reserved = dtorch.memory_reserved(0)
    assert reserved >= 8 << 20
    del x
    dtorch.synchronize(0)
    dtorch.empty_cache()
    assert dtorch.memory_reserved(0) <= reserved - (8 << 20)


def _staged(worker: int = 0) -> int:
    return dtorch.worker_stats(worker)["staged"]


def test_stg1_a_staging_buffer_is_used_again(accelerator: Board) -> None:
    settled()
    dtorch.empty_cache()
    assert _staged() == 0
    x = torch.ones(LARGE, device="dtorch:0")
    values = [(x * i).cpu() for i in range(5)]
    assert _staged() == 5 * (512 << 10)  # each is the client's, as long as that has the tensor
    del values
    settled()
    for i in range(5):
        assert bool(((x * i).cpu() == i).all())
        settled()
    assert _staged() == 5 * (512 << 10)
    assert accelerator[0].locked == 5
    dtorch.empty_cache()
    assert _staged() == 0
    assert accelerator[0].locked == 0


def test_stg1_a_value_is_the_clients_while_it_has_it(accelerator: Board) -> None:
    x = torch.ones(LARGE, device="dtorch:0")
    values = [(x * i).cpu() for i in range(8)]
    for i in range(8):
        (x * -i).cpu()
    for i, value in enumerate(values):
        assert bool((value == i).all())


def test_no_staging_memory_is_left_with_the_client(accelerator: Board) -> None:
    x = torch.ones(LARGE, device="dtorch:0").cpu()
    assert _mappings("dtorch-staging")
    del x
    assert not _mappings("dtorch-staging")


def _mappings(name: str) -> list[str]:
    return [line for line in Path("/proc/self/maps").read_text().splitlines() if name in line]


def test_out_of_memory_fails_that_value_alone(accelerator: Board) -> None:
    device = accelerator[0]
    x = torch.ones(LARGE, device="dtorch:0")
    settled()
    device.limit = dtorch.memory_allocated(0) + (1 << 20)
    large = torch.ones(1 << 20, device="dtorch:0")
    after = large + 1
    good = x + 1
    assert bool((good.cpu() == 2).all())
    for value in (large, after):
        with pytest.raises(dtorch.OutOfMemoryError, match="accelerator out of memory"):
            value.cpu()
    up = torch.ones(1 << 20).to("dtorch:0")
    with pytest.raises(dtorch.OutOfMemoryError, match="accelerator out of memory"):
        up.cpu()
    device.limit = 0
    assert torch.ones(1 << 20, device="dtorch:0").sum().item() == 1 << 20


@pytest.mark.parametrize("how", ["operator", "upload", "allocation", "copy"])
def test_memory_that_a_fetch_holds_is_waited_for(accelerator: Board, how: str) -> None:
    """The release of what is fetched has come; its memory comes back when the fetch is over."""
    device = accelerator[0]
    settled()
    there = torch.ones(1 << 20, device="dtorch:1")
    device.limit = dtorch.memory_allocated(0) + (6 << 20)
    x = torch.ones(1 << 20, device="dtorch:0")
    device.hold_fetch = 1
    fetch = x.to_torch_async()
    dtorch.synchronize(0)
    kernels, fetched = device.kernels, device.fetched
    del x
    if how == "operator":
        y = there[:1].to("dtorch:0").expand(1 << 20) + 0
    elif how == "upload":
        y = torch.ones(1 << 20).to("dtorch:0")
    elif how == "allocation":
        y = torch.empty(1 << 20, device="dtorch:0").fill_(1)
    else:
        y = there.to("dtorch:0")
    value = y.sum().to_torch_async()
    device.hold_fetch = 0
    assert value.get(PATIENCE).item() == 1 << 20
    assert bool((fetch.get(PATIENCE) == 1).all())
    assert device.kernels > kernels and device.fetched > fetched


def test_out_of_memory_waits_for_a_release_under_way(accelerator: Board) -> None:
    device = accelerator[0]
    settled()
    device.limit = dtorch.memory_allocated(0) + (9 << 20)
    x = torch.ones(1 << 20, device="dtorch:0")
    for _ in range(20):
        x = x + 1  # needs the memory that x before it had
    assert x[0].item() == 21


# -- copies between workers


@pytest.fixture(params=["host", "lent"])
def way(request: pytest.FixtureRequest, accelerator: Board) -> str:
    """How copies go: through host memory, or lent where they lie."""
    for worker in range(2):
        accelerator[worker].lends = int(request.param == "lent")
    name: str = request.param
    return name


@pytest.mark.parametrize("n", [0, 3, LARGE])
def test_a_copy_between_workers_is_the_same(accelerator: Board, way: str, n: int) -> None:
    x = torch.randn(n, 2)
    a = x.to("dtorch:0") * 2
    lent = accelerator[0].lent
    b = a.to("dtorch:1")
    back = (b + 1).to("dtorch:0")
    assert torch.equal(b.cpu(), x * 2) and torch.equal(back.cpu(), x * 2 + 1)
    assert torch.equal(a.t().to("dtorch:1").cpu(), (x * 2).t())
    assert (accelerator[0].lent > lent) == (way == "lent" and n == LARGE)


@pytest.mark.usefixtures("way")
def test_exe6_what_is_written_while_it_is_sent_is_sent_as_it_was(accelerator: Board) -> None:
    a = torch.ones(LARGE, device="dtorch:0") * 2
    settled(0)
    stream = "compute" if accelerator[0].lends else "fetch"
    with accelerator[1].held("compute"), accelerator[0].held(stream):
        b = a.to("dtorch:1")
        until(lambda: dtorch.worker_stats(0)["loans"] == 1)
        a.mul_(7)
        before = accelerator[0].kernels
        torch.zeros(LARGE, device="dtorch:0").add_(1)
        launched(accelerator[0], before, 2)
    assert bool((b.cpu() == 2).all()) and bool((a.cpu() == 14).all())
    settled(0)


@pytest.mark.usefixtures("way")
def test_exe6_a_copy_comes_behind_what_made_it(accelerator: Board) -> None:
    settled(0)
    before = accelerator[0].kernels
    with accelerator[0].held("compute"):
        a = torch.ones(LARGE, device="dtorch:0") * 2
        b = a.to("dtorch:1") + 1
        value = b.to_torch_async()
        launched(accelerator[0], before, 2)
        assert not value.is_ready()
    assert bool((value.get(PATIENCE) == 3).all())


def test_a_sender_that_dies_is_named(accelerator: Board) -> None:
    a = torch.ones(LARGE, device="dtorch:0")
    settled(0)
    with accelerator[0].held("fetch"):
        b = (a * 2).to("dtorch:1")
        until(lambda: dtorch.worker_stats(0)["loans"] == 1)
        kill(0)
        with pytest.raises(dtorch.RemoteError, match="WorkerDied: killed by SIGKILL"):
            b.cpu()
    assert torch.ones(3, device="dtorch:1").sum().item() == 3


def test_a_copy_from_a_sender_that_dies_comes_to_an_end(accelerator: Board) -> None:
    accelerator[0].lends = 1
    a = torch.ones(LARGE, device="dtorch:0")
    settled(0)
    with accelerator[1].held("compute"):
        taken = accelerator[1].taken
        b = (a * 2).to("dtorch:1")
        until(lambda: accelerator[1].taken > taken)
        kill(0)
        worker_died(0)
    assert b.cpu().shape == (LARGE,)
    assert torch.ones(3, device="dtorch:1").sum().item() == 3


def test_a_copy_of_a_dead_workers_memory_names_it(accelerator: Board) -> None:
    """It was lent, and the receiver comes to it only after the owner's death."""
    accelerator[0].lends = 1
    a = torch.ones(LARGE, device="dtorch:0")
    settled(0)
    os.kill(_current().pids()["worker-1"], signal.SIGSTOP)
    lent = accelerator[0].lent
    b = (a * 2).to("dtorch:1")
    until(lambda: accelerator[0].lent > lent)
    kill(0)
    worker_died(0)
    os.kill(_current().pids()["worker-1"], signal.SIGCONT)
    with pytest.raises(dtorch.RemoteError, match="WorkerDied: killed by SIGKILL"):
        b.cpu()
    assert torch.ones(3, device="dtorch:1").sum().item() == 3


@pytest.mark.usefixtures("way")
def test_a_receiver_that_dies_gives_the_memory_back(accelerator: Board) -> None:
    a = torch.ones(LARGE, device="dtorch:0")
    settled(0)
    with accelerator[1].held("compute"):
        b = a.to("dtorch:1")
        until(lambda: dtorch.worker_stats(0)["loans"] == 1)
        kill(1)
        settled(0)
    with pytest.raises(dtorch.WorkerDied):
        b.cpu()
    assert a[0].item() == 1


# -- a device that fails


def test_exe7_a_lost_device_fails_what_follows_with_its_cause(accelerator: Board) -> None:
    device = accelerator[0]
    x = torch.ones(LARGE, device="dtorch:0")
    y = torch.ones(3, device="dtorch:1")
    dtorch.synchronize(0)
    device.fail = 1
    with pytest.raises(dtorch.RemoteError, match=r"device-side assert triggered[\s\S]*This worker cannot go on"):
        (x + 1).cpu()
    worker_died(0)
    with pytest.raises(dtorch.WorkerDied):
        x.cpu()
    assert y.sum().item() == 3


@pytest.mark.parametrize("what", ["fetch", "sync", "item", "event"])
def test_exe7_what_is_under_way_fails_with_the_cause(accelerator: Board, what: str) -> None:
    device = accelerator[0]
    x = torch.ones(LARGE, device="dtorch:0")
    dtorch.synchronize(0)
    with device.held("compute", "fetch"):
        y = x + 1
        if what == "event":
            event = torch.Stream(device="dtorch:0").record_event()
            calls = [Background(event.synchronize)]
        else:
            call = {"fetch": lambda: y.cpu(), "sync": lambda: dtorch.synchronize(0), "item": lambda: y[0].item()}[what]
            calls = [begun(call)]
        future = y.to_torch_async()
        dtorch.worker_stats(0)
        device.fail = 1
        for wait in (*(c.result for c in calls), future.get):
            with pytest.raises(dtorch.RemoteError, match="device-side assert triggered") as caught:
                wait()
            assert Path(__file__).name in str(caught.value), "no line of the program's"
    worker_died(0)


def test_exe7_what_asks_for_no_work_is_told_too(accelerator: Board) -> None:
    x = torch.ones(LARGE, device="dtorch:0")
    dtorch.synchronize(0)
    accelerator[0].fail = 1
    y = x + 1
    with pytest.raises(dtorch.RemoteError, match="device-side assert triggered"):
        dtorch.worker_stats(0)
    worker_died(0)
    del y


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("when", ["before", "behind"])
def test_exe7_another_worker_that_waits_for_the_lost_one_hears_why(accelerator: Board, when: str) -> None:
    device = accelerator[0]
    x = torch.ones(LARGE, device="dtorch:0")
    dtorch.synchronize(0)
    if when == "behind":  # the copy is under way
        with device.held("fetch"):
            before = device.kernels
            b = (x + 1).to("dtorch:1")
            launched(device, before, 1)
            if not device.lends:
                until(lambda: dtorch.worker_stats(0)["loans"] == 1)
            device.fail = 1
    else:
        device.fail = 1
        b = (x + 1).to("dtorch:1")
    if device.lends and when == "behind":
        return  # its data was there already
    with pytest.raises(dtorch.RemoteError, match="device-side assert triggered"):
        b.cpu()
    assert torch.ones(3, device="dtorch:1").sum().item() == 3


def test_exe7_a_lost_receiver_does_not_wait_for_ever(accelerator: Board) -> None:
    """It is told of its loss while it waits for another worker, which waits for the test."""
    x = torch.ones(LARGE, device="dtorch:1")
    y = torch.ones(LARGE, device="dtorch:0")
    dtorch.synchronize(0)
    dtorch.synchronize(1)
    kernels = accelerator[1].kernels
    with accelerator[0].held("fetch"), accelerator[1].held("compute"):
        fetch = y.to_torch_async()
        b = (x + 1).to("dtorch:0")
        until(lambda: accelerator[1].kernels > kernels)
        accelerator[0].fail = 1
        with pytest.raises(dtorch.RemoteError, match="device-side assert triggered"):
            fetch.get(PATIENCE)
        worker_died(0)
    del b


def test_an_error_after_which_the_device_works_is_the_operators_own(accelerator: Board) -> None:
    device = accelerator[0]
    x = torch.ones(3, device="dtorch:0")
    dtorch.synchronize(0)
    device.fail = 2
    y = x + 1
    with pytest.raises(dtorch.RemoteError, match="device-side assert"):
        y.cpu()
    assert (x + 2).tolist() == [3.0, 3.0, 3.0]


# -- what is asked of Python may fail


def test_exe5_a_failing_hook_costs_nothing_but_its_record(accelerator: Board) -> None:
    device = accelerator[0]
    x = torch.ones(LARGE, device="dtorch:0")
    dtorch.empty_cache()
    settled()
    device.refuse = 1
    device.lends = 1
    with pytest.raises(dtorch.DtorchError, match="the test wants this to fail"):
        dtorch.worker_stats(0)
    with pytest.raises(dtorch.DtorchError, match="the test wants this to fail"):
        x.to("dtorch:1").cpu()
    waits = device.waits
    assert bool((x.cpu() == 1).all())  # into memory that is not page-locked: the worker waits
    assert device.waits > waits
    kill(1)
    worker_died(1)
    with contextlib.suppress(dtorch.DtorchError):
        dtorch.synchronize(0)
    device.refuse = 0
    assert x.sum().item() == LARGE
    assert not _current().dead_workers.get(0)


# -- the end


@pytest.mark.parametrize("held", ["compute", "fetch"])
def test_shutdown_while_the_device_works_leaves_nothing(accelerator: Board, held: str) -> None:
    x = torch.ones(LARGE, device="dtorch:0")
    with accelerator[0].held(held):
        fetch = (x * 2).to_torch_async()
        assert dtorch.worker_stats(0)["loans"] == 1
        up = torch.ones(LARGE).to("dtorch:0")
        pids = set(_current().pids().values())
        dtorch.shutdown()
        assert not processes.wait_gone(pids, 2)
    with pytest.raises(dtorch.EngineError):
        fetch.get(PATIENCE)
    del up
    assert not _mappings("dtorch-staging")


def test_memory_that_was_lent_is_closed_when_its_owner_frees_it(accelerator: Board) -> None:
    """The allocator may have freed it (the next loan tells), or is about to (`empty_cache` waits for the answer)."""
    notes = Path(f"{accelerator.path}.closed")

    def closed() -> int:
        return notes.read_text().count("worker 1 closed 1 of worker 0\n") if notes.exists() else 0

    accelerator[0].lends = 1
    x = torch.randn(LARGE)
    there = x.to("dtorch:0")
    assert torch.equal(there.to("dtorch:1").cpu(), x)
    before = closed()
    assert torch.equal(there.to("dtorch:1").cpu(), x)
    until(lambda: closed() == before + 1)
    dtorch.empty_cache()
    assert closed() == before + 2
    accelerator[0].lends = 0
    assert torch.equal(there.to("dtorch:1").cpu(), x)

"""Values: asked for and waited for, in threads and in asyncio, with callbacks, in time and never.

FUT-1 to FUT-3 are invariants of ``dtorch/client/futures.py``, SHM-1 and SHM-2 of ``native/common/segment.h``.
"""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import pytest
import torch
from holding import busy
from mistakes import computed
from same import Device, bits, eager_threads

import dtorch
from dtorch.client import futures
from dtorch.protocol import INLINE_BYTES

if TYPE_CHECKING:
    from dtorch.client.engine import Engine


@pytest.fixture(autouse=True)
def _engine(engine: Engine) -> Iterator[None]:
    with eager_threads(engine.threads_per_worker):
        yield


def loans(worker: int = 0) -> int:
    """Segments that a worker has handed over and that nobody has mapped yet."""
    return dtorch.worker_stats(f"dtorch:{worker}")["loans"]


SHAPES: dict[str, Callable[[Device], torch.Tensor]] = {
    "scalar": lambda on: on(),
    "vector": lambda on: on(7),
    "empty": lambda on: on(0, 3),
    "bool": lambda on: on(9, dtype=torch.bool),
    "bf16": lambda on: on(3, 4, dtype=torch.bfloat16),
    "complex": lambda on: on(3, 4, dtype=torch.complex128),
    "conj": lambda on: on(3, 4, dtype=torch.complex64).conj(),
    "neg": lambda on: on(3, 4, dtype=torch.complex64).conj().imag,
    "transposed": lambda on: on(3, 4).t(),
    "slice": lambda on: on(5, 6)[1:4, ::2],
    "row": lambda on: on(5, 6)[3],
    "expanded": lambda on: on(3, 1).expand(3, 4),
    "channels_last": lambda on: on(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "as_many_as_fit": lambda on: on(INLINE_BYTES // 4),
    "one_more": lambda on: on(INLINE_BYTES // 4 + 1),
    "large": lambda on: on(300, 400),
    "large_transposed": lambda on: on(300, 400).t(),
    "large_slice": lambda on: on(300, 800)[:, ::2],
    "large_row_of_larger": lambda on: on(3, 40000)[1],
    "large_conj": lambda on: on(100, 200, dtype=torch.complex64).conj(),
    "large_expanded": lambda on: on(300, 1).expand(300, 400),
}


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize(
    "get",
    [
        lambda t: t.to_torch(),
        lambda t: t.to_torch_async().get(),
        lambda t: t.cpu(),
        lambda t: t.to("cpu"),
        lambda t: torch.empty(t.shape, dtype=t.dtype).copy_(t),
    ],
    ids=["to_torch", "future", "cpu", "to", "copy"],
)
def test_every_way_to_get_a_value_gives_its_bits(name: str, get: Callable[[torch.Tensor], torch.Tensor]) -> None:
    want = SHAPES[name](Device("cpu"))
    got = get(SHAPES[name](Device("dtorch")))
    assert (got.device.type, got.dtype, got.shape) == ("cpu", want.dtype, want.shape)
    assert torch.equal(bits(got), bits(want))


@pytest.mark.parametrize("name", SHAPES)
def test_cpu_gives_eagers_strides(name: str) -> None:
    """``.cpu()`` of a GPU tensor keeps the strides of a dense tensor; eager's clone does too."""
    assert SHAPES[name](Device("dtorch")).cpu().stride() == SHAPES[name](Device("cpu")).clone().stride()


def test_a_value_has_no_gradient_and_its_tensor_keeps_it() -> None:
    x = dtorch.rand(3).requires_grad_()
    for value in (x.to_torch(), x.to_torch_async().get(), (x * 2).to_torch()):
        assert not value.requires_grad
        assert value.is_leaf
    assert x.cpu().requires_grad  # an operator like any other


def test_on_a_cpu_tensor_the_future_is_ready() -> None:
    x = torch.rand(3, requires_grad=True)
    future = x.to_torch_async()
    assert future.is_ready()
    assert torch.equal(future.get(timeout=0), x)
    assert not future.get().requires_grad


# -- waiting


def test_fut2_a_timeout_leaves_the_value_retrievable() -> None:
    result = busy()
    future = result[0, :3].to_torch_async()
    with pytest.raises(TimeoutError, match=r"did not arrive within 0\.001 s"):
        future.get(timeout=0.001)
    with pytest.raises(TimeoutError):
        future.get(timeout=0)
    assert not future.is_ready()
    assert "pending" in repr(future)
    value = future.get(timeout=60)
    assert future.is_ready()
    assert "ready" in repr(future)
    assert torch.equal(value, result.cpu()[0, :3])
    assert future.get(timeout=0) is value


def test_fut2_a_timeout_leaves_the_next_wait_of_the_thread_undisturbed() -> None:
    """The thread's event may be set by an answer that comes just after the time-out."""
    for i in range(200):
        future = (dtorch.ones(3) * i).to_torch_async()
        try:
            future.get(timeout=1e-5)
        except TimeoutError:
            pass
        assert (dtorch.ones(2) + i).tolist() == [i + 1.0] * 2
        assert future.get().tolist() == [float(i)] * 3


def test_many_threads_wait_at_once() -> None:
    results: dict[int, float] = {}
    result = busy()

    def wait(i: int) -> None:
        results[i] = (result[0, 0] * 0 + i).item()

    threads = [threading.Thread(target=wait, args=(i,)) for i in range(16)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert results == {i: float(i) for i in range(16)}


def test_several_threads_wait_for_one_future() -> None:
    future = busy()[0, 0].to_torch_async()
    values: list[torch.Tensor] = []
    woken = threading.Semaphore(0)
    for _ in range(8):
        threading.Thread(target=lambda: (values.append(future.get()), woken.release()), daemon=True).start()
    future.get()  # the main thread waits as well
    for _ in range(8):
        assert woken.acquire(timeout=10), f"only {len(values)} of 8 threads were woken"
    assert all(torch.equal(v, values[0]) for v in values)


def test_answers_come_in_any_order_that_is_asked() -> None:
    x = dtorch.arange(50)
    pending = [(x[i] * 2).to_torch_async() for i in range(50)]
    assert [f.get().item() for f in reversed(pending)] == [2 * i for i in reversed(range(50))]


# -- what the value is


def test_the_value_is_the_one_at_the_time_of_asking() -> None:
    x = dtorch.zeros(4)
    before = x.to_torch_async()
    x.add_(1)
    between = x.to_torch_async()
    x[2:].fill_(9)
    assert before.get().tolist() == [0.0] * 4
    assert between.get().tolist() == [1.0] * 4
    assert x.tolist() == [1.0, 1.0, 9.0, 9.0]


@pytest.mark.parametrize("n", [4, INLINE_BYTES])
def test_shm1_a_value_and_its_tensor_do_not_share_memory(n: int) -> None:
    x = dtorch.zeros(n)
    value = x.to_torch()
    value += 5
    assert x.sum().item() == 0.0
    x.add_(1)
    assert value.unique().tolist() == [5.0]
    again = x.to_torch()
    del x
    dtorch.synchronize()
    again *= 2  # the worker has freed the storage by now
    assert again.unique().tolist() == [2.0]


@pytest.mark.parametrize("n", [4, INLINE_BYTES])
def test_shm1_an_upload_and_its_source_do_not_share_memory(n: int) -> None:
    source = torch.zeros(n)
    busy()  # so that the worker takes the upload later
    x = source.to("dtorch")
    source += 1
    x.add_(2)
    assert x.cpu().unique().tolist() == [2.0]
    assert source.unique().tolist() == [1.0]


def test_a_large_value_outlives_its_future_and_the_engines_tensor() -> None:
    value = (dtorch.ones(INLINE_BYTES) * 3).to_torch()
    view = value[10:20]
    del value
    gc.collect()
    dtorch.synchronize()
    assert view.tolist() == [3.0] * 10


def test_shm2_large_values_are_lent_until_they_are_dropped() -> None:
    x = dtorch.ones(INLINE_BYTES)
    values = [(x * i).to_torch_async() for i in range(20)]
    for i in range(20):
        assert values[i].get()[-1].item() == i
    assert loans() == 20
    del values
    gc.collect()
    assert loans() == 0


# -- callbacks


def test_fut1_callbacks_run_once_in_order_and_find_the_value_ready() -> None:
    seen: list[tuple[int, bool, float]] = []
    done = threading.Event()
    future = busy()[0, 0].mul(0).to_torch_async()
    for i in range(5):
        future.add_done_callback(lambda f, i=i: seen.append((i, f.is_ready(), f.get(timeout=0).item())))  # type: ignore[misc]
    future.add_done_callback(lambda _: done.set())
    assert done.wait(60)
    assert seen == [(i, True, 0.0) for i in range(5)]
    future.add_done_callback(lambda _: seen.append((9, True, 0.0)))  # at once: the value is here
    assert seen[5:] == [(9, True, 0.0)]
    future.get()
    dtorch.synchronize()
    assert len(seen) == 6


def test_fut1_callbacks_run_on_their_own_thread_or_the_callers() -> None:
    where: list[str] = []
    done = threading.Event()
    future = busy()[0, 0].to_torch_async()
    future.add_done_callback(lambda _: (where.append(threading.current_thread().name), done.set()))
    assert done.wait(60)
    future.add_done_callback(lambda _: where.append(threading.current_thread().name))
    assert where == ["dtorch-callbacks", threading.current_thread().name]


def test_a_failing_callback_disturbs_nobody(capfd: pytest.CaptureFixture[str]) -> None:
    done = threading.Event()
    future = busy()[0, 0].to_torch_async()
    future.add_done_callback(lambda _: 1 / 0)
    future.add_done_callback(lambda _: done.set())
    assert done.wait(60)
    assert "ZeroDivisionError" in capfd.readouterr().err
    assert dtorch.ones(2).tolist() == [1.0, 1.0]


def test_a_callback_may_use_the_device(no_engine: None) -> None:
    """Any operator may have to ask the worker for its geometry, so a callback must be able to wait."""
    dtorch.init(workers=1, device="cpu")
    results: list[list[float]] = []
    done = threading.Event()

    def use(future: dtorch.TensorFuture) -> None:
        x = future.get() + dtorch.ones(2)
        results.append((x[x > 0] * 2).tolist())
        done.set()

    busy()[0, 0].mul(0).to_torch_async().add_done_callback(use)
    assert done.wait(20)
    assert results == [[2.0, 2.0]]


def test_callbacks_of_a_failed_value_run_too() -> None:
    done: list[bool] = []
    event = threading.Event()
    future = torch.nn.functional.embedding(computed([9]), dtorch.rand(3, 2)).to_torch_async()
    future.add_done_callback(lambda f: (done.append(f.is_ready()), event.set()))
    assert event.wait(60)
    assert done == [True]
    for _ in range(2):
        with pytest.raises(dtorch.RemoteError):
            future.get(timeout=0)


# -- asyncio


def test_await_a_tensor_and_a_future() -> None:
    async def program() -> list[torch.Tensor]:
        x = dtorch.arange(4) * 2
        return [await x, await x.to_torch_async(), await torch.arange(4)]  # type: ignore[misc]

    first, second, third = asyncio.run(program())
    assert first.tolist() == second.tolist() == [0, 2, 4, 6]
    assert third.tolist() == [0, 1, 2, 3]


def test_the_loop_goes_on_while_a_value_is_awaited() -> None:
    async def program() -> list[str]:
        order: list[str] = []
        asked = asyncio.Event()

        async def wait() -> None:
            future = busy()[0, 0].to_torch_async()
            asked.set()
            await future
            order.append("value")

        async def work() -> None:
            await asked.wait()
            for _ in range(100):
                await asyncio.sleep(0)
            order.append("work")

        await asyncio.gather(wait(), work())
        return order

    assert asyncio.run(program()) == ["work", "value"]


def test_gather_over_two_workers() -> None:
    async def program() -> list[torch.Tensor]:
        a = [torch.full((3,), float(i), device=f"dtorch:{i % 2}") * 2 for i in range(20)]
        return await asyncio.gather(*(t.to_torch_async() for t in a))

    assert [v[0].item() for v in asyncio.run(program())] == [2.0 * i for i in range(20)]


def test_thousands_of_futures_may_be_pending() -> None:
    async def program() -> list[float]:
        result = busy()
        x = torch.arange(2000, device="dtorch:0") + result[0, 0].mul(0)
        pending = [x[i].to_torch_async() for i in range(2000)]
        assert not pending[0].is_ready()
        values = await asyncio.gather(*pending)
        return [v.item() for v in values]

    assert asyncio.run(program()) == [float(i) for i in range(2000)]
    gc.collect()
    assert not futures._waiting
    assert dtorch.worker_stats()["loans"] == 0


def test_fut2_cancelling_an_await_harms_nothing() -> None:
    async def program() -> None:
        future = busy()[0, :2].mul(0).to_torch_async()

        async def wait() -> torch.Tensor:
            return await future

        tasks = [asyncio.ensure_future(wait()) for _ in range(3)]
        await asyncio.sleep(0)  # they are waiting now
        tasks[0].cancel()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(wait(), 0.001)
        with pytest.raises(asyncio.CancelledError):
            await tasks[0]
        for task in tasks[1:]:
            assert (await task).tolist() == [0.0, 0.0]
        assert (await future).tolist() == [0.0, 0.0]

    asyncio.run(program())
    assert future_values_work()


def future_values_work() -> bool:
    return dtorch.ones(3).to_torch_async().get(timeout=60).tolist() == [1.0] * 3


def test_an_await_whose_loop_is_closed_harms_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    async def program() -> dtorch.TensorFuture:
        future = busy()[0, 0].mul(0).to_torch_async()

        async def wait() -> None:
            await future

        task = asyncio.ensure_future(wait())
        await asyncio.sleep(0)
        task.cancel()
        return future

    future = asyncio.run(program())
    assert future.get(timeout=60).item() == 0.0
    assert future_values_work()
    assert "Traceback" not in capfd.readouterr().err


def test_awaits_in_loops_of_two_threads() -> None:
    results: dict[int, list[float]] = {}

    def run(worker: int) -> None:
        async def program() -> list[float]:
            x = torch.ones(3, device=f"dtorch:{worker}")
            return [(await (x * i)).sum().item() for i in range(30)]  # type: ignore[misc]

        results[worker] = asyncio.run(program())

    threads = [threading.Thread(target=run, args=(w,)) for w in range(2)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert results == {w: [3.0 * i for i in range(30)] for w in range(2)}


# -- dropped futures


@pytest.mark.parametrize("n", [4, INLINE_BYTES])
def test_fut3_dropped_futures_leave_nothing(n: int) -> None:
    x = dtorch.ones(n)
    dtorch.synchronize()
    storages = dtorch.worker_stats()["storages"]
    wait = busy()[0, 0].to_torch_async()
    for _ in range(50):
        x.to_torch_async()
        (x + 1).to_torch_async()
    pending = x.to_torch_async()
    assert not pending.is_ready()
    del pending
    wait.get()
    del wait
    dtorch.synchronize()
    stats = dtorch.worker_stats()
    assert (stats["loans"], stats["storages"]) == (0, storages)
    assert not futures._waiting


def test_fut3_a_future_with_a_callback_that_nobody_holds_still_calls() -> None:
    done = threading.Event()
    busy()[0, 0].to_torch_async().add_done_callback(lambda _: done.set())
    gc.collect()
    assert done.wait(60)
    dtorch.synchronize()
    assert not futures._waiting


def test_shutdown_fails_what_is_awaited(no_engine: None) -> None:
    dtorch.init(workers=2, device="cpu")
    told = threading.Event()
    future = busy().to_torch_async()
    future.add_done_callback(lambda _: told.set())
    ready = torch.ones(3, device="dtorch:1").cpu()
    dtorch.shutdown()
    assert told.wait(60)
    assert future.is_ready()
    with pytest.raises(dtorch.EngineError, match="shut down"):
        future.get()
    assert ready.tolist() == [1.0] * 3


def test_a_future_that_holds_its_value_survives_shutdown(no_engine: None) -> None:
    dtorch.init(workers=1, device="cpu")
    small, large = dtorch.ones(3).to_torch_async(), dtorch.ones(INLINE_BYTES).to_torch_async()
    small.get()
    dtorch.synchronize()
    value = large.get()
    dtorch.shutdown()
    assert small.get().tolist() == [1.0] * 3
    assert value.sum().item() == INLINE_BYTES

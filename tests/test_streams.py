"""Streams and events: their identity, what has happened when, and what a worker's or the engine's end does to them.

STR-1 and STR-2 are invariants of ``native/client/streams.h``.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import TYPE_CHECKING

import pytest
import torch
from holding import busy, held

import dtorch

if TYPE_CHECKING:
    from dtorch.client.engine import Engine


def _stream(worker: int) -> torch.Stream:
    return torch.Stream(device=f"dtorch:{worker}")


# -- identity


def test_a_stream_is_itself_and_knows_its_device(engine: Engine) -> None:
    a, b = _stream(0), _stream(1)
    assert (a.device, b.device) == (torch.device("dtorch:0"), torch.device("dtorch:1"))
    assert a == a
    assert a != _stream(0)
    assert a != torch.accelerator.current_stream(0)
    assert isinstance(a, dtorch.Stream)
    assert dtorch.Stream(1).device == torch.device("dtorch:1")
    assert dtorch.Stream().device == torch.device("dtorch:0")
    with pytest.raises(RuntimeError, match="engine has 2 workers"):
        _stream(2).record_event()


def test_the_current_stream_is_chosen_per_device_and_thread(engine: Engine) -> None:
    first = [torch.accelerator.current_stream(i) for i in range(2)]
    assert first == [torch.dtorch.default_stream(i) for i in range(2)]
    side = _stream(0)
    torch.accelerator.set_stream(side)
    try:
        assert torch.accelerator.current_stream() == torch.dtorch.current_stream("dtorch:0") == side
        assert torch.accelerator.current_stream(1) == first[1]
        assert torch.dtorch.default_stream() == first[0]
        seen: list[torch.Stream] = []
        other = threading.Thread(target=lambda: seen.append(torch.accelerator.current_stream(0)))
        other.start()
        other.join()
        assert seen == [first[0]]
    finally:
        torch.accelerator.set_stream(first[0])
    assert torch.accelerator.current_stream(0) == first[0]


@pytest.mark.parametrize("enter", [lambda s: s, torch.dtorch.stream], ids=["torch.Stream", "torch.dtorch.stream"])
def test_a_stream_as_a_context_is_current_with_its_device(engine: Engine, enter) -> None:  # type: ignore[no-untyped-def]
    a, b = _stream(0), _stream(1)
    default = [torch.accelerator.current_stream(i) for i in range(2)]
    with enter(b):
        assert torch.zeros(1, device="dtorch").device == b.device
        assert torch.accelerator.current_stream() == b
        with enter(a):
            assert dtorch.current_device() == 0
            assert torch.accelerator.current_stream() == a
            assert torch.accelerator.current_stream(1) == b
        assert dtorch.current_device() == 1
        assert torch.accelerator.current_stream() == b
    assert dtorch.current_device() == 0
    assert [torch.accelerator.current_stream(i) for i in range(2)] == default
    with torch.dtorch.stream(None):
        assert torch.accelerator.current_stream() == default[0]


def test_the_order_is_that_of_issue_whichever_stream_is_current(engine: Engine) -> None:
    x = torch.zeros(3, device="dtorch")
    for k in range(20):
        with _stream(0):
            x.mul_(2)
        x.add_(k % 2)
    want = torch.zeros(3)
    for k in range(20):
        want.mul_(2).add_(k % 2)
    assert torch.equal(x.cpu(), want)


@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream does not match")
def test_gradients_of_what_ran_on_a_side_stream(engine: Engine) -> None:
    x = torch.arange(6.0, device="dtorch").requires_grad_()
    with _stream(0) as side:
        y = (x * 2).exp()
        y.record_stream(side)
    z = (y + x).sum()
    z.backward()
    eager = torch.arange(6.0).requires_grad_()
    ((eager * 2).exp() + eager).sum().backward()
    assert torch.equal(x.grad.cpu(), eager.grad)


# -- what has happened


def test_a_stream_is_done_when_all_that_was_issued_is(engine: Engine) -> None:
    s = torch.accelerator.current_stream()
    dtorch.synchronize(1)
    with held(engine):
        x = torch.ones(3, device="dtorch") + 1
        assert not s.query()
        assert torch.accelerator.current_stream(1).query()
    s.synchronize()
    assert s.query()
    assert x.cpu().tolist() == [2.0] * 3


def test_str1_an_event_has_happened_when_all_before_it_is_executed(engine: Engine) -> None:
    assert torch.Event().query()  # as for CUDA: one that was never recorded is no reason to wait
    with held(engine):
        x = torch.ones(3, device="dtorch") + 1
        event = torch.accelerator.current_stream().record_event()
        assert not event.query()
    event.synchronize()
    assert event.query()
    del x


def test_str1_an_event_does_not_wait_for_what_comes_after_it(engine: Engine) -> None:
    with held(engine, 1):
        event = torch.Event()
        event.record()
        x = torch.ones(3, device="dtorch:1").to("dtorch:0")  # worker 0 waits for worker 1 from here on
        event.synchronize()
        assert event.query()
        assert not torch.accelerator.current_stream(0).query()
    assert x.cpu().tolist() == [1.0] * 3


def test_an_event_can_be_recorded_again(engine: Engine) -> None:
    event = torch.Event()
    event.record()
    event.synchronize()
    with held(engine):
        event.record()
        assert not event.query()
    event.synchronize()
    assert event.query()


def test_an_event_is_recorded_in_the_current_stream_or_the_one_given(engine: Engine) -> None:
    with held(engine, 1):
        a, b = torch.Event(), torch.Event()
        a.record()
        b.record(_stream(1))
        a.synchronize()
        assert not b.query()
        assert (a.device, b.device) == (torch.device("dtorch:0"), torch.device("dtorch:1"))
    b.synchronize()


def test_an_event_that_nobody_holds_leaves_nothing(engine: Engine) -> None:
    for _ in range(1000):
        torch.accelerator.current_stream().record_event()
    dtorch.synchronize()
    assert torch.accelerator.current_stream().query()


def test_str2_who_waits_for_a_stream_waits_for_what_that_waits_for(engine: Engine) -> None:
    with held(engine, 0):
        x = torch.ones(3, device="dtorch:0") + 1
        event = torch.accelerator.current_stream(0).record_event()
        s = _stream(1)
        s.wait_event(event)
        later = s.record_event()
        assert not s.query()
        assert not later.query()
        event.wait(s)
        s.wait_stream(torch.accelerator.current_stream(0))
    later.synchronize()
    assert event.query()
    s.synchronize()
    assert s.query()
    assert x.cpu().tolist() == [2.0] * 3


# -- time


def test_the_time_between_events_is_the_workers(engine: Engine) -> None:
    first, second = (torch.Event(enable_timing=True) for _ in range(2))
    dtorch.synchronize()
    began = time.monotonic()
    first.record()
    busy(rounds=2)
    second.record()
    second.synchronize()
    whole = (time.monotonic() - began) * 1000
    took = first.elapsed_time(second)
    assert 0 < took <= whole
    assert second.elapsed_time(first) == -took


def test_a_time_that_cannot_be_told(engine: Engine) -> None:
    timed, plain, other = torch.Event(enable_timing=True), torch.Event(), torch.Event(enable_timing=True)
    for event in (timed, plain):
        event.record()
        event.synchronize()
    with pytest.raises(ValueError, match="enable_timing=True"):
        timed.elapsed_time(plain)
    with pytest.raises(ValueError, match="recorded"):
        timed.elapsed_time(other)
    with held(engine):
        other.record()
        with pytest.raises(RuntimeError, match="completed"):
            timed.elapsed_time(other)
    other.synchronize()
    assert timed.elapsed_time(other) > 0


# -- failures


def test_a_stream_tells_of_a_failure_and_an_event_does_not(engine: Engine) -> None:
    x = torch.ones(3, device="dtorch")
    torch.index_select(x, 0, torch.tensor([1]).to("dtorch"))
    y = torch.index_select(x, 0, torch.tensor([7]).to("dtorch"))
    event = torch.accelerator.current_stream().record_event()
    event.synchronize()
    with pytest.raises(dtorch.RemoteError, match="out of range"):
        torch.accelerator.current_stream().synchronize()
    del y
    torch.accelerator.current_stream().synchronize()


def test_events_of_a_worker_that_died(no_engine: None) -> None:
    dtorch.init(workers=2, device="cpu")
    from dtorch.client import engine as engines

    running = engines.current()
    assert running is not None
    done, pending = torch.Event(), torch.Event()
    done.record()
    done.synchronize()
    dtorch.synchronize(1)
    os.kill(running.pids()["worker-0"], signal.SIGSTOP)
    pending.record()
    os.kill(running.pids()["worker-0"], signal.SIGKILL)
    with pytest.raises(dtorch.WorkerDied):
        pending.synchronize()
    with pytest.raises(dtorch.WorkerDied):
        pending.query()
    with pytest.raises(dtorch.WorkerDied):
        torch.accelerator.current_stream(0).query()
    assert done.query()
    assert torch.accelerator.current_stream(1).query()


def test_events_of_an_engine_that_was_shut_down(no_engine: None) -> None:
    assert torch.accelerator.current_stream().query()  # starts nothing
    assert not dtorch.is_initialized()
    dtorch.init(workers=1, device="cpu")
    done, pending = torch.Event(), torch.Event()
    done.record()
    done.synchronize()
    busy()
    pending.record()
    dtorch.shutdown()
    assert done.query()
    with pytest.raises(dtorch.EngineError):
        pending.synchronize()
    dtorch.init(workers=1, device="cpu")
    pending.record()
    pending.synchronize()
    torch.accelerator.current_stream().synchronize()

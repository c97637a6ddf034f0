"""dtorch.profile(): the file is a valid Chrome trace, says what happened, and is written whatever happens.

TRACE-1 to TRACE-3 are invariants of ``native/common/trace.h``.
"""

from __future__ import annotations

import asyncio
import importlib.util
import inspect
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgpack
import processes
import pytest
import torch
from chrome import Chrome
from holding import busy
from mistakes import computed
from torch.nn.modules import module as hooks

import dtorch
from dtorch import _client
from dtorch.client import engine as engine_module
from dtorch.client.engine import Engine
from dtorch.protocol import Message

ROOT = Path(__file__).resolve().parents[1]


def record(path: Path, program: Callable[[], object], **options: Any) -> Chrome:
    with dtorch.profile(path, **options):
        program()
    return Chrome(path)


def line_here() -> int:
    frame = inspect.currentframe()
    assert frame and frame.f_back
    return frame.f_back.f_lineno


# -- what it says


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Chrome:
    """A program with a bit of everything, on a fresh engine; read by the tests of this part."""
    dtorch.shutdown()
    dtorch.init(workers=2, device="cpu")
    model = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.ReLU()).to("dtorch:0")
    before = torch.ones(7, 7, device="dtorch:0").mm(torch.ones(7, 7, device="dtorch:0"))
    path = tmp_path_factory.mktemp("story") / "trace.json"

    async def program() -> None:
        x = torch.randn(256, 64, device="dtorch:0")
        with torch.profiler.record_function("my part"):
            y = model(x)
        there = (y @ y.t()).to("dtorch:1")  # 256 KiB: lent, not sent
        wait = busy(1, rounds=3)
        z = there.relu() + 1
        assert (await z.sum()).shape == ()
        assert z.nonzero().shape[1] == 2
        y.sum().backward()
        assert y.sum().item() == y.cpu().sum().item()
        del wait

    with dtorch.profile(path):
        asyncio.run(program())
    assert before.sum().item() == 7**3
    return Chrome(path)


def test_there_is_a_lane_for_every_process(story: Chrome) -> None:
    engine = engine_module.current()
    assert engine
    pids = {"client": os.getpid(), **engine.pids()}
    assert {name: pid for pid, name in story.names.items()} == pids
    assert story.about["missing"] == {}
    assert story.about["dropped"] == {}
    order = {e["pid"]: e["args"]["sort_index"] for e in story.events if e["name"] == "process_sort_index"}
    assert [story.names[pid] for pid in sorted(order, key=order.__getitem__)] == [
        "client",
        "controller",
        "worker-0",
        "worker-1",
    ]


def test_what_a_worker_ran_is_what_the_client_issued(story: Chrome) -> None:
    issued = {(e["args"]["worker"], e["args"]["record"]): e for e in story.of("client", "issue")}
    found = 0
    for worker in range(2):
        for e in story.of(f"worker-{worker}", "op"):
            of_client = issued.pop((worker, e["args"]["record"]))
            assert e["name"] == of_client["name"]
            assert e["args"].get("line") == of_client["args"].get("line")
            assert e["ts"] >= of_client["ts"]
            found += 1
    assert found > 20
    assert {e["name"] for e in issued.values()} == {"send", "receive", "ask for a value"}, "every operator was run"


def test_operators_carry_shapes_and_the_clients_line(story: Chrome) -> None:
    (relu,) = [e for e in story.of("worker-1", "op") if e["name"] == "aten::relu"]
    assert relu["args"]["shapes"] == "float32 (256, 256)"
    assert relu["args"]["bytes"] == 4 * 256 * 256
    assert relu["args"]["line"].startswith(f"{__file__}:")
    assert relu["args"]["line"].endswith(" in program")
    (linear,) = [e for e in story.of("worker-0", "op") if e["name"] == "aten::addmm"]
    assert linear["args"]["shapes"] == "float32 (32,), float32 (256, 64), float32 (64, 32)"


def test_backward_has_a_lane_of_its_thread_and_names_the_forward_line(story: Chrome) -> None:
    backward = [e for e in story.of("worker-0", "op") if e["args"].get("line", "").endswith("(its backward)")]
    assert backward
    lanes = {e["tid"] for e in story.of("client", "issue")}
    titles = {e["args"]["name"] for e in story.events if e["name"] == "thread_name" and e["tid"] in lanes}
    assert "MainThread" in titles
    assert titles - {"MainThread"}, "the engine's thread, whatever it is called in this process"


def test_modules_and_record_function_are_around_what_they_issued(story: Chrome) -> None:
    (linear,) = [e for e in story.of("client", "issue") if e["name"] == "aten::addmm"]
    around = [
        e["name"]
        for e in story.of("client", "span", tid=linear["tid"])
        if e["ts"] <= linear["ts"] and linear["ts"] + linear["dur"] <= e["ts"] + e["dur"]
    ]
    assert around == ["my part", "Sequential", "Linear"]


def test_arrows_lead_from_batches_to_work_and_from_values_to_waits(story: Chrome) -> None:
    batches = story.arrows("batch")
    assert batches
    assert all(story.names[a["pid"]] == "client" and story.names[b["pid"]] == "controller" for a, b in batches)
    led_to = {story.names[b["pid"]] for _, b in story.arrows("work")}
    assert led_to == {"worker-0", "worker-1"}
    assert [(story.names[a["pid"]], story.names[b["pid"]]) for a, b in story.arrows("transfer")] == [
        ("worker-0", "worker-1")
    ]
    waits = story.of("client", "wait")
    assert Counter(e["name"] for e in waits)["wait: a value"] >= 2  # item() and cpu()
    assert "wait: what aten::nonzero gives" in {e["name"] for e in waits}
    assert len(story.arrows("value")) == len(waits)


def test_requests_show_from_question_to_answer(story: Chrome) -> None:
    asked = Counter(e["name"] for e in story.events if e["ph"] == "b")
    assert asked["a value"] == 3  # the awaited one, item() and cpu()
    assert asked["what aten::nonzero gives"] == 1


def test_the_controller_tells_what_it_handled(story: Chrome) -> None:
    handled = {e["name"] for e in story.of("controller", "message")}
    assert {"RECORDS", "BATCH to worker-0", "BATCH to worker-1", "TRANSFER of worker-0"} <= handled


def test_nothing_from_before_or_after_the_block_is_there(story: Chrome) -> None:
    assert not [e for e in story.slices if e["args"].get("shapes", "").startswith("float32 (7, 7)")]
    assert 7**3 not in [e["args"].get("bytes") for e in story.of("worker-0")]


def test_a_wait_for_another_workers_tensor_stands_inside_the_receiving(engine: Engine, tmp_path: Path) -> None:
    def program() -> None:
        wait = busy(0, rounds=5)
        wait.to("dtorch:1").sum().item()

    trace = record(tmp_path / "t.json", program)
    (receive,) = trace.named("worker-1", "receive from worker-0")
    (wait,) = trace.named("worker-1", "wait: tensor of worker-0")
    assert receive["ts"] <= wait["ts"]
    assert wait["dur"] > 0.9 * receive["dur"], "the sender has five products of matrices to compute first"


def test_a_sleeping_program_is_not_at_work(engine: Engine, tmp_path: Path) -> None:
    def program() -> None:
        x = dtorch.ones(3)
        time.sleep(0.3)
        (x + 1).cpu()

    trace = record(tmp_path / "t.json", program)
    worked = sum(e["dur"] for e in trace.of("client", "issue", "python", tid=1))
    assert trace.about["block_us"] - worked > 200_000


def test_python_at_work_is_shown_as_work(engine: Engine, tmp_path: Path) -> None:
    def program() -> None:
        x = dtorch.ones(3)
        start = time.thread_time()
        while time.thread_time() - start < 0.2:
            pass
        (x + 1).cpu()

    trace = record(tmp_path / "t.json", program)
    assert sum(e["dur"] for e in trace.of("client", "issue", "python", tid=1)) > 190_000


def test_without_modules_no_hooks_are_set(engine: Engine, tmp_path: Path) -> None:
    model = torch.nn.ReLU()
    trace = record(tmp_path / "t.json", lambda: model(dtorch.ones(3)), modules=False)
    assert not trace.of("client", "span")
    trace = record(tmp_path / "t.json", lambda: model(dtorch.ones(3)))
    assert [e["name"] for e in trace.of("client", "span")] == ["ReLU"]


def test_names_that_json_must_escape(engine: Engine, tmp_path: Path) -> None:
    name = 'a "quoted" \\ name,\n in two lines, ünd'

    def program() -> None:
        with torch.profiler.record_function(name):
            dtorch.ones(1)

    assert record(tmp_path / "t.json", program).of("client", "span")[0]["name"] == name


# -- its cost, and its limits


def test_trace1_outside_of_a_block_nothing_is_noted(engine: Engine, tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    record(path, lambda: dtorch.ones(3) + 1)
    x = dtorch.ones(3)
    for _ in range(100):
        x = x + 1
    x.cpu()
    assert _client.trace_take() == (b"", 0, [], [])
    assert not hooks._global_forward_hooks
    assert not hooks._global_forward_pre_hooks
    again = record(path, lambda: dtorch.ones(5) * 2)
    assert [e["name"] for e in again.of("worker-0", "op")] == ["aten::fill_.Scalar", "aten::mul.Tensor"]


def test_trace2_the_first_events_are_kept_and_the_others_counted(engine: Engine, tmp_path: Path) -> None:
    def program() -> None:
        x = dtorch.zeros(1)
        for _ in range(500):
            x = x + 1
        assert x.item() == 500

    program()  # what is defined at first use is defined
    path = tmp_path / "t.json"
    with pytest.warns(UserWarning, match=r"t\.json has the first 100 events of each process only \(.*worker-0: 4"):
        trace = record(path, program, limit=100)
    assert trace.about["dropped"].keys() >= {"client", "worker-0"}
    kept = trace.of("worker-0")
    assert len(kept) == 100
    numbers = [e["args"]["record"] for e in kept]
    assert numbers == list(range(numbers[0], numbers[0] + 100))
    everything = record(path, program)
    assert len(everything.of("worker-0")) == 100 + trace.about["dropped"]["worker-0"]
    (name,) = [name for name in trace.names.values() if name.startswith("worker-0")]
    assert name == f"worker-0 ({trace.about['dropped']['worker-0']} later events were dropped)"


def test_more_events_than_one_reply_carries(engine: Engine, tmp_path: Path) -> None:
    n = 40_000  # a reply carries 16,384

    def program() -> None:
        x = dtorch.zeros(1)
        for _ in range(n):
            x = x + 1
        assert x.item() == n

    path = tmp_path / "t.json"
    with dtorch.profile(path):
        program()
    adds: Counter[int] = Counter()
    records: dict[int, list[int]] = defaultdict(list)
    for e in json.loads(path.read_text())["traceEvents"]:
        if e["ph"] == "X" and e["name"] == "aten::add.Tensor":
            adds[e["pid"]] += 1
            records[e["pid"]].append(e["args"]["record"])
    assert adds == {os.getpid(): n, engine.pids()["worker-0"]: n}
    assert all(r == sorted(r) for r in records.values()), "TRACE-3"


def test_a_compressed_file(engine: Engine, tmp_path: Path) -> None:
    trace = record(tmp_path / "t.json.gz", lambda: dtorch.ones(3) + 1)
    assert trace.named("worker-0", "aten::add.Tensor")


@pytest.mark.parametrize("limit", [0, -1, 1.5, True, None])
def test_a_limit_is_a_whole_number(engine: Engine, tmp_path: Path, limit: Any) -> None:
    with (
        pytest.raises(ValueError, match=r"limit=.*: the number of events to keep"),
        dtorch.profile(tmp_path, limit=limit),
    ):
        pass


def test_a_folder_that_is_not_there_is_told_before_the_work(engine: Engine, tmp_path: Path) -> None:
    block = dtorch.profile(tmp_path / "nowhere" / "t.json")
    with pytest.raises(FileNotFoundError, match=r"there is no folder .*nowhere"), block:
        pytest.fail("the block must not begin")


def test_a_folder_in_the_place_of_the_file_is_told_before_the_work(engine: Engine, tmp_path: Path) -> None:
    block = dtorch.profile(tmp_path)
    with pytest.raises(IsADirectoryError, match=r"is a folder; dtorch\.profile\(\) writes a file"), block:
        pytest.fail("the block must not begin")


# -- whatever happens


def test_the_trace_is_written_when_the_block_raises(engine: Engine, tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    with pytest.raises(ZeroDivisionError), dtorch.profile(path), torch.profiler.record_function("open"):
        _ = dtorch.ones(3) + 1
        raise ZeroDivisionError
    trace = Chrome(path)
    assert trace.named("worker-0", "aten::add.Tensor")
    assert trace.named("client", "open")


def test_a_failing_operator_is_in_the_trace_and_its_error_is_raised(engine: Engine, tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    with pytest.raises(dtorch.RemoteError), dtorch.profile(path):
        index = computed([5])
        dtorch.ones(3).index_select(0, dtorch.tensor([0])).sum().item()
        dtorch.ones(3).index_select(0, index).sum().item()
    assert len(Chrome(path).named("worker-0", "aten::index_select")) == 2


def test_a_file_that_cannot_be_written_stops_the_recording_all_the_same(engine: Engine, tmp_path: Path) -> None:
    folder = tmp_path / "gone"
    folder.mkdir()
    with pytest.raises(FileNotFoundError), dtorch.profile(folder / "t.json"):
        x = dtorch.ones(3) + 1
        folder.rmdir()
    assert _client.trace_take() == (b"", 0, [], [])
    for worker in range(2):  # nothing is noted any more, and nothing is left of it
        assert msgpack.unpackb(_client.stats(worker, "trace"))[3] == [b"", 0, []]
    assert engine.ask_controller(msgpack.packb([Message.TRACE, 0])) == [b"", 0, []]
    assert x.sum().item() == 6
    record(tmp_path / "next.json", lambda: None)


def test_one_inside_another_is_refused(engine: Engine, tmp_path: Path) -> None:
    outer = tmp_path / "outer.json"
    with dtorch.profile(outer):
        inner = dtorch.profile(tmp_path / "inner.json")
        told = r"inner\.json'\) inside another one, which records to .*outer\.json'"
        with pytest.raises(RuntimeError, match=told), inner:
            pytest.fail("the block must not begin")
        _ = dtorch.ones(3) + 1
    assert Chrome(outer).named("worker-0", "aten::add.Tensor")
    assert not (tmp_path / "inner.json").exists()
    record(tmp_path / "next.json", lambda: None)


def test_threads_have_lanes_of_their_own(engine: Engine, tmp_path: Path) -> None:
    def work(worker: int) -> None:
        x = torch.ones(2, device=f"dtorch:{worker}")
        for _ in range(50):
            x = x * 2
        x.cpu()

    def program() -> None:
        threads = [threading.Thread(target=work, args=(w,), name=f"thread-{w}") for w in range(2)]
        for thread in threads:
            thread.start()
        names.update({t.native_id: t.name for t in threads})
        for thread in threads:
            thread.join()

    names: dict[int | None, str] = {}
    trace = record(tmp_path / "t.json", program)
    lanes = Counter(e["tid"] for e in trace.named("client", "aten::mul.Tensor"))
    assert sorted(lanes.values()) == [50, 50]


def test_a_dead_worker_costs_its_lane_only(engine: Engine, tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    pid = engine.pids()["worker-1"]
    with dtorch.profile(path):
        x = torch.ones(3, device="dtorch:0") + 1
        y = torch.ones(3, device="dtorch:1") + 1
        y.cpu()
        os.kill(pid, signal.SIGKILL)
        assert processes.wait_until(lambda: bool(engine.dead_workers), 30)
        x.cpu()
    trace = Chrome(path)
    assert trace.about["missing"] == {"worker-1": "worker 1 died: killed by SIGKILL."}
    assert trace.names[pid] == "worker-1: no events, worker 1 died: killed by SIGKILL."
    assert trace.named("worker-0", "aten::add.Tensor")
    assert len(trace.named("client", "aten::add.Tensor")) == 2

    # And one that was dead before: the controller's Python relays now.
    again = record(path, lambda: (torch.ones(3, device="dtorch:0") * 3).cpu())
    assert again.about["missing"] == trace.about["missing"]
    assert again.arrows("work")
    assert again.named("worker-0", "aten::mul.Tensor")


def test_an_engine_that_is_shut_down_inside_leaves_the_clients_lane(no_engine: None, tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    dtorch.init(workers=4, device="cpu")
    with dtorch.profile(path):
        for worker in range(4):
            (torch.ones(3, device=f"dtorch:{worker}") + 1).cpu()
        dtorch.shutdown()
        with pytest.raises(dtorch.EngineError, match=r"no engine can be started inside dtorch\.profile\(\)"):
            dtorch.init(workers=1, device="cpu")
        with pytest.raises(dtorch.EngineError, match=r"no engine can be started inside"):
            dtorch.ones(3)
    trace = Chrome(path)
    why = "the engine was shut down inside the block"
    assert trace.about["missing"] == dict.fromkeys(["controller", *(f"worker-{w}" for w in range(4))], why)
    assert len(trace.named("client", "aten::add.Tensor")) == 4
    dtorch.init(workers=1, device="cpu")  # the block is over


def test_a_dead_controller_leaves_the_clients_lane(no_engine: None, tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    dtorch.init(workers=1, device="cpu")
    engine = engine_module.current()
    assert engine
    with dtorch.profile(path):
        (dtorch.ones(3) + 1).cpu()
        os.kill(engine.pids()["controller"], signal.SIGKILL)
        assert processes.wait_until(lambda: engine.is_over, 30)
    trace = Chrome(path)
    assert trace.about["missing"] == dict.fromkeys(
        ["worker-0", "controller"], "the controller died: killed by SIGKILL."
    )
    assert trace.named("client", "aten::add.Tensor")


def test_a_forked_child_leaves_the_file_to_its_parent(engine: Engine, tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    with dtorch.profile(path):
        x = dtorch.ones(3) + 1
        child = os.fork()
        if child == 0:
            try:
                with torch.profiler.record_function("in the child"):
                    recording = _client.trace_take()  # nothing is noted here, and nothing waits for a lock
                    del recording
            finally:
                os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        x.cpu()
    assert Chrome(path).named("worker-0", "aten::add.Tensor")


def test_leaving_the_block_in_a_forked_child_writes_nothing(engine: Engine, tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    parent = os.getpid()
    with dtorch.profile(path):
        _ = dtorch.ones(3) + 1
        child = os.fork()
        if child:
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    if os.getpid() != parent:
        os._exit(1 if path.exists() or hooks._global_forward_hooks else 0)
    assert Chrome(path).named("worker-0", "aten::add.Tensor")


def test_held_back_and_short_of_memory(no_engine: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DTORCH_INFLIGHT_MB", "1")
    dtorch.init(workers=1, device="cpu", memory_limit=128 << 20)

    def program() -> None:
        x = dtorch.zeros(1)
        wait = busy(0, rounds=5)
        for _ in range(100_000):
            x = x + 1
        with pytest.raises(dtorch.OutOfMemoryError):
            dtorch.ones(64 << 20).sum().item()
        del wait

    trace = record(tmp_path / "t.json", program)
    assert trace.named("client", "wait: too far ahead")
    assert trace.named("worker-0", "wait: memory")


# -- the picture


def test_plot_trace_draws_it(engine: Engine, tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    record(path, lambda: (busy(0, rounds=2).to("dtorch:1") + 1).sum().item())
    command = [sys.executable, str(ROOT / "benchmarks" / "plot_trace.py"), str(path)]
    out = subprocess.run(command, capture_output=True, text=True, check=True, timeout=100).stdout
    assert out.startswith("The client needed ")
    assert "workers computed" in out
    assert (tmp_path / "t.trace.png").read_bytes().startswith(b"\x89PNG")


def test_the_headlines_figures() -> None:
    spec = importlib.util.spec_from_file_location("plot_trace", ROOT / "benchmarks" / "plot_trace.py")
    assert spec and spec.loader
    plot = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = plot  # dataclasses look their module up
    spec.loader.exec_module(plot)
    assert plot.union([(5, 6), (0, 2), (1, 3)]) == [(0, 3), (5, 6)]
    assert plot.union([(0, 1), (1.5, 2)], gap=0.5) == [(0, 2)]
    assert plot.overlap([(0, 3), (5, 6)], [(1, 2), (2.5, 5.5)]) == 2.0
    slices = [plot.Slice("op", "op", 0, 4), plot.Slice("receive", "transfer", 5, 9)]
    assert plot.without(slices, [plot.Slice("wait", "wait", 6, 8)]) == [(0, 4), (5, 6), (8, 9)]

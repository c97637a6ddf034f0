"""GPU memory lent from worker to worker: what is opened, waited for and closed, against a fake of the driver.

IPC-1 to IPC-6 are invariants of ``dtorch/worker/cuda.py``. What a real driver makes of the same calls is the affair of
``test_gpu.py``.
"""

from __future__ import annotations

import ctypes
import importlib.util
import itertools
import subprocess
import sys
import types
import uuid
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from fake_cuda_driver import Allocation, Driver, Gpus
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from dtorch.worker import cuda
from dtorch.worker.cuda import PeerMemory

STREAM = 7
SIZE, BLOCK = 1000, 100


@dataclass(eq=False)
class Worker:
    """A process with its memory: the part of an executor that lends and borrows."""

    index: int
    driver: Driver
    memory: PeerMemory
    target: Allocation

    def lend(self, allocation: Allocation, dest: int, offset: int = 0, stream: int = STREAM) -> Any:
        return self.memory.export(allocation.base + offset, BLOCK, dest, stream)

    def take(self, source: int, lent: Any, offset: int = 0, stream: int = STREAM) -> None:
        self.memory.copy(source, self.target.base + offset, BLOCK, *lent, stream)


def worker(gpus: Gpus, index: int) -> Worker:
    driver = gpus.process(index % gpus.count)
    made: Any = driver
    return Worker(index, driver, PeerMemory(made, driver.device), driver.allocate(900_000, 90_000))


@pytest.fixture
def gpus() -> Gpus:
    return Gpus()


@pytest.fixture
def pair(gpus: Gpus) -> tuple[Worker, Worker]:
    return worker(gpus, 0), worker(gpus, 1)


# -- what is copied


@pytest.mark.parametrize("count", [1, 2])
def test_a_tensor_is_copied_from_its_offset_on_the_same_gpu_and_between_two(count: int) -> None:
    gpus = Gpus(count)
    owner, importer = worker(gpus, 0), worker(gpus, 1)
    x = owner.driver.allocate(5000, SIZE)
    owner.driver.write(x, 300, 42, STREAM)
    lent = owner.lend(x, 1, 300)
    assert (lent[0], lent[2]) == (0, 300)
    importer.take(0, lent, 200)
    gpus.run_all()
    assert importer.target.content == {200: 42}


def test_ipc1_a_copy_waits_for_what_was_issued_before_the_export(gpus: Gpus, pair: tuple[Worker, Worker]) -> None:
    owner, importer = pair
    x = owner.driver.allocate(5000, SIZE)
    owner.driver.write(x, 0, 1, STREAM)
    importer.take(0, owner.lend(x, 1))
    waiting = importer.driver.streams[STREAM]
    assert len(gpus.streams()) == 1 and waiting not in gpus.streams()
    owner.driver.streams[STREAM].popleft().run()
    assert waiting not in gpus.streams()  # written, and the event is not reached yet
    owner.driver.streams[STREAM].popleft().run()
    assert waiting in gpus.streams()
    gpus.run_all()
    assert importer.target.content == {0: 1}


def test_ipc1_each_stream_of_the_owner_has_its_event(gpus: Gpus, pair: tuple[Worker, Worker]) -> None:
    owner, importer = pair
    x = owner.driver.allocate(5000, SIZE)
    owner.driver.write(x, 0, 1, 1)
    first = owner.lend(x, 1, 0, stream=1)
    second = owner.lend(x, 1, 0, stream=2)
    assert first[3] != second[3]
    importer.take(0, first)
    while owner.driver.streams[2]:
        owner.driver.streams[2].popleft().run()
    assert importer.driver.streams[STREAM] not in gpus.streams()  # the write is on the other one
    gpus.run_all()
    assert importer.target.content == {0: 1}


def test_ipc1_copies_both_ways_do_not_wait_for_each_other(gpus: Gpus, pair: tuple[Worker, Worker]) -> None:
    owners = [(w, w.driver.allocate(5000, SIZE)) for w in pair]
    for _ in range(3):
        lent = [w.lend(x, 1 - w.index) for w, x in owners]
        for w, _x in owners:
            w.take(1 - w.index, lent[1 - w.index])
    gpus.run_all()  # asserts that there is no deadlock


# -- what is opened, and what is closed


def test_ipc3_an_allocation_is_opened_once_whatever_lies_in_it(gpus: Gpus, pair: tuple[Worker, Worker]) -> None:
    owner, importer = pair
    x, y = owner.driver.allocate(5000, SIZE), owner.driver.allocate(7000, SIZE)
    for offset in range(0, SIZE, BLOCK):
        importer.take(0, owner.lend(x, 1, offset))
    assert importer.driver.opened == 1
    importer.take(0, owner.lend(y, 1))
    assert importer.driver.opened == 2


@pytest.mark.parametrize("same_handles", [False, True])
def test_ipc2_an_address_allocated_anew_is_opened_anew(same_handles: bool) -> None:
    gpus = Gpus(same_handles=same_handles)
    owner, importer = worker(gpus, 0), worker(gpus, 1)
    for content in (1, 2, 3):
        x = owner.driver.allocate(5000, SIZE)
        owner.driver.write(x, 0, content, STREAM)
        importer.take(0, owner.lend(x, 1))
        gpus.run_all()
        assert importer.target.content == {0: content}
        owner.driver.free(x)
    assert importer.driver.opened == 3
    told = owner.memory.freed()
    assert [(dest, len(set(handles))) for dest, handles in told] == [(1, 3)]
    importer.memory.close(0, told[0][1])
    assert importer.driver.mappings == {} and importer.driver.closed == 3
    assert not gpus.violations


def test_ipc5_what_was_freed_is_told_once_and_to_whom_it_was_given(gpus: Gpus) -> None:
    owner, *_peers = (worker(gpus, i) for i in range(4))
    x, y, z = (owner.driver.allocate(base, SIZE) for base in (5000, 7000, 9000))
    handle = {name: owner.lend(a, dest)[1] for name, a, dest in (("x", x, 1), ("y", y, 1), ("z", z, 3))}
    assert owner.lend(x, 2)[1] == owner.lend(x, 2, BLOCK)[1] == handle["x"]
    assert owner.memory.freed() == []
    owner.driver.free(x)
    owner.driver.free(z)
    assert owner.memory.freed() == [(1, [handle["x"]]), (2, [handle["x"]]), (3, [handle["z"]])]
    assert owner.memory.freed() == []
    owner.driver.free(y)
    owner.memory.peer_gone(1)
    assert owner.memory.freed() == []


def test_ipc4_closing_waits_for_a_copy_that_is_not_over(gpus: Gpus, pair: tuple[Worker, Worker]) -> None:
    owner, importer = pair
    lent = owner.lend(owner.driver.allocate(5000, SIZE), 1)
    importer.take(0, lent)
    importer.memory.close(0, [lent[1], b"never opened here"])
    assert importer.driver.mappings == {} and not gpus.violations


def test_ipc4_the_death_of_a_peer_is_no_reason_to_wait(gpus: Gpus, pair: tuple[Worker, Worker]) -> None:
    owner, importer = pair
    third = worker(gpus, 2)
    over, under_way = owner.driver.allocate(5000, SIZE), owner.driver.allocate(7000, SIZE)
    importer.take(0, owner.lend(over, 1))
    gpus.run_all()
    importer.take(0, owner.lend(under_way, 1))
    owner.driver.die()
    importer.memory.peer_gone(0)
    assert (importer.driver.opened, importer.driver.closed) == (2, 1)
    gpus.run_all()
    importer.take(2, third.lend(third.driver.allocate(5000, SIZE), 1))  # the next call closes the other one
    assert (importer.driver.opened, importer.driver.closed) == (3, 2)
    assert not gpus.violations


@pytest.mark.parametrize("call", [lambda memory: memory.freed(), lambda memory: memory.close_all()])
def test_ipc4_what_a_dead_peer_left_is_closed_when_its_copy_is_over(
    gpus: Gpus, pair: tuple[Worker, Worker], call: Callable[[PeerMemory], object]
) -> None:
    owner, importer = pair
    importer.take(0, owner.lend(owner.driver.allocate(5000, SIZE), 1))
    owner.driver.die()
    importer.memory.peer_gone(0)
    call(importer.memory)
    assert importer.driver.closed == 0
    gpus.run_all()
    call(importer.memory)
    assert importer.driver.closed == 1 and importer.driver.events == {} and not gpus.violations


def test_revoked_memory_can_be_freed_without_anyone_having_it_open(gpus: Gpus, pair: tuple[Worker, Worker]) -> None:
    owner, importer = pair
    idle, busy = owner.driver.allocate(5000, SIZE), owner.driver.allocate(7000, SIZE)
    for x in (idle, busy):
        importer.take(0, owner.lend(x, 1))
    told = owner.memory.revoke([busy.base + BLOCK])
    assert [(dest, len(handles)) for dest, handles in told] == [(1, 1)]
    importer.memory.close(0, told[0][1])
    owner.driver.free(idle)
    assert gpus.freed_open == [] and owner.memory.freed() == []
    again = owner.driver.allocate(5000, SIZE)
    importer.take(0, owner.lend(again, 1))  # given anew
    gpus.run_all()
    assert len(importer.driver.mappings) == 2


# -- what cannot be lent


def test_ipc6_what_cannot_be_exported_is_none_and_said_once(gpus: Gpus, capsys: pytest.CaptureFixture[str]) -> None:
    owner = worker(gpus, 0)
    expandable = owner.driver.allocate(5000, SIZE, shareable=False)
    assert owner.lend(expandable, 1) is None and owner.lend(expandable, 1) is None
    assert owner.memory.export(123, BLOCK, 1, STREAM) is None  # not the GPU's
    assert owner.memory.export(owner.target.base + 89_950, BLOCK, 1, STREAM) is None  # reaches beyond
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert said.startswith("dtorch: copies from GPU 0 to other workers go through host memory: memory of expandable")
    assert owner.lend(owner.driver.allocate(7000, SIZE), 1)  # others can


def test_ipc6_a_gpu_out_of_reach_is_not_lent_to(capsys: pytest.CaptureFixture[str]) -> None:
    gpus = Gpus(2, reach=False)
    owner = worker(gpus, 0)
    x = owner.driver.allocate(5000, SIZE)
    assert owner.lend(x, 1) is None
    assert "GPU 1 cannot reach the memory of GPU 0" in capsys.readouterr().err
    assert owner.lend(x, 2)  # worker 2 is on the same one


@pytest.mark.skipif(importlib.util.find_spec("cupy") is not None, reason="CuPy is here")
def test_ipc6_without_cupy_nothing_is_lent(capsys: pytest.CaptureFixture[str]) -> None:
    memory = cuda.peer_memory(0)
    assert memory.export(123, BLOCK, 1, STREAM) is None
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "No module named 'cupy'" in said and "pip install cupy-cuda" in said
    assert memory.freed() == [] == memory.revoke([])
    memory.close(1, [b"x"])
    memory.peer_gone(1)
    memory.close_all()
    with pytest.raises(RuntimeError, match="CuPy is missing here"):
        memory.copy(0, 0, 0, 0, b"", 0, b"", STREAM)


def test_memory_that_cannot_be_opened_is_an_error_and_nothing_is_issued(pair: tuple[Worker, Worker]) -> None:
    owner, importer = pair
    device, handle, offset, event = owner.lend(owner.driver.allocate(5000, SIZE), 1)
    with pytest.raises(RuntimeError, match=r"memory of worker 0 on GPU 0 cannot be opened on GPU 0: .*Invalid"):
        importer.take(0, (device, b"another".ljust(len(handle), b"\0"), offset, event))
    assert importer.driver.streams == {}


# -- anything in any order


@dataclass(eq=False)
class Loan:
    """A tensor on its way: lent, then copied, then given back when ``event`` of the importer's has happened."""

    source: int
    dest: int
    allocation: Allocation
    offset: int
    content: int
    lent: Any
    place: int = 0
    event: int = 0


@dataclass
class Mail:
    """What goes from one worker to another, in order: loans, and handles to close."""

    queues: dict[tuple[int, int], deque[Any]] = field(default_factory=dict)

    def send(self, source: int, dest: int, what: Any) -> None:
        self.queues.setdefault((source, dest), deque()).append(what)

    def waiting(self) -> list[tuple[int, int]]:
        return [way for way, queue in self.queues.items() if queue]


class Lending(RuleBasedStateMachine):
    """Three workers on two GPUs, two of them on one, with few addresses, so that they are allocated again and again."""

    def __init__(self) -> None:
        super().__init__()
        self.gpus = Gpus(2, same_handles=True)
        self.workers = {i: worker(self.gpus, i) for i in range(3)}
        self.memory: list[tuple[int, Allocation]] = []
        self.mail = Mail()
        self.loans: list[Loan] = []
        self.contents = itertools.count(1)
        self.places = itertools.count(0, BLOCK)

    def pick(self, choice: int) -> tuple[int, Allocation]:
        return self.memory[choice % len(self.memory)]

    def lent(self, allocation: Allocation, offset: int | None = None) -> bool:
        return any(loan.allocation is allocation and offset in (None, loan.offset) for loan in self.loans)

    @rule(index=st.integers(0, 2), slot=st.integers(0, 2))
    def allocate(self, index: int, slot: int) -> None:
        if index in self.workers:
            base = 1000 + slot * SIZE
            if all((i, a.base) != (index, base) for i, a in self.memory):
                self.memory.append((index, self.workers[index].driver.allocate(base, SIZE)))

    @precondition(lambda self: self.memory)
    @rule(choice=st.integers(0), dest=st.integers(0, 2), block=st.integers(0, 2), stream=st.integers(1, 2))
    def lend(self, choice: int, dest: int, block: int, stream: int) -> None:
        source, allocation = self.pick(choice)
        if dest == source or dest not in self.workers or self.lent(allocation, block * BLOCK):
            return
        owner, content = self.workers[source], next(self.contents)
        owner.driver.write(allocation, block * BLOCK, content, stream)
        lent = owner.lend(allocation, dest, block * BLOCK, stream)
        loan = Loan(source, dest, allocation, block * BLOCK, content, lent)
        self.loans.append(loan)
        self.mail.send(source, dest, loan)

    @precondition(lambda self: self.mail.waiting())
    @rule(choice=st.integers(0), stream=st.integers(1, 2))
    def deliver(self, choice: int, stream: int = 1) -> None:
        ways = self.mail.waiting()
        source, dest = ways[choice % len(ways)]
        what, importer = self.mail.queues[source, dest].popleft(), self.workers[dest]
        if isinstance(what, list):
            importer.memory.close(source, what)
        else:
            what.place = next(self.places)
            importer.take(source, what.lent, what.place, stream)
            what.event = importer.driver.make_event()
            importer.driver.record(what.event, stream)

    @precondition(lambda self: self.gpus.streams())
    @rule(choice=st.integers(0))
    def step(self, choice: int) -> None:
        streams = self.gpus.streams()
        streams[choice % len(streams)].popleft().run()

    @precondition(lambda self: self.loans)
    @rule()
    def give_back(self) -> None:
        for loan in list(self.loans):
            importer = self.workers[loan.dest]
            if loan.event and importer.driver.is_over(loan.event):
                assert importer.target.content[loan.place] == loan.content
                importer.driver.destroy_event(loan.event)
                self.loans.remove(loan)

    @precondition(lambda self: self.memory)
    @rule(choice=st.integers(0))
    def free(self, choice: int) -> None:
        index, allocation = self.pick(choice)
        if not self.lent(allocation):
            self.workers[index].driver.free(allocation)
            self.memory.remove((index, allocation))

    @rule(index=st.integers(0, 2))
    def tell(self, index: int) -> None:
        if index in self.workers:
            for dest, handles in self.workers[index].memory.freed():
                assert len(set(handles)) == len(handles)
                self.mail.send(index, dest, handles)

    @rule(index=st.integers(0, 2))
    def revoke_and_free(self, index: int) -> None:
        if index not in self.workers:
            return
        lent = [loan.allocation.base + loan.offset for loan in self.loans if loan.source == index]
        for dest, handles in self.workers[index].memory.revoke(lent):
            self.mail.send(index, dest, handles)
        while ways := [way for way in self.mail.waiting() if way[0] == index]:
            self.deliver(self.mail.waiting().index(ways[0]), 1)
        before = list(self.gpus.freed_open)
        for i, allocation in list(self.memory):
            if i == index and not self.lent(allocation):
                self.workers[i].driver.free(allocation)
                self.memory.remove((i, allocation))
        assert self.gpus.freed_open == before

    @precondition(lambda self: len(self.workers) > 2)
    @rule(index=st.integers(0, 2))
    def die(self, index: int) -> None:
        self.workers.pop(index).driver.die()
        self.memory = [(i, a) for i, a in self.memory if i != index]
        for way in self.mail.queues:
            if index in way:
                self.mail.queues[way].clear()
        for loan in [loan for loan in self.loans if index in (loan.source, loan.dest)]:
            self.loans.remove(loan)
            if loan.event and loan.dest in self.workers:
                self.workers[loan.dest].driver.destroy_event(loan.event)
        for survivor in self.workers.values():
            survivor.memory.peer_gone(index)

    @invariant()
    def nothing_that_cuda_forbids(self) -> None:
        assert self.gpus.violations == []
        for process in self.gpus.processes:
            opened = [mapping.allocation for mapping in process.mappings.values()]
            assert len(set(opened)) == len(opened)

    def teardown(self) -> None:
        while self.mail.waiting():
            self.deliver(0, 1)
        self.gpus.run_all()
        self.give_back()
        assert self.loans == []
        for index in self.workers:
            self.tell(index)
        while self.mail.waiting():
            self.deliver(0, 1)
        for lender in self.workers.values():
            assert all(mapping.allocation.alive for mapping in lender.driver.mappings.values())
            lender.memory.close_all()
            assert lender.driver.mappings == {} and lender.driver.opened == lender.driver.closed
            assert lender.driver.events == {}
        self.nothing_that_cuda_forbids()


TestAnythingInAnyOrder = Lending.TestCase
TestAnythingInAnyOrder.settings = settings(max_examples=150, stateful_step_count=60, deadline=None)


# -- the calls themselves


class Runtime:
    """CuPy's runtime as far as `cuda_driver.Driver` calls it: its names and parameters; it notes the calls."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def setDevice(self, device: int) -> None: ...
    def free(self, ptr: int) -> None: ...
    def getDeviceCount(self) -> int:
        return 2

    def deviceCanAccessPeer(self, device: int, peerDevice: int) -> int:
        return int((device, peerDevice) == (1, 0))

    def ipcGetMemHandle(self, devPtr: int) -> bytes:
        return b"m" * 64

    def ipcOpenMemHandle(self, handle: bytes, flags: int = 1) -> int:
        assert (handle, flags) == (b"m" * 64, 1)
        return 5000

    def ipcCloseMemHandle(self, devPtr: int) -> None:
        self.calls.append(("close", devPtr))

    def ipcGetEventHandle(self, event: int) -> bytes:
        return b"e" * 64

    def ipcOpenEventHandle(self, handle: bytes) -> int:
        return 600

    def eventCreateWithFlags(self, flags: int) -> int:
        self.calls.append(("event", flags))
        return 500 + flags

    def eventDestroy(self, event: int) -> None: ...
    def eventRecord(self, event: int, stream: int) -> None:
        self.calls.append(("record", event, stream))

    def eventSynchronize(self, event: int) -> None:
        self.calls.append(("finish", event))

    def streamWaitEvent(self, stream: int, event: int, flags: int = 0) -> None:
        self.calls.append(("wait", stream, event))

    def memcpyAsync(self, dst: int, src: int, size: int, kind: int, stream: int) -> None:
        self.calls.append(("copy", dst, src, size, kind, stream))

    def memcpyPeerAsync(self, dst: int, dstDevice: int, src: int, srcDevice: int, size: int, stream: int) -> None:
        self.calls.append(("peer copy", dst, dstDevice, src, srcDevice, size, stream))


class Library:
    """libcuda: one allocation of 1000 bytes at 4000, number 77; event 7 fails, every other one is not ready."""

    def cuMemGetAddressRange_v2(self, base: Any, size: Any, pointer: ctypes.c_uint64) -> int:
        base._obj.value, size._obj.value = 4000, 1000
        return 0 if 4000 <= pointer.value < 5000 else 1

    def cuPointerGetAttribute(self, data: Any, attribute: int, pointer: ctypes.c_uint64) -> int:
        assert attribute == 7
        data._obj.value = 77
        return 0 if 4000 <= pointer.value < 5000 else 1 if pointer.value else 201

    def cuEventQuery(self, event: ctypes.c_void_p) -> int:
        return 719 if event.value == 7 else 600

    def cuGetErrorString(self, status: int, text: Any) -> int:
        text._obj.value = b"in words"
        return 0


def test_the_driver_calls_cuda_as_cupy_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = Runtime()
    monkeypatch.setitem(sys.modules, "cupy", types.SimpleNamespace())
    monkeypatch.setitem(sys.modules, "cupy.cuda", types.SimpleNamespace(runtime=runtime))
    monkeypatch.setattr(ctypes, "CDLL", lambda name: Library())
    owner, importer = cuda.peer_memory(0), cuda.peer_memory(1)
    lent = owner.export(4100, 64, 1, 3)
    assert lent == (0, b"m" * 64 + (77).to_bytes(8, "little"), 100, b"e" * 64)
    importer.copy(0, 9000, 64, *lent, 4)
    cuda.peer_memory(0).copy(2, 9000, 64, *lent, 4)
    assert runtime.calls == [
        ("event", 2 | 4),
        ("record", 506, 3),
        ("wait", 4, 600),
        ("event", 2),
        ("peer copy", 9000, 1, 5100, 0, 64, 4),
        ("record", 502, 4),
        ("wait", 4, 600),
        ("event", 2),
        ("copy", 9000, 5100, 64, 3, 4),
        ("record", 502, 4),
    ]
    runtime.calls.clear()
    importer.peer_gone(0)
    assert runtime.calls == []  # the copy is not over
    driver: Any = importer._driver
    assert driver.buffer_id(6000) is None
    with pytest.raises(RuntimeError, match=r"cuPointerGetAttribute: in words \(201\)"):
        driver.buffer_id(0)
    with pytest.raises(RuntimeError, match=r"cuEventQuery: in words \(719\)"):
        driver.is_over(7)


# -- the GPU


@pytest.mark.skipif(torch.version.cuda is not None, reason="this torch has CUDA")
def test_a_torch_without_cuda_gives_no_gpu() -> None:
    with pytest.raises(RuntimeError, match=r"worker 3 cannot have a GPU: this torch .* built without CUDA\. Install"):
        cuda.take_device(3)


def test_a_machine_without_gpus_gives_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(RuntimeError, match=r"worker 0 cannot have a GPU: torch .* sees none\. Look at what nvidia-smi"):
        cuda.take_device(0)


def test_workers_share_gpus_when_they_are_more(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[int] = []
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    assert [cuda.take_device(i) for i in range(5)] == chosen == [0, 1, 0, 1, 0]


class Properties:
    """What torch.cuda tells of a GPU, an older torch, so without L2_cache_size."""

    name, total_memory, major, minor, multi_processor_count, warp_size = "A GPU", 8000, 9, 0, 132, 32
    uuid = uuid.UUID(int=5)


def test_properties_and_the_limit_are_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    limits: list[tuple[float, int]] = []
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Properties())
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda *a: limits.append(a))
    assert dict(cuda.properties()) == {
        "name": "A GPU",
        "total_memory": 8000,
        "major": 9,
        "minor": 0,
        "multi_processor_count": 132,
        "warp_size": 32,
        "uuid": "00000000-0000-0000-0000-000000000005",
    }
    cuda.memory_limit(2000)
    cuda.memory_limit(1 << 62)
    assert limits == [(0.25, 1), (1.0, 1)]


def test_page_locking_that_fails_says_so_and_leaves_no_error_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []

    def check_error(status: int) -> None:
        if status:
            raise RuntimeError(f"out of memory ({status})")

    runtime = types.SimpleNamespace(cudaHostRegister=lambda *a: made.append(a) or 2, cudaHostUnregister=lambda p: 0)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "check_error", check_error)
    monkeypatch.setattr(torch, "zeros", lambda *a, **k: made.append("a kernel"))
    with pytest.raises(RuntimeError, match=r"page-locking 4096 bytes of host memory failed: out of memory \(2\)"):
        cuda.register(64, 4096)
    assert made == [(64, 4096, 0), "a kernel"]
    cuda.unregister(64)


def test_importing_needs_neither_cuda_nor_cupy() -> None:
    program = (
        "import os; os.environ['DTORCH_ROLE'] = 'worker'\n"
        "import sys, dtorch.worker.cuda\n"
        "print('cupy' in sys.modules, 'torch' in sys.modules, 'libcuda' in open('/proc/self/maps').read())"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == ["False", "False", "False"]

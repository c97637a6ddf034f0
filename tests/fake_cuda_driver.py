"""CUDA as far as lending needs it, for `test_cuda_ipc.py` alone: GPU memory, streams that a test moves on, processes.

A :class:`Gpus` is the machine, a :class:`Driver` what one process calls (the methods of
``dtorch.worker.cuda_driver.Driver``). Work that is issued on a stream happens when the test steps the stream. What CUDA
refuses raises RuntimeError here; what CUDA leaves undefined and nobody would notice is noted:

* ``violations``: a copy that reads memory its owner has freed, a mapping closed under a copy that has not run;
* ``freed_open``: an allocation that was freed while another process had it open. CUDA's documentation asks that this
  does not happen; see the opening of ``dtorch/worker/cuda.py``.

It knows nothing of how fast or in which order a real GPU works, and no result of a GPU may be concluded from it.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass(eq=False)
class Allocation:
    """Memory of one process on one GPU. Its content is a number at each offset where one was written."""

    owner: Driver
    base: int
    size: int
    number: int
    shareable: bool
    content: dict[int, int] = field(default_factory=dict)
    alive: bool = True
    handle: bytes = b""


@dataclass(eq=False)
class Event:
    """``issued`` counts the records made, ``done`` those that their stream has come to."""

    interprocess: bool
    issued: int = 0
    done: int = 0
    handle: bytes = b""


@dataclass(eq=False)
class Mapping:
    """An allocation as another process has it."""

    allocation: Allocation
    address: int
    copies: int = 0  # issued and not run


@dataclass(eq=False)
class Work:
    """Something a stream is to do, once ``ready``."""

    run: Callable[[], None]
    ready: Callable[[], bool] = lambda: True


@dataclass(eq=False)
class Gpus:
    """The machine. ``same_handles`` makes a handle follow from the base address alone, as CUDA might."""

    count: int = 1
    reach: bool = True  # whether GPUs map each other's memory
    same_handles: bool = False
    violations: list[str] = field(default_factory=list)
    freed_open: list[Allocation] = field(default_factory=list)
    processes: list[Driver] = field(default_factory=list)
    memory_handles: dict[bytes, Allocation] = field(default_factory=dict)
    event_handles: dict[bytes, Event] = field(default_factory=dict)

    def process(self, device: int) -> Driver:
        made = Driver(self, device, len(self.processes) + 1)
        self.processes.append(made)
        return made

    def streams(self) -> list[deque[Work]]:
        """Those whose next work can run."""
        found = [stream for process in self.processes for stream in process.streams.values()]
        return [stream for stream in found if stream and stream[0].ready()]

    def run_all(self) -> None:
        while streams := self.streams():
            streams[0].popleft().run()
        assert not any(stream for process in self.processes for stream in process.streams.values()), "a deadlock"


class Driver:
    """CUDA in one process."""

    def __init__(self, gpus: Gpus, device: int, pid: int) -> None:
        self.gpus = gpus
        self.device = device
        self.pid = pid
        self.streams: dict[int, deque[Work]] = {}
        self.allocations: list[Allocation] = []
        self.mappings: dict[int, Mapping] = {}
        self.events: dict[int, Event] = {}
        self.opened = 0
        self.closed = 0
        self._numbers = itertools.count(1)
        self._addresses = itertools.count(pid * 1_000_000_000, 1_000_000)

    # -- what a test does: allocate, write, free, die

    def allocate(self, base: int, size: int, shareable: bool = True) -> Allocation:
        assert all(base + size <= a.base or a.base + a.size <= base for a in self.allocations)
        made = Allocation(self, base, size, next(self._numbers), shareable)
        self.allocations.append(made)
        return made

    def free(self, allocation: Allocation) -> None:
        self.allocations.remove(allocation)
        allocation.alive = False
        openers = [p for p in self.gpus.processes for m in p.mappings.values() if m.allocation is allocation]
        if openers:
            self.gpus.freed_open.append(allocation)

    def write(self, allocation: Allocation, offset: int, content: int, stream: int) -> None:
        self._issue(stream, Work(lambda: allocation.content.update({offset: content})))

    def die(self) -> None:
        """Its memory goes, what it has issued never happens and is waited for no longer."""
        for allocation in list(self.allocations):
            self.allocations.remove(allocation)  # an allocation of the dead stays while somebody has it open
        for work in (work for stream in self.streams.values() for work in stream):
            if isinstance(work, _Record):
                work.run()
        self.streams.clear()
        self.mappings.clear()

    def _issue(self, stream: int, work: Work) -> None:
        self.streams.setdefault(stream, deque()).append(work)

    # -- devices

    def device_count(self) -> int:
        return self.gpus.count

    def can_access_peer(self, device: int, peer: int) -> bool:
        return self.gpus.reach

    # -- memory

    def address_range(self, pointer: int) -> tuple[int, int]:
        found = self._allocation(pointer)
        if found is None:
            raise RuntimeError("cuMemGetAddressRange: invalid argument (1)")
        return found.base, found.size

    def buffer_id(self, pointer: int) -> int | None:
        found = self._allocation(pointer)
        return found.number if found else None

    def _allocation(self, pointer: int) -> Allocation | None:
        return next((a for a in self.allocations if a.base <= pointer < a.base + a.size), None)

    def memory_handle(self, base: int) -> bytes:
        found = self._allocation(base)
        if found is None or found.base != base or not found.shareable:
            raise RuntimeError("cudaErrorInvalidValue: invalid argument")
        number = 0 if self.gpus.same_handles else found.number
        found.handle = f"{self.pid} {base} {number}".encode().ljust(64, b"\0")
        self.gpus.memory_handles[found.handle] = found
        return found.handle

    def open_memory(self, handle: bytes) -> int:
        assert len(handle) == 64
        allocation = self.gpus.memory_handles.get(handle)
        if allocation is None or not allocation.alive or allocation.owner is self:
            raise RuntimeError("cudaErrorInvalidValue: invalid argument")
        if any(mapping.allocation.handle == handle for mapping in self.mappings.values()):
            raise RuntimeError("cudaErrorAlreadyMapped: resource already mapped")
        address = next(self._addresses)
        self.mappings[address] = Mapping(allocation, address)
        self.opened += 1
        return address

    def close_memory(self, address: int) -> None:
        mapping = self.mappings.pop(address, None)
        if mapping is None:
            raise RuntimeError("cudaErrorInvalidValue: invalid argument")
        if mapping.copies:
            self.gpus.violations.append(f"process {self.pid} closed memory under {mapping.copies} copies")
        self.closed += 1

    # -- events

    def make_event(self, interprocess: bool = False) -> int:
        address = next(self._addresses)
        self.events[address] = Event(interprocess)
        return address

    def event_handle(self, event: int) -> bytes:
        found = self.events[event]
        if not found.interprocess:
            raise RuntimeError("cudaErrorInvalidResourceHandle: invalid resource handle")
        found.handle = f"{self.pid} {event}".encode().ljust(64, b"\0")
        self.gpus.event_handles[found.handle] = found
        return found.handle

    def open_event(self, handle: bytes) -> int:
        address = next(self._addresses)
        self.events[address] = self.gpus.event_handles[handle]
        return address

    def destroy_event(self, event: int) -> None:
        del self.events[event]

    def record(self, event: int, stream: int) -> None:
        found = self.events[event]
        found.issued += 1
        self._issue(stream, _Record(found, found.issued))

    def wait(self, stream: int, event: int) -> None:
        found, wanted = self.events[event], self.events[event].issued
        self._issue(stream, Work(lambda: None, lambda: found.done >= wanted))

    def is_over(self, event: int) -> bool:
        return self.events[event].done == self.events[event].issued

    def finish(self, event: int) -> None:
        """Others' streams run on while this process waits."""
        while not self.is_over(event):
            streams = self.gpus.streams()
            assert streams, "a deadlock"
            streams[0].popleft().run()

    # -- copies

    def copy(self, target: int, source: int, nbytes: int, stream: int) -> None:
        self.copy_between(target, self.device, source, self.device, nbytes, stream)

    def copy_between(
        self, target: int, target_device: int, source: int, source_device: int, nbytes: int, stream: int
    ) -> None:
        into = self._allocation(target)
        mapping = next(m for m in self.mappings.values() if m.address <= source < m.address + m.allocation.size)
        assert into is not None and target + nbytes <= into.base + into.size
        assert source + nbytes <= mapping.address + mapping.allocation.size
        assert (target_device, source_device) == (self.device, mapping.allocation.owner.device)
        mapping.copies += 1

        def run() -> None:
            mapping.copies -= 1
            if not mapping.allocation.alive:
                self.gpus.violations.append(f"process {self.pid} copied from memory that was freed")
            into.content[target - into.base] = mapping.allocation.content.get(source - mapping.address, 0)

        self._issue(stream, Work(run))


class _Record(Work):
    """An event's record, at its place in a stream."""

    def __init__(self, event: Event, number: int) -> None:
        super().__init__(lambda: setattr(event, "done", max(event.done, number)))

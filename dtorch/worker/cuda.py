"""What a CUDA worker's executor asks of Python: its GPU, page-locked memory, and memory lent from worker to worker.

The executor calls this per transfer or per buffer, never per operator, and always on its own thread. Nothing here is
imported, and no CUDA touched, before a worker has been forked and calls `take_device`.

Lending (`PeerMemory`). An **owner** hands out a tensor as the GPU's number, a handle of the whole allocation in which
the tensor lies, an offset, and an event. The **importer** opens the handle, has its stream wait for the event, and
copies. In order of events, the executors' part in brackets:

 1. owner: `export`; [a loan keeps the block from PyTorch's allocator; the message goes off]
 2. importer: `copy`; [an event of its own tells it when the copy is over, and then it returns the loan]
 3. owner: [gives the block back to the allocator]. The handle stays open over there, for the next tensor.
 4. owner: the allocator has given the whole allocation back to CUDA: `freed` says so, and [the peers are told]
 5. importer: `close`.

Opening costs much more than a copy, hence the cache. PyTorch's allocator frees its segments without asking us, in the
midst of an allocation that would else fail; so an importer may have memory open, idle, that its owner freed (4 before
5). What CUDA keeps alive then is an address range nobody uses. Where the worker itself is about to give memory back
(`empty_cache`) it should do better: `revoke`, tell the peers, wait until they have closed, and only then free.

Invariants:

IPC-1   A copy is issued only behind an event that the owner recorded, after the tensor's last write, before it told
        the importer. A stream of the owner's has one event, recorded anew at every export from that stream: who waits
        for a later record of it waits for more than it needs and never for less. Waits are for records already made,
        so no circle can arise.
IPC-2   A handle names one allocation for good: it carries the number (buffer id) that CUDA gives to an allocation and
        never again. A base address that was freed and allocated anew is another handle, and an importer closes the
        mapping of the older one before it opens the newer, were CUDA's part of both the same.
IPC-3   An importer opens a handle once, whatever number of tensors lies in the allocation, and closes it once.
IPC-4   A mapping is closed only when no copy from it is under way. The owner names a handle in `freed` or `revoke` only
        when no loan in that allocation is out, so `close` finds the copies over. After a death nobody promises this:
        `peer_gone` and `close_all` close what is over, keep the rest for a later call, and never wait.
IPC-5   `freed` and `revoke` name an allocation to a peer at most once, and only to peers that it was given to and that
        live. What was named is forgotten: a later export gives it anew.
IPC-6   What cannot be lent (memory of expandable segments or of a memory pool, a GPU the importer's cannot reach, no
        CuPy) is None from `export` and never an exception; the caller then goes through host memory. Said once.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import Final

from dtorch.worker.cuda_driver import Driver

#: What CUDA's part of a handle takes; the allocation's number follows in 8 bytes (IPC-2).
_CUDA_HANDLE: Final = 64

# -- the GPU


def take_device(worker: int) -> int:
    """Make GPU ``worker`` modulo the number of GPUs this thread's current one; returns its number.

    Raises RuntimeError where torch has no CUDA or sees no GPU.
    """
    import torch

    if torch.version.cuda is None:
        raise RuntimeError(
            f"worker {worker} cannot have a GPU: this torch ({torch.__version__}) was built without CUDA. Install one "
            "with CUDA and build dtorch again (python native/build.py), or use dtorch.init(device='cpu')"
        )
    count = torch.cuda.device_count()
    if not count:
        raise RuntimeError(
            f"worker {worker} cannot have a GPU: torch {torch.__version__} sees none. Look at what nvidia-smi says and "
            "at CUDA_VISIBLE_DEVICES, or use dtorch.init(device='cpu')"
        )
    device = worker % count
    torch.cuda.set_device(device)
    return device


def properties() -> list[tuple[str, str | int]]:
    """What torch.cuda.get_device_properties tells of this worker's GPU, as (name, value); older torches know less."""
    import torch

    found = torch.cuda.get_device_properties(torch.cuda.current_device())
    names = ("name", "total_memory", "major", "minor", "multi_processor_count", "warp_size", "L2_cache_size", "uuid")
    values = [(name, getattr(found, name)) for name in names if hasattr(found, name)]
    return [(name, value if isinstance(value, int) else str(value)) for name, value in values]


def memory_limit(nbytes: int) -> None:
    """Let this worker's tensors take at most so many bytes of its GPU; PyTorch raises OutOfMemoryError beyond."""
    import torch

    device = torch.cuda.current_device()
    total = torch.cuda.get_device_properties(device).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, nbytes / total), device)


def memory_info() -> tuple[int, int]:
    """Bytes of this worker's GPU that are free, and that it has."""
    import torch

    free, total = torch.cuda.mem_get_info()
    return free, total


# -- page-locked host memory


def register(pointer: int, nbytes: int) -> None:
    """Page-lock host memory, so that copies between it and the GPU need no host thread. Raises RuntimeError."""
    import torch

    status = torch.cuda.cudart().cudaHostRegister(pointer, nbytes, 0)  # type: ignore[no-untyped-call]
    _check(f"page-locking {nbytes} bytes of host memory", status)


def unregister(pointer: int) -> None:
    """Undo `register`, once no copy uses the memory. Raises RuntimeError."""
    import torch

    status = torch.cuda.cudart().cudaHostUnregister(pointer)  # type: ignore[no-untyped-call]
    _check("unlocking host memory", status)


def _check(what: str, status: int) -> None:
    import torch

    try:
        torch.cuda.check_error(status)
    except RuntimeError as error:
        # The runtime keeps the failure as the thread's last error, and PyTorch would blame the next kernel for it.
        # torch.cuda has no way to clear it but to launch one.
        try:
            torch.zeros(1, device="cuda")
        except RuntimeError:
            pass
        raise RuntimeError(f"{what} failed: {error}") from None


# -- memory lent from worker to worker


def peer_memory(device: int) -> PeerMemory:
    """The PeerMemory of this process. Where CuPy or the driver's library is missing it lends nothing (IPC-6)."""
    try:
        return PeerMemory(Driver(device), device)
    except (ImportError, OSError, RuntimeError) as error:
        memory = PeerMemory(None, device)
        import torch

        version = (torch.version.cuda or "13").partition(".")[0]
        memory.refuse(f"{type(error).__name__}: {error} (CuPy: pip install cupy-cuda{version}x)")
        return memory


@dataclass
class _Export:
    """An allocation of ours that peers know."""

    number: int  # its buffer id
    handle: bytes | None  # None: CUDA does not lend it
    peers: set[int] = field(default_factory=set)  # who may have it open


@dataclass
class _Mapping:
    """An allocation of a peer's, open here."""

    address: int
    events: dict[int, int] = field(default_factory=dict)  # by stream: recorded behind the last copy from it


class PeerMemory:
    """Both halves of lending: what this worker gives to others, and what it has open of theirs. One thread only."""

    def __init__(self, driver: Driver | None, device: int) -> None:
        self._driver = driver
        self._device = device
        self._said = False
        # what we lend
        self._exports: dict[int, _Export] = {}  # by base address
        self._gone: list[_Export] = []  # found freed, and not told yet
        self._records: dict[int, tuple[int, bytes]] = {}  # by stream: its event (IPC-1), and the event's handle
        # what we borrow
        self._mappings: dict[int, dict[bytes, _Mapping]] = {}  # by source and handle
        self._events: dict[int, dict[bytes, int]] = {}  # by source and handle: its events, as they are called here
        self._late: list[_Mapping] = []  # of dead peers, with a copy that may be under way (IPC-4)

    # -- the owner

    def export(self, pointer: int, nbytes: int, dest: int, stream: int) -> tuple[int, bytes, int, bytes] | None:
        """Lend ``nbytes`` at ``pointer``, last written on ``stream``, to worker ``dest``.

        Returns what the importer's `copy` takes: device, handle, offset, event. None where it cannot be (IPC-6). The
        caller keeps the memory unchanged until the importer returns the loan.
        """
        driver = self._driver
        if driver is None:
            return None
        try:
            base, size = driver.address_range(pointer)
            exported = self._known(base)
            if exported.handle is None or pointer + nbytes > base + size:
                self.refuse("memory of expandable segments, or of a memory pool, cannot be shared between processes")
                return None
            theirs = dest % driver.device_count()  # as take_device chooses
            if theirs != self._device and not driver.can_access_peer(theirs, self._device):
                self.refuse(f"GPU {theirs} cannot reach the memory of GPU {self._device}")
                return None
            if stream not in self._records:
                made = driver.make_event(interprocess=True)
                self._records[stream] = made, driver.event_handle(made)
            event, event_handle = self._records[stream]
            driver.record(event, stream)
        except RuntimeError as error:
            self.refuse(str(error))
            return None
        exported.peers.add(dest)
        return self._device, exported.handle, pointer - base, event_handle

    def _known(self, base: int) -> _Export:
        """The export of the allocation that is at ``base`` now (IPC-2)."""
        assert self._driver is not None
        number = self._driver.buffer_id(base)
        known = self._exports.get(base)
        if known is not None and known.number == number:
            return known
        if known is not None:
            self._gone.append(known)
            del self._exports[base]
        if number is None:
            raise RuntimeError("CUDA has no number for the allocation")
        try:
            handle = self._driver.memory_handle(base) + number.to_bytes(8, "little")
        except RuntimeError:
            handle = None
        self._exports[base] = fresh = _Export(number, handle)
        return fresh

    def freed(self) -> list[tuple[int, list[bytes]]]:
        """Handles of allocations that are no more, by the peer that got them: each is to close them (IPC-5)."""
        if self._driver is None:
            return []
        self._reap()  # this is called now and then, which the dead's memory needs too
        for base, export in list(self._exports.items()):
            if self._driver.buffer_id(base) != export.number:
                self._gone.append(export)
                del self._exports[base]
        gone, self._gone = self._gone, []
        return _by_peer(gone)

    def revoke(self, lent: list[int]) -> list[tuple[int, list[bytes]]]:
        """The same for allocations that still are, but for those in which an address of ``lent`` lies.

        For when memory is about to be given back to CUDA: once the peers have closed these, it is safe. ``lent`` are
        the pointers on loan now.
        """
        if self._driver is None:
            return []
        kept = {self._driver.address_range(pointer)[0] for pointer in lent}
        taken = [export for base, export in self._exports.items() if base not in kept]
        self._exports = {base: export for base, export in self._exports.items() if base in kept}
        gone, self._gone = self._gone, []
        return _by_peer(gone + taken)

    def refuse(self, why: str) -> None:
        """Say, once in a process, that copies go through host memory."""
        if not self._said:
            self._said = True
            print(
                f"dtorch: copies from GPU {self._device} to other workers go through host memory: {why}",
                file=sys.stderr,
                flush=True,
            )

    # -- the importer

    def copy(
        self, source: int, target: int, nbytes: int, device: int, handle: bytes, offset: int, event: bytes, stream: int
    ) -> None:
        """Issue, on ``stream``, the copy to ``target`` of what worker ``source`` exported; nobody waits for it.

        The caller returns the loan when an event that it records behind this on ``stream`` has happened. Raises
        RuntimeError where the memory cannot be opened; nothing has been issued then, and the loan goes back at once.
        """
        driver = self._driver
        if driver is None:
            raise RuntimeError("this worker cannot open another one's GPU memory: CuPy is missing here")
        self._reap()
        mapping = self._open(source, device, handle)
        driver.wait(stream, self._event_of(source, event))
        address = mapping.address + offset
        if stream not in mapping.events:
            mapping.events[stream] = driver.make_event()
        if device == self._device:
            driver.copy(target, address, nbytes, stream)
        else:
            driver.copy_between(target, self._device, address, device, nbytes, stream)
        driver.record(mapping.events[stream], stream)

    def _open(self, source: int, device: int, handle: bytes) -> _Mapping:
        assert self._driver is not None
        open_here = self._mappings.setdefault(source, {})
        if (known := open_here.get(handle)) is not None:
            return known
        for older in [other for other in open_here if other[:_CUDA_HANDLE] == handle[:_CUDA_HANDLE]]:
            self._close(open_here.pop(older))  # IPC-2
        try:
            address = self._driver.open_memory(handle[:_CUDA_HANDLE])
        except RuntimeError as error:
            raise RuntimeError(
                f"memory of worker {source} on GPU {device} cannot be opened on GPU {self._device}: {error}"
            ) from None
        open_here[handle] = fresh = _Mapping(address)
        return fresh

    def _event_of(self, source: int, handle: bytes) -> int:
        assert self._driver is not None
        known = self._events.setdefault(source, {})
        if handle not in known:
            known[handle] = self._driver.open_event(handle)
        return known[handle]

    def close(self, source: int, handles: list[bytes]) -> None:
        """Close what worker ``source`` named in `freed` or `revoke`; handles not open here are passed over.

        Its copies are over (IPC-4), so this waits for none of them; were one not, it would be waited for.
        """
        self._reap()
        open_here = self._mappings.get(source, {})
        for handle in handles:
            if (mapping := open_here.pop(handle, None)) is not None:
                self._close(mapping)

    def peer_gone(self, peer: int) -> None:
        """Worker ``peer`` is dead: forget that it borrowed, and close what was borrowed from it. Does not wait.

        What it had been lent goes back to the caller, who knows the loans.
        """
        for export in [*self._exports.values(), *self._gone]:
            export.peers.discard(peer)
        self._late += self._mappings.pop(peer, {}).values()
        for event in self._events.pop(peer, {}).values():
            assert self._driver is not None
            self._driver.destroy_event(event)  # what already waits for it goes on waiting
        self._reap()

    def close_all(self) -> None:
        """The worker leaves: as if all peers were dead, and without complaint, whatever state CUDA is in."""
        self._exports.clear()
        self._gone.clear()
        try:
            for source in [*self._mappings, *self._events]:
                self.peer_gone(source)
            self._reap()  # of peers who died before
            while self._records:
                assert self._driver is not None
                self._driver.destroy_event(self._records.popitem()[1][0])
        except RuntimeError as error:
            print(f"dtorch: a worker could not close its neighbours' GPU memory: {error}", file=sys.stderr, flush=True)

    def _reap(self) -> None:
        """Close what peers who died left open here, as far as no copy uses it."""
        late, self._late = self._late, []
        for mapping in late:
            assert self._driver is not None
            if all(self._driver.is_over(event) for event in mapping.events.values()):
                self._close(mapping)
            else:
                self._late.append(mapping)

    def _close(self, mapping: _Mapping) -> None:
        assert self._driver is not None
        for event in mapping.events.values():
            self._driver.finish(event)
            self._driver.destroy_event(event)
        self._driver.close_memory(mapping.address)


def _by_peer(exports: list[_Export]) -> list[tuple[int, list[bytes]]]:
    """Their handles, gathered by the peers that got them."""
    found: dict[int, list[bytes]] = {}
    for export in exports:
        for peer in sorted(export.peers):
            if export.handle is not None:
                found.setdefault(peer, []).append(export.handle)
    return sorted(found.items())


# -- what the executor is given


class Hooks:
    """What a CUDA worker's executor calls (``native/worker/device_python.h``); takes the GPU when it is made.

    Memory is lent and copied in the order of the thread's current stream.
    """

    register = staticmethod(register)
    unregister = staticmethod(unregister)
    properties = staticmethod(properties)
    memory_info = staticmethod(memory_info)
    memory_limit = staticmethod(memory_limit)

    def __init__(self, worker: int) -> None:
        self.device = take_device(worker)
        self._peers: PeerMemory | None = None

    def _memory(self) -> PeerMemory:
        if self._peers is None:
            self._peers = peer_memory(self.device)
        return self._peers

    def export(self, pointer: int, nbytes: int, dest: int) -> tuple[int, bytes, int, bytes] | None:
        """See `PeerMemory.export`."""
        return self._memory().export(pointer, nbytes, dest, _current_stream())

    def copy(
        self, source: int, target: int, nbytes: int, device: int, handle: bytes, offset: int, event: bytes
    ) -> None:
        """See `PeerMemory.copy`."""
        self._memory().copy(source, target, nbytes, device, handle, offset, event, _current_stream())

    def revoke(self, lent: list[int]) -> list[tuple[int, list[bytes]]]:
        """See `PeerMemory.revoke`."""
        return [] if self._peers is None else self._peers.revoke(lent)

    def freed(self) -> list[tuple[int, list[bytes]]]:
        """See `PeerMemory.freed`."""
        return [] if self._peers is None else self._peers.freed()

    def close_peer(self, source: int, handles: list[bytes]) -> None:
        """See `PeerMemory.close`."""
        if self._peers is not None:
            self._peers.close(source, handles)

    def peer_gone(self, worker: int) -> None:
        """See `PeerMemory.peer_gone`."""
        if self._peers is not None:
            self._peers.peer_gone(worker)

    def close(self) -> None:
        """The worker leaves."""
        if self._peers is not None:
            self._peers.close_all()


def _current_stream() -> int:
    import torch

    return int(torch.cuda.current_stream().cuda_stream)

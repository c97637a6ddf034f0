"""A worker that computes on the test's accelerator: what the fork server preloads, and what runs in a worker."""

from __future__ import annotations

import ctypes
import os
import struct
from typing import Any

import dtorch.worker.preload  # noqa: F401  # first: the bond to the parent (LIV-2)
from accelerator import BOARD, LIBRARY
from dtorch.worker import process

_library = ctypes.CDLL(os.environ[LIBRARY], os.RTLD_NOW | os.RTLD_GLOBAL)
_library.accelerator_lend.restype = ctypes.c_int64


def main(directory: str, worker: int, threads: int, device: str) -> None:
    process.bind(directory, worker)
    _library.accelerator_start(worker)
    process.work(directory, worker, threads, "privateuseone:0", Hooks(worker))


class Hooks:
    """As `dtorch.worker.cuda.Hooks`."""

    def __init__(self, worker: int) -> None:
        self.worker = worker
        self.given: list[tuple[int, list[bytes]]] = []
        self.gone: list[tuple[int, list[bytes]]] = []

    def __getattribute__(self, name: str) -> Any:
        if _library.accelerator_refuses() and name != "close":
            raise RuntimeError("the test wants this to fail")
        return super().__getattribute__(name)

    def register(self, pointer: int, nbytes: int) -> None:
        _library.accelerator_lock(ctypes.c_void_p(pointer), ctypes.c_size_t(nbytes))

    def unregister(self, pointer: int) -> None:
        if not _library.accelerator_unlock(ctypes.c_void_p(pointer)):
            raise RuntimeError("accelerator error: that memory is not page-locked")

    def properties(self) -> list[tuple[str, str | int]]:
        return [("name", "test accelerator"), ("total_memory", 16 << 30)]

    def memory_info(self) -> tuple[int, int]:
        return 8 << 30, 16 << 30

    def memory_limit(self, nbytes: int) -> None:
        raise RuntimeError("the test's accelerator has its limit on the board")

    def export(self, pointer: int, nbytes: int, dest: int) -> tuple[int, bytes, int, bytes] | None:
        fd, offset = ctypes.c_int(), ctypes.c_uint64()
        number = _library.accelerator_lend(ctypes.c_void_p(pointer), ctypes.byref(fd), ctypes.byref(offset))
        if not number:
            return None
        handle = struct.pack("ii", os.getpid(), fd.value)
        self.gone, self.given = self.given, [(dest, [handle])]  # as if the allocator had freed what was lent before
        return 0, handle, offset.value, struct.pack("q", number)

    def copy(
        self, source: int, target: int, nbytes: int, device: int, handle: bytes, offset: int, event: bytes
    ) -> None:
        pid, fd = struct.unpack("ii", handle)
        (number,) = struct.unpack("q", event)
        taken = _library.accelerator_take(
            source,
            pid,
            fd,
            ctypes.c_uint64(offset),
            ctypes.c_int64(number),
            ctypes.c_void_p(target),
            ctypes.c_size_t(nbytes),
        )
        if not taken:
            raise RuntimeError("accelerator error: the memory's owner is gone")

    def freed(self) -> list[tuple[int, list[bytes]]]:
        gone, self.gone = self.gone, []
        return gone

    def revoke(self, lent: list[int]) -> list[tuple[int, list[bytes]]]:
        given, self.given = self.given, []
        return given

    def close_peer(self, source: int, handles: list[bytes]) -> None:
        with open(os.environ[BOARD] + ".closed", "a") as file:
            file.write(f"worker {self.worker} closed {len(handles)} of worker {source}\n")

    def peer_gone(self, worker: int) -> None:
        pass

    def close(self) -> None:
        pass

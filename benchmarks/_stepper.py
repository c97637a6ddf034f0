"""Counts the instructions that one thread of another process executes, by letting it do one at a time (ptrace).

No counter of the processor's is needed, which virtual machines often hide, and no tool: only Linux, and the right to
trace a process that we started. The other threads and processes run at full speed; the one that is traced takes some
10 microseconds an instruction. The count is of user-space instructions, by the library they lie in.

Where a stretch begins and ends is said by signals to the traced thread, which never receives them: the tracer sees
each and lets it vanish. SIGURG is used because a process that is not traced ignores it.

A traced thread belongs to the thread that traces it: an object is used by one thread alone.
"""

from __future__ import annotations

import bisect
import collections
import ctypes
import os
import platform
import signal
import sys
from pathlib import Path

MARK = signal.SIGURG

_PEEKUSER, _CONT, _SINGLESTEP, _DETACH = 3, 7, 9, 17
_GETREGSET, _SEIZE, _INTERRUPT, _LISTEN = 0x4204, 0x4206, 0x4207, 0x4208
_NT_PRSTATUS = 1
_WALL = 0x40000000
#: In NT_PRSTATUS, the index of the register that holds the address of the next instruction.
_PROGRAM_COUNTER = {"x86_64": 16, "aarch64": 32}
#: An instruction's library, by the beginning of its file's name; whatever is left is "others" (libc, libstdc++, ...).
LIBRARIES = {
    "_client.": "dtorch",
    "_worker.": "dtorch",
    "libtorch": "torch",
    "libc10": "torch",
    "libpython": "python",
    "python": "python",
    "libzmq": "zmq",
}


class Refused(Exception):
    """Processes cannot be traced here; the text says why."""


class _IoVec(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


_ptrace = ctypes.CDLL(None, use_errno=True).ptrace
_ptrace.restype = ctypes.c_long
_ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]


def _call(request: int, tid: int, address: int, data: int) -> None:
    if _ptrace(request, tid, address, data) == -1:
        number = ctypes.get_errno()
        raise OSError(number, f"ptrace request {request:#x}: {os.strerror(number)}")


class Stepper:
    """Traces one thread, from the first use until `release`."""

    def __init__(self, tid: int) -> None:
        """Trace a thread, which goes on. Raises Refused."""
        machine = platform.machine()
        if sys.platform != "linux" or machine not in _PROGRAM_COUNTER:
            raise Refused(f"instructions are counted on Linux on {' and '.join(_PROGRAM_COUNTER)}, not on {machine}")
        self._tid = tid
        self._registers = (ctypes.c_uint64 * 64)()
        self._vector = _IoVec(ctypes.addressof(self._registers), ctypes.sizeof(self._registers))
        self._counter = _PROGRAM_COUNTER[machine]
        try:
            _call(_SEIZE, tid, 0, 0)
        except OSError as error:
            raise Refused(
                f"tracing process {tid} is refused ({error}); it needs CAP_SYS_PTRACE, or a kernel.yama.ptrace_scope "
                "of at most 1, and no other tracer"
            ) from None
        self._stopped = False

    def _wait(self) -> int:
        """Until it stops; returns the signal, 0 for a stop without one."""
        _, status = os.waitpid(self._tid, _WALL)
        if not os.WIFSTOPPED(status):
            raise ProcessLookupError(f"the traced process {self._tid} has ended")
        self._stopped = True
        return 0 if status >> 16 else os.WSTOPSIG(status)

    def run_to_mark(self) -> None:
        """Let it run at full speed until it gets the next mark, and stop it there."""
        if self._stopped:
            _call(_CONT, self._tid, 0, 0)
        while (got := self._wait()) != MARK:
            _call(_CONT, self._tid, 0, got)

    def stop(self) -> None:
        """Stop it where it is, be it asleep."""
        _call(_INTERRUPT, self._tid, 0, 0)
        while (got := self._wait()) != 0:
            _call(_CONT, self._tid, 0, got)

    def step_to_mark(self) -> collections.Counter[int]:
        """Let it go on one instruction at a time until it gets a mark; returns how often each address was executed."""
        counted: collections.Counter[int] = collections.Counter()
        tid, registers, vector, counter = self._tid, self._registers, ctypes.addressof(self._vector), self._counter
        pending = 0
        while True:
            _ptrace(_GETREGSET, tid, _NT_PRSTATUS, vector)
            address = registers[counter]
            _call(_SINGLESTEP, tid, 0, pending)
            got = self._wait()
            if got == MARK:
                return counted
            if got == signal.SIGTRAP:
                counted[address] += 1
            pending = 0 if got == signal.SIGTRAP else got  # a signal of the program's own is its own

    def release(self) -> None:
        """Let it go on untraced. It must be stopped."""
        _call(_DETACH, self._tid, 0, 0)


class Map:
    """Which library an address of a process lies in."""

    def __init__(self, pid: int) -> None:
        self._starts: list[int] = []
        self._regions: list[tuple[int, str]] = []
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            fields = line.split(maxsplit=5)
            if "x" in fields[1]:
                start, end = (int(part, 16) for part in fields[0].split("-"))
                self._starts.append(start)
                self._regions.append((end, os.path.basename(fields[5]) if len(fields) > 5 else ""))

    def file_of(self, address: int) -> str:
        """The file's name, empty where there is none."""
        i = bisect.bisect_right(self._starts, address) - 1
        return self._regions[i][1] if i >= 0 and address < self._regions[i][0] else ""

    def by_library(self, counted: collections.Counter[int]) -> collections.Counter[str]:
        """Instructions by the libraries of `LIBRARIES`, and "others"."""
        found: collections.Counter[str] = collections.Counter()
        for address, count in counted.items():
            name = self.file_of(address)
            found[next((lib for start, lib in LIBRARIES.items() if name.startswith(start)), "others")] += count
        return found

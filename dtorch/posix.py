"""The few Linux calls that Python's ``os`` lacks, and a process's end in words."""

from __future__ import annotations

import ctypes
import os
import signal
import time
from typing import Final

_PR_SET_PDEATHSIG: Final = 1
_PR_SET_NAME: Final = 15
_PR_SET_CHILD_SUBREAPER: Final = 36

_libc: Final = ctypes.CDLL(None, use_errno=True)


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when the *thread* that made it ends; at once if ``parent`` is gone already."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def adopt_orphans() -> None:
    """Make this process the parent of its descendants whose own parent ends, so that it can reap them."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def set_name(name: str) -> None:
    """The name that ``ps`` and ``top`` show; the kernel keeps 15 bytes."""
    buffer = ctypes.create_string_buffer(name.encode()[:15])
    _prctl(_PR_SET_NAME, ctypes.addressof(buffer))


def in_words(exitcode: int) -> str:
    """An exit code as ``subprocess`` and ``multiprocessing`` give it (negative: a signal) as words."""
    if exitcode >= 0:
        return f"exit status {exitcode}"
    try:
        return f"killed by {signal.Signals(-exitcode).name}"
    except ValueError:
        return f"killed by signal {-exitcode}"


def children() -> list[int]:
    """The pids of this process's own children, zombies included."""
    try:
        found: list[int] = []
        for thread in os.listdir("/proc/self/task"):
            with open(f"/proc/self/task/{thread}/children") as file:
                found += map(int, file.read().split())
        return found
    except OSError:  # a thread ended meanwhile, or the kernel was built without this file
        return [pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if _parent(pid) == os.getpid()]


def end_descendants() -> None:
    """Kill and reap all children, and theirs: a process that adopts orphans is left with none.

    Those too that another thread makes meanwhile: no round waits for a child that was not there to be killed.
    """
    try:
        while True:
            for pid in children():
                os.kill(pid, signal.SIGKILL)
            # Once a process is reaped its children are ours: the next round kills them.
            if os.waitpid(-1, os.WNOHANG) == (0, 0):
                time.sleep(0.001)
    except (ChildProcessError, ProcessLookupError):
        pass


def _parent(pid: int) -> int | None:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return int(file.read().rpartition(")")[2].split()[1])
    except OSError:
        return None


def _prctl(option: int, argument: int) -> None:
    if _libc.prctl(option, ctypes.c_ulong(argument), 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"prctl({option}, {argument}): {os.strerror(number)}")

"""Finding the processes and directories of this test run, and waiting for them to go.

Every process started here, at whatever remove, inherits the variable DTORCH_TEST_RUN. So a test sees exactly its own,
whoever else runs dtorch on the machine. Zombies do not count: they hold nothing, and their parent may be a container's
first process that never reaps.
"""

from __future__ import annotations

import os
import secrets
import select
import time
from collections.abc import Callable

MARK = "DTORCH_TEST_RUN"


def mark_this_run() -> None:
    """Mark what this process starts from now on."""
    os.environ[MARK] = f"{os.getpid()}-{secrets.token_hex(4)}"


def alive(pid: int) -> bool:
    """Whether it runs (a zombie does not)."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def parent_of(pid: int) -> int:
    with open(f"/proc/{pid}/stat") as file:
        return int(file.read().rpartition(")")[2].split()[1])


def command_of(pid: int) -> str:
    try:
        with open(f"/proc/{pid}/cmdline") as file:
            return file.read().replace("\0", " ").strip()
    except OSError:
        return "?"


def name_of(pid: int) -> str:
    """What the process calls itself (see dtorch.posix.set_name)."""
    try:
        with open(f"/proc/{pid}/comm") as file:
            return file.read().strip()
    except OSError:
        return "?"


def ours() -> set[int]:
    """The living processes that this test run started."""
    mark = f"{MARK}={os.environ[MARK]}".encode()
    found = set()
    for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
        try:
            with open(f"/proc/{pid}/environ", "rb") as file:
                if mark in file.read().split(b"\0") and alive(pid):
                    found.add(pid)
        except OSError:
            continue  # it went, or is another user's
    return found - {os.getpid()}


def of_session(leader: int) -> set[int]:
    """The living processes of the session that ``leader`` leads: an engine's controller and all below it."""
    found = set()
    for pid in ours():
        try:
            if os.getsid(pid) == leader:
                found.add(pid)
        except ProcessLookupError:
            continue
    return found


def wait_gone(pids: set[int], timeout: float) -> set[int]:
    """Wait until these processes have ended; returns those that did not in time."""
    deadline = time.monotonic() + timeout
    for pid in pids:
        try:
            fd = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        try:
            poll = select.poll()
            poll.register(fd, select.POLLIN)
            poll.poll(max(0.0, deadline - time.monotonic()) * 1000)
        finally:
            os.close(fd)
    return {pid for pid in pids if alive(pid)}


def wait_until(true: Callable[[], bool], timeout: float, every: float = 0.01) -> bool:
    """The bounded poll loop for what has no event to wait for: ``true()`` is asked until it says so."""
    deadline = time.monotonic() + timeout
    while not true():
        if time.monotonic() > deadline:
            return False
        time.sleep(every)
    return True


def is_computing(pid: int) -> Callable[[], bool]:
    """A question: has the process used some processor time since this call?"""

    def ticks() -> int:
        with open(f"/proc/{pid}/stat") as file:
            return int(file.read().rpartition(")")[2].split()[11])

    before = ticks()
    return lambda: ticks() > before + 5


def directories() -> set[str]:
    """The engines' directories of this run (conftest.py points XDG_RUNTIME_DIR at a folder of its own)."""
    base = os.environ["XDG_RUNTIME_DIR"]
    return {os.path.join(base, name) for name in os.listdir(base)}


def describe(pids: set[int]) -> str:
    return "\n".join(f"  {pid} (parent {parent_of(pid)}): {command_of(pid)}" for pid in sorted(pids) if alive(pid))

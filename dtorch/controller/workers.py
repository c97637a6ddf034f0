"""Starting the workers, noticing their death, and leaving nothing behind.

The problem: N workers must not cost N imports of torch, a worker must be startable after the controller has threads,
and no process may outlive the engine, however any of them dies.

The idea: the standard library's fork server. It imports torch once and then forks a worker per request; it is a plain
single-threaded process, so the forks are safe. The tree of processes is

    client -> controller -> fork server -> worker-0, worker-1, ...
                        \\-> resource tracker (the standard library's, comes with the fork server)

and every edge has its own watch:

LIV-1  The controller ends when the client ends or calls exec: it watches the client's pidfd, and a pipe whose other end
       only the client holds (``process.py``). Not PR_SET_PDEATHSIG, which would fire when the client's *thread* ends.
LIV-2  The fork server dies with the controller, and a worker with the fork server, by PR_SET_PDEATHSIG = SIGKILL
       (``dtorch/worker/preload.py``, ``process.py``). The kernel does it, so a worker that hangs or computes dies too.
LIV-3  The controller is a subreaper: descendants whose parent is gone become its children. It ends only when wait()
       has said that there are none left.
LIV-4  A worker's death is noticed by the pipe on which the fork server sends its exit code; the fork server's own by
       its pidfd. The first costs that worker only, the second all of them. Never a timer.
LIV-5  Whatever the workers do, stopping takes the grace period plus the kernel's time to tear them down.
LIV-6  The whole engine is one session, led by the controller: a client that gives up can kill it with one call, and a
       terminal's Ctrl-C does not reach it.

Order of events at the start: the fork server is launched (a millisecond) on the main thread, because LIV-2 binds it to
the thread that launched it. A helper thread then asks it for the workers, since each request waits until torch is
imported, while the loop already answers the client.
"""

from __future__ import annotations

import fcntl
import multiprocessing
import os
import select
import sys
import termios
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import wait
from multiprocessing.context import ForkServerProcess
from typing import Final

from dtorch import posix, settings
from dtorch.controller.output import Output

#: The fork server's name among the sources of output.
FORK_SERVER: Final = "forkserver"


@dataclass(frozen=True)
class Death:
    """A worker has ended: its index, its exit status in words, the last lines it printed."""

    worker: int
    status: str
    output: str


@dataclass(frozen=True)
class WorkerCode:
    """What runs in a worker: a module's function ``main(directory, worker, threads, device)``."""

    module: str = "dtorch.worker.process"
    preload: str = "dtorch.worker.preload"


def name_of(worker: int) -> str:
    """A worker's name, everywhere: its socket identity, its prefix in the output, its process name."""
    return f"worker-{worker}"


class Workers:
    """The workers' processes. All methods are for the loop's thread."""

    def __init__(
        self, count: int, arguments: Sequence[object], poll: select.epoll, output: Output, code: WorkerCode
    ) -> None:
        """Launch the fork server and have it start ``count`` workers with ``(directory, worker, threads, device)``."""
        self._poll = poll
        self._output = output
        self._code = code
        self._arguments = arguments
        self._count = count
        self._processes: dict[int, ForkServerProcess] = {}
        self._by_sentinel: dict[int, int] = {}
        self._dead: set[int] = set()
        self._stopping = False

        posix.adopt_orphans()  # LIV-3
        self._server_pid = self._launch_server()
        self._server_fd = os.pidfd_open(self._server_pid)
        poll.register(self._server_fd, select.EPOLLIN)

        self._news: deque[tuple[int, ForkServerProcess | None, str]] = deque()  # from the starter; appending is atomic
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        poll.register(self._wake_fd, select.EPOLLIN)
        self._starter = threading.Thread(target=self._start_all, name="dtorch-starter", daemon=True)
        self._starter.start()

    def is_dead(self, worker: int) -> bool:
        return worker in self._dead

    def handles(self, fd: int) -> bool:
        return fd in self._by_sentinel or fd in (self._server_fd, self._wake_fd)

    def ready(self, fd: int) -> list[Death]:
        """The loop found ``fd`` readable; returns the deaths it told of, each worker's once (LIV-4)."""
        if fd == self._wake_fd:
            return self._take_news()
        if fd == self._server_fd:
            return self._server_died()
        worker = self._by_sentinel.pop(fd)
        self._poll.unregister(fd)
        if worker in self._dead:
            return []
        if (
            _bytes_in(fd) == 0
        ):  # the pipe was closed without a code: the fork server is dying, and will be a zombie soon
            wait([self._server_fd], 1.0)
            return self._server_died()
        exitcode = self._processes[worker].exitcode
        assert exitcode is not None
        return [self._bury(worker, posix.in_words(exitcode))]

    def stop(self, grace: float) -> None:
        """Give the workers ``grace`` seconds to end by themselves, then end every descendant (LIV-3, LIV-5)."""
        self._stopping = True
        deadline = time.monotonic() + grace
        waiting = set(self._by_sentinel)
        while waiting and (left := deadline - time.monotonic()) > 0 and self._server_status() is None:
            waiting -= set(wait(waiting, left))
        posix.end_descendants()
        # Asking a fork server that is gone makes multiprocessing launch it again, and its resource tracker.
        self._starter.join(1.0)
        posix.end_descendants()

    # -- the fork server

    def _launch_server(self) -> int:
        """Launch it with its output going to a pipe of ours; returns its pid."""
        multiprocessing.set_forkserver_preload([self._code.preload])
        os.environ[settings.ROLE.name] = "worker"  # for the fork server, which inherits it; ours was read at the start
        resource_tracker.ensure_running()
        read_end, write_end = os.pipe()
        self._output.add_pipe(FORK_SERVER, read_end)
        sys.stdout.flush()
        sys.stderr.flush()
        kept = [os.dup(1), os.dup(2)]
        try:
            os.dup2(write_end, 1)
            os.dup2(write_end, 2)
            forkserver.ensure_running()
        finally:
            for target, fd in enumerate(kept, start=1):
                os.dup2(fd, target, inheritable=True)
                os.close(fd)
            os.close(write_end)
        pid = forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined]  # there is no public name for it
        assert isinstance(pid, int)
        return pid

    def _server_status(self) -> str | None:
        """None while the fork server lives, else its exit status; it stays a zombie until stop()."""
        info = os.waitid(os.P_PID, self._server_pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if info is None:
            return None
        return posix.in_words(info.si_status if info.si_code == os.CLD_EXITED else -info.si_status)

    def _server_died(self) -> list[Death]:
        try:
            self._poll.unregister(self._server_fd)
        except FileNotFoundError:
            return []  # was reported already
        status = f"ended with the fork server ({self._server_status()})"
        return [self._bury(worker, status) for worker in range(self._count) if worker not in self._dead]

    # -- workers

    def _start_all(self) -> None:
        """The starter thread: ask for one worker after the other."""
        context = multiprocessing.get_context("forkserver")
        directory, threads, device = self._arguments
        for worker in range(self._count):
            if self._stopping:  # the fork server may be gone, and asking would launch another one
                return
            process = context.Process(
                target=_run,
                name=name_of(worker),
                args=(self._code.module, directory, worker, threads, device),
            )
            try:
                process.start()
                self._news.append((worker, process, ""))
            except (OSError, EOFError) as error:
                # EOFError: the fork server died. Asking again would launch another one, on the wrong thread (LIV-2).
                why = f"could not be started ({type(error).__name__}: {error})"
                self._news.extend((w, None, why) for w in range(worker, self._count))
                return
            finally:
                os.eventfd_write(self._wake_fd, 1)

    def _take_news(self) -> list[Death]:
        os.eventfd_read(self._wake_fd)
        deaths: list[Death] = []
        while self._news:
            worker, process, why = self._news.popleft()
            if process is not None:
                self._processes[worker] = process
                self._by_sentinel[process.sentinel] = worker
                self._poll.register(process.sentinel, select.EPOLLIN)
            elif worker not in self._dead:
                if wait([self._server_fd], 1.0):  # it was dying, and is a zombie now
                    deaths += self._server_died()
                else:
                    deaths.append(self._bury(worker, why))
        return deaths

    def _bury(self, worker: int, status: str) -> Death:
        self._dead.add(worker)
        output = self._output.last_lines(name_of(worker))
        if not output:  # it never came as far as its own output
            output = self._output.last_lines(FORK_SERVER)
        return Death(worker, status, output)


def _bytes_in(pipe: int) -> int:
    return int.from_bytes(fcntl.ioctl(pipe, termios.FIONREAD, bytes(4)), sys.byteorder)


def _run(module: str, *arguments: object) -> None:
    """What the fork server's child calls. The module is named, so that the controller need not import it."""
    import importlib

    importlib.import_module(module).main(*arguments)

"""The engine as the client sees it: a controller process, sockets to it and the workers, and the thread of the replies.

Life, in order:

1. *start*: make the directory, launch the controller, connect, say HELLO, wait for READY. The workers are still
   importing torch then; the client goes on and its records wait in the controller.
2. *attached*: native code owns the sending socket (``_client.attach``), the thread ``dtorch-replies`` the other.
3. *the end*, whichever comes first: :meth:`Engine.shutdown` (called by the program or at exit), the controller's death
   (the reply thread notices by its pidfd), or the client's own (the controller notices, LIV-1).

Who may touch what: the sending socket belongs to native code between attach and detach, and to whoever holds
``Engine._ending`` before and after; the receiving socket belongs to the reply thread from its start to its end.

ENG-1  After ``shutdown`` has returned, or a ControllerDied was raised, no process and no directory of the engine is
       left but what the kernel is tearing down.
ENG-2  ``shutdown`` may be called at any time, from any thread, any number of times; it returns within two seconds.
ENG-3  A child made by fork has no engine: nothing it does, its exit included, touches the parent's.
ENG-4  Whoever waits for a value is woken when the worker, or the controller, dies.
"""

from __future__ import annotations

import atexit
import os
import select
import signal
import site
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, Final

import msgpack
import zmq

import dtorch
from dtorch import _client, posix, settings, zmq_api
from dtorch.client.rundir import RunDirectory
from dtorch.errors import ControllerDied, EngineError, WorkerDied
from dtorch.protocol import VERSION, Message

#: Seconds that the controller gets to end everything before its whole session is killed. The controller needs its
#: workers' grace (0.5 s) and some more; ENG-2 leaves no more than this.
SHUTDOWN_PATIENCE: Final = 1.5
#: What Python runs as the controller. Tests have one whose workers are of their own kind.
CONTROLLER: Final = ["-m", "dtorch.controller"]
#: Bytes of the controller's stderr that are shown when it died.
LAST_BYTES: Final = 8 * 1024


def _nobody_waits(requests: list[int]) -> None:
    pass


#: Called with the numbers of completed requests that have callbacks, on the reply thread or, for those that shutting
#: down fails, on the thread that does it. ``futures.py`` puts its own here.
on_completed: Callable[[list[int]], None] = _nobody_waits


class Engine:
    """A running controller and its workers. Made by :func:`start`; there is at most one."""

    def __init__(self, workers: int, threads_per_worker: int, device: str) -> None:
        """Start it; returns as soon as the controller answers.

        ``workers`` processes are started, each using ``threads_per_worker`` threads for an operator; ``device`` is
        "cpu". Raises EngineError when the controller refuses or does not answer, ControllerDied when it ends.
        """
        self.workers = workers
        self.threads_per_worker = threads_per_worker
        self.device = device
        #: Set once the controller has died of something else than shutdown().
        self.death: ControllerDied | None = None
        #: The workers that died, by index.
        self.dead_workers: dict[int, WorkerDied] = {}

        self._owner = os.getpid()
        self._ending = threading.Lock()  # held by whoever ends the engine; guards _ended
        self._ended = False
        self._news = threading.Condition()  # guards _worker_pids and dead_workers, notified on each change
        self._worker_pids: dict[int, int] = {}
        self._answers: deque[list[Any]] = deque()  # of the controller; guarded by _news

        self._directory = RunDirectory()
        try:
            self._listen()
            self._launch()
            self._connect()
            self._greet()
            _client.attach(
                zmq_api.addresses(),
                self._push.underlying,
                self._replies.fileno(),
                workers,
                device != "cpu",
                settings.INFLIGHT_MB.get_int() << 20,
                settings.UPLOAD_MB.get_int() << 20,
                settings.FLUSH_US.get_int(),
            )
        except BaseException:
            self._kill()
            self._close()
            raise
        self._wake = os.eventfd(0, os.EFD_CLOEXEC)
        self._thread = threading.Thread(target=self._take_replies, name="dtorch-replies", daemon=True)
        self._thread.start()

    @property
    def directory(self) -> str:
        """Where the sockets lie."""
        return self._directory.path

    @property
    def is_over(self) -> bool:
        """Whether it was shut down, died, or belongs to the process that this one was forked from."""
        return self._ended or self.death is not None or self._owner != os.getpid()

    def pids(self) -> dict[str, int]:
        """The engine's processes that live: "controller", and "worker-0" and so on as far as they have come up."""
        with self._news:
            living = {f"worker-{w}": pid for w, pid in self._worker_pids.items() if w not in self.dead_workers}
        return {"controller": self._process.pid, **living}

    def wait_for_workers(self, timeout: float | None = None) -> bool:
        """Wait until every worker has come up or died; False when ``timeout`` seconds were not enough.

        Nothing needs this before using the workers. Measurements do, and programs that want to fail early.
        """

        def settled() -> bool:
            return self.is_over or len(self._worker_pids.keys() | self.dead_workers.keys()) == self.workers

        with self._news:
            return self._news.wait_for(settled, timeout)

    def ask_controller(self, message: bytes) -> list[Any]:
        """Send the controller a message that it answers, and wait for the fields of its answer.

        One thread at a time. Raises ControllerDied or EngineError when there will be none.
        """
        _client.tell_controller(message)
        with self._news:
            self._news.wait_for(lambda: self._answers or self.is_over)
            if self._answers:
                return self._answers.popleft()
        raise self.death or EngineError("the engine was shut down")

    # -- the start

    def _launch(self) -> None:
        self._errors = os.memfd_create("dtorch-controller-stderr")
        try:
            stderr = os.dup(2)
        except OSError:  # a program without a stderr
            stderr = os.open(os.devnull, os.O_WRONLY)
        options: Mapping[str, object] = {
            "directory": self._directory.path,
            "workers": self.workers,
            "threads": self.threads_per_worker,
            "device": self.device,
            "client-pid": os.getpid(),
            "stderr-fd": stderr,
        }
        try:
            self._process = subprocess.Popen(
                [sys.executable, *CONTROLLER, *(f"--{name}={value}" for name, value in options.items())],
                stdin=subprocess.PIPE,  # never written to: it closes with this process, which the controller watches
                stdout=self._errors,
                stderr=self._errors,
                cwd="/",  # not to keep the user's directory busy
                env=_environment(),
                pass_fds=[stderr],
                start_new_session=True,
            )
        finally:
            os.close(stderr)
        self._controller = os.pidfd_open(self._process.pid)

    def _listen(self) -> None:
        """Offer the workers a direct way for their replies; native code accepts them (``native/client/direct.h``)."""
        self._replies = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
        self._replies.bind(os.path.join(self._directory.path, "replies"))
        self._replies.listen(self.workers)

    def _connect(self) -> None:
        self._context = zmq.Context()
        self._push = self._socket(zmq.PUSH, "in")
        self._pull = self._socket(zmq.PULL, "out")

    def _socket(self, kind: int, name: str) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        socket.set_hwm(0)
        socket.linger = 0
        socket.reconnect_ivl = 2  # ms; the controller binds a moment after it was launched
        socket.connect(f"ipc://{self._directory.path}/{name}")
        return socket

    def _greet(self) -> None:
        """Say HELLO and wait for the answer."""
        self._push.send(
            msgpack.packb([Message.HELLO, VERSION, self.workers, self.device, self.threads_per_worker]), zmq.NOBLOCK
        )
        patience = settings.START_TIMEOUT.get_int()
        poller = zmq.Poller()
        poller.register(self._pull, zmq.POLLIN)
        poller.register(self._controller, zmq.POLLIN)
        ready = dict(poller.poll(patience * 1000))
        if self._pull in ready:
            kind, value = msgpack.unpackb(self._pull.recv())[:2]
            if kind == Message.READY:
                return
            assert kind == Message.REFUSED, f"the controller said {kind} first"
            raise EngineError(f"the controller refused to start: {value}")
        if ready:
            raise self._collect()
        raise EngineError(
            f"the controller did not answer within {patience} s; {settings.START_TIMEOUT.name} sets a longer time"
        )

    # -- the reply thread

    def _take_replies(self) -> None:
        try:
            while not self._ended:
                what, value = _client.receive(self._pull.underlying, [self._wake, self._controller])
                if what == "completed":
                    assert isinstance(value, list)
                    _tell_completed(value)
                elif what == "message":
                    assert isinstance(value, bytes)
                    self._take_message(value)
                elif value == self._wake:
                    return
                else:
                    self._controller_died(self._collect())
                    return
        except Exception:
            # A bug of ours; nobody would hear the answers any longer, so nobody may go on waiting for them.
            text = traceback.format_exc()
            self._kill()
            self._controller_died(ControllerDied("ended by the client, whose reply thread failed", text))
        finally:
            self._pull.close()

    def _take_message(self, frame: bytes) -> None:
        kind, *fields = msgpack.unpackb(frame)
        if kind == Message.WORKER_READY:
            worker, pid = fields
            with self._news:
                self._worker_pids[worker] = pid
                self._news.notify_all()
        elif kind == Message.WORKER_DIED:
            worker, status, output = fields
            death = WorkerDied(worker, status, output)
            with self._news:
                self.dead_workers[worker] = death
                self._news.notify_all()
            _tell_completed(_client.worker_died(worker, str(death)))  # ENG-4
        elif kind == Message.TRACED:
            with self._news:
                self._answers.append(fields)
                self._news.notify_all()
        else:
            raise AssertionError(f"the client has no use for message {kind}")

    def _controller_died(self, death: ControllerDied) -> None:
        self.death = death
        completed = _client.detach(str(death))  # ENG-4
        self._directory.remove()
        with self._news:
            self._news.notify_all()
        _tell_completed(completed)

    # -- the end

    def shutdown(self) -> None:
        """End the engine: whatever is still open fails, all processes end, the directory goes. See ENG-1 to ENG-3."""
        if self._owner != os.getpid():
            return
        on_reply_thread = threading.current_thread() is self._thread
        # Two may end it at once. The second waits, but not on the reply thread, for which the first is waiting.
        if not self._ending.acquire(blocking=not on_reply_thread):
            return
        completed: list[int] = []
        try:
            if not self._ended:
                self._ended = True
                completed = self._shut_down(on_reply_thread)
        finally:
            self._ending.release()
        _tell_completed(completed)  # without the lock: a callback may shut down too

    def _shut_down(self, on_reply_thread: bool) -> list[int]:
        """Returns the requests that failed by it and have callbacks."""
        deadline = time.monotonic() + SHUTDOWN_PATIENCE
        completed = _client.detach("the engine was shut down")
        os.eventfd_write(self._wake, 1)
        if not on_reply_thread:
            # It may be in a callback of the program's that takes its time; then it closes its socket later.
            self._thread.join(SHUTDOWN_PATIENCE / 3)
        if self.death is None:
            try:
                self._push.send(msgpack.packb([Message.SHUTDOWN]), zmq.NOBLOCK)
            except zmq.ZMQError:
                pass  # closing its stdin, next, says the same
            assert self._process.stdin is not None
            self._process.stdin.close()
            ended = select.poll()
            ended.register(self._controller, select.POLLIN)
            ended.poll(max(0.0, deadline - time.monotonic()) * 1000)
        self._kill()
        self._close()
        with self._news:
            self._news.notify_all()
        return completed

    def _kill(self) -> None:
        """End what is left of the engine's session, and reap the controller."""
        process = getattr(self, "_process", None)
        if process is None or process.returncode is not None:
            return
        try:
            # LIV-6. While the controller is not reaped its number cannot mean anybody else.
            os.killpg(process.pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            pass  # it ended, and was not the group's leader yet
        process.kill()
        process.wait()

    def _collect(self) -> ControllerDied:
        """The controller has ended by itself: reap it, end what it left, and tell how it went."""
        try:
            info = os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOWAIT)
        except ChildProcessError:
            info = None
        if info is None:
            status = "exit status unknown, since the program itself waits for all children"
        else:
            status = posix.in_words(info.si_status if info.si_code == os.CLD_EXITED else -info.si_status)
        self._kill()
        size = os.fstat(self._errors).st_size
        output = os.pread(self._errors, LAST_BYTES, max(0, size - LAST_BYTES))
        return ControllerDied(status, output.decode(errors="replace"))

    def _close(self) -> None:
        """Give back descriptors, sockets and the directory, as far as the start had come."""
        self._directory.remove()
        if hasattr(self, "_push"):
            self._push.close()
        thread = getattr(self, "_thread", None)
        if thread and thread.is_alive():
            return  # it is in a callback of the program's and may yet look at the rest, which goes with the process
        if hasattr(self, "_pull"):
            self._pull.close()  # where there is a thread, it has done that already
        if hasattr(self, "_context"):
            self._context.term()
        if hasattr(self, "_replies"):
            self._replies.close()
        for name in ("_errors", "_controller", "_wake"):
            fd: int | None = getattr(self, name, None)
            if fd is not None:
                os.close(fd)
                delattr(self, name)


def _tell_completed(requests: list[int]) -> None:
    """Run the callbacks; a failure of theirs must not end the thread that runs them."""
    try:
        if requests:
            on_completed(requests)
    except Exception:
        traceback.print_exc()


def _environment() -> dict[str, str]:
    """The controller's: it must find this very dtorch, and nothing in the current directory."""
    entries = [os.path.abspath(p) for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p]
    home = os.path.dirname(os.path.dirname(os.path.abspath(dtorch.__file__)))
    if home not in [*site.getsitepackages(), site.getusersitepackages()]:
        entries.insert(0, home)
    environment = {**os.environ, settings.ROLE.name: "controller", "PYTHONSAFEPATH": "1"}
    if entries:
        environment["PYTHONPATH"] = os.pathsep.join(entries)
    return environment


# -- the current engine

_lock: Any = threading.RLock()  # guards _current
_current: Engine | None = None
#: Engines of the process this one was forked from: kept, so that no destructor runs on what is the parent's (ENG-3).
_inherited: Final[list[Engine]] = []


def current() -> Engine | None:
    """The engine that was started last and not shut down, alive or dead."""
    return _current


def start(workers: int, threads_per_worker: int, device: str) -> Engine:
    """Start the engine and make it the current one; EngineError when there is one already."""
    global _current
    with _lock:
        if _current is not None:
            state = "died" if _current.death else "is running"
            raise EngineError(f"an engine {state} that was not shut down; call dtorch.shutdown() first")
        _current = Engine(workers, threads_per_worker, device)
        return _current


def shutdown() -> None:
    """End the current engine, if there is one; see :meth:`Engine.shutdown`."""
    global _current
    engine = _current
    if engine is not None:
        engine.shutdown()
        with _lock:
            if _current is engine:
                _current = None


def _forget() -> None:
    """In a child made by fork: the engine is the parent's (ENG-3)."""
    global _current, _lock
    _lock = threading.RLock()
    if _current is not None:
        _inherited.append(_current)
        _current = None


atexit.register(shutdown)
os.register_at_fork(after_in_child=_forget)

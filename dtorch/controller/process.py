"""The controller's loop: it routes messages between the client and the workers and ends when the client does.

One thread, one poller. It watches four things: the socket from the client, the workers' socket, the one to the client
(only while something waits to be sent), and one epoll descriptor that holds everything else (the client's pidfd, the
workers' sentinels, what they print), so that the cost of a turn does not grow with the number of workers. Waiting, and
all that is routine, is native (``Scheduler.serve``): records to workers that are up, their replies to the client.

Nothing here waits for a peer: sockets have no high-water mark, and what has no receiver yet is kept (records for a
worker that has not said hello, replies for a client that has not connected yet).

Order on a worker's death: what it printed is taken in; the client is told; the other workers are told; a segment
lent to it goes back to its owner. From then on records for it are dropped and messages from it, if any still come, too.

Any exception is a bug of ours or a peer that breaks the protocol: the traceback goes to stderr, which the client keeps,
and the controller ends with status 1, taking the workers with it.
"""

from __future__ import annotations

import argparse
import os
import select
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from enum import IntEnum
from typing import Any, Final, NoReturn, TypeVar

import msgpack
import zmq

from dtorch import posix, settings, zmq_api
from dtorch._scheduler import Scheduler
from dtorch.controller.output import Output
from dtorch.controller.workers import Death, WorkerCode, Workers, name_of
from dtorch.protocol import MESSAGE_FIELDS, RECORD_FIELDS, STRUCT_FIELDS, VERSION, Message

#: Seconds that workers get to end by themselves before they are killed.
GRACE: Final = 0.5
#: Seconds that the user's stderr gets to take the last lines.
FLUSH: Final = 0.2
#: Messages taken from one socket before the others have their turn.
TURN: Final = 64

#: The names of each message's fields in its first frame.
_NAMES: Final = {kind: fields.partition("|")[0].split() for kind, fields in MESSAGE_FIELDS.items()}

#: Where the token of lent memory stands, by the length of the payload that lends it.
_LENT: Final = {
    len(fields): fields.index("token")
    for fields in (STRUCT_FIELDS["segment"].split(), STRUCT_FIELDS["device_memory"].split())
}

_Handler = TypeVar("_Handler", bound=Callable[..., None])
_Frames = Sequence[zmq.Frame]  # as received
_Frame = Any  # something to send: a zmq.Frame as received, or bytes (what split() hands on is either)


class Source(IntEnum):
    """Where something comes from that ``Scheduler.serve`` hands over."""

    CLIENT = 0
    WORKER = 1
    EVENTS = 2
    OUTBOX = 3


class ProtocolError(Exception):
    """A peer sent what it must not."""


class ClientGone(Exception):
    """The client ended before the controller could watch it."""


class Controller:
    """The routing state and the loop."""

    def __init__(self, options: argparse.Namespace, code: WorkerCode) -> None:
        directory: str = options.directory
        self._count: int = options.workers
        self._scheduler = Scheduler(self._count, {int(k): 2 + len(f.split()) for k, f in RECORD_FIELDS.items()})
        self._events = select.epoll()
        self._watch_client(options.client_pid)

        self._context = zmq.Context()
        self._inbox = self._bind(zmq.PULL, directory, "in")
        self._outbox = self._bind(zmq.PUSH, directory, "out")
        self._router = self._bind(zmq.ROUTER, directory, "workers")
        sockets = (self._inbox.underlying, self._outbox.underlying, self._router.underlying)
        self._scheduler.attach(zmq_api.addresses(), *sockets, self._events.fileno())

        forward = None if settings.QUIET.get_bool() else options.stderr_fd
        self._output = Output(os.path.join(directory, "log"), self._events, forward)
        arguments = (directory, options.threads, options.device)
        self._workers = Workers(self._count, arguments, self._events, self._output, code)

        self._answered = False  # HELLO; nothing is sent to the client before the answer
        self._greeted = False  # and accepted
        self._running = True
        self._outbox_is_full = False
        self._unsent: deque[Sequence[_Frame]] = deque()  # the client has not said HELLO, or not connected, yet
        self._waiting: defaultdict[int, list[Sequence[_Frame]]] = defaultdict(list)  # until its worker says hello
        self._here: set[int] = set()  # workers that said hello, and live
        self._dead = 0  # how many died
        self._names = [name_of(w).encode() for w in range(self._count)]
        self._index_of = {name: w for w, name in enumerate(self._names)}
        self._lent: set[tuple[int, int, int]] = set()  # segments handed on, not taken yet: (token, source, dest)
        self._tracing = False

    # -- life

    def run(self) -> None:
        """Serve until the client says SHUTDOWN or is gone.

        Native code relays what is routine (``native/scheduler/relay.h``); here comes the rest, a message at a time.
        """
        while self._running:
            routine = self._greeted and not self._unsent and len(self._here) + self._dead == self._count
            source, parts = self._scheduler.serve(routine, self._outbox_is_full)
            frames = [zmq.Frame(part) for part in parts]
            if source == Source.CLIENT:
                self._from_client(frames)
            elif source == Source.WORKER:
                self._from_worker(frames)
            elif source == Source.EVENTS:
                self._drain_events()
            else:
                self._send_unsent()

    def leave(self) -> None:
        """End the workers, however busy they are, and reap all descendants."""
        for worker in self._here:
            self._router.send_multipart([self._names[worker], _pack(Message.EXIT)])
        self._workers.stop(GRACE if self._here else 0.0)
        self._output.flush(FLUSH)

    def _watch_client(self, pid: int) -> None:
        """LIV-1. Two watches, since each alone misses a case: exec keeps the pid, a forked child the pipe."""
        self._client_fds = {sys.stdin.fileno()}
        try:
            self._client_fds.add(os.pidfd_open(pid))
        except ProcessLookupError:
            raise ClientGone from None
        if os.getppid() != pid:  # it was gone, and the number given to another, before the pidfd was open
            raise ClientGone
        for fd in self._client_fds:
            self._events.register(fd, select.EPOLLIN)

    def _bind(self, kind: int, directory: str, name: str) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        socket.set_hwm(0)
        socket.linger = 0
        socket.bind(f"ipc://{directory}/{name}")
        return socket

    def _drain_events(self) -> None:
        for fd, _ in self._events.poll(0):
            if fd in self._client_fds:
                self._running = False
            elif self._output.handles(fd):
                self._output.ready(fd)
            elif self._workers.handles(fd):
                for _ in range(TURN):  # what a worker said before it died comes before its death
                    if not self._drain_workers():
                        break
                for death in self._workers.ready(fd):
                    self._worker_died(death)

    # -- from the client

    def _from_client(self, frames: _Frames) -> None:
        began = self._clock()
        _handler(frames[0], FROM_CLIENT)(self, frames)
        self._note(frames, began, -1, self._scheduler.streams())

    def _hello(self, frames: _Frames) -> None:
        version = msgpack.unpackb(frames[0].buffer)[1]  # other versions may have other fields
        reason = ""
        if version != VERSION:
            reason = (
                f"the client speaks version {version} of the protocol, the controller version {VERSION}: two "
                "installations of dtorch are mixed; is there an older one on PYTHONPATH?"
            )
        elif (workers := _fields(frames[0], Message.HELLO)[1]) != self._count:
            reason = f"the client asks for {workers} workers, the controller was started with {self._count}"
        self._greeted = not reason
        self._answered = True
        self._unsent.appendleft([_pack(Message.REFUSED, reason) if reason else _pack(Message.READY, VERSION)])
        self._send_unsent()

    def _records(self, frames: _Frames) -> None:
        if not self._greeted:
            raise ProtocolError("records came before a HELLO that was accepted")
        (count,) = _fields(frames[0], Message.RECORDS)
        total = 0
        stream: Any = frames[1]  # a Frame is a buffer, which its stubs do not say
        for worker, first_seq, sequenced, released, records, releases in self._scheduler.split(stream):
            total += sequenced + released
            began = self._clock()
            batch = [_pack(Message.BATCH, first_seq, sequenced, released), records, releases]
            self._to_worker(worker, batch)
            self._note(batch, began, worker, first_seq, sequenced)
        if total != count:
            raise ProtocolError(f"a RECORDS message says {count} records and holds {total}")

    def _shutdown(self, frames: _Frames) -> None:
        self._running = False

    # -- the trace (dtorch.profile); native code notes what it relays

    def _trace(self, frames: _Frames) -> None:
        (limit,) = _fields(frames[0], Message.TRACE)
        self._tracing = limit > 0
        self._to_client([_pack(Message.TRACED, *self._scheduler.trace(limit), [])])

    def _clock(self) -> int:
        """The start of an event; 0 while nothing is recorded."""
        return time.monotonic_ns() if self._tracing else 0

    def _note(self, frames: Sequence[_Frame], began: int, worker: int, number: int, records: int = 0) -> None:
        """A message was handled, or sent on, since ``began``."""
        if began and self._tracing:
            kind = memoryview(frames[0])[1]
            size = sum(len(memoryview(frame)) for frame in frames)
            self._scheduler.note(kind, worker, began, number, size, records)

    # -- from the workers

    def _drain_workers(self) -> bool:
        """Handle one turn's messages; True when there may be more."""
        for _ in range(TURN):
            if not _readable(self._router):
                return False
            self._from_worker(self._router.recv_multipart(zmq.NOBLOCK, copy=False))
        return True

    def _from_worker(self, message: _Frames) -> None:
        identity, *frames = message
        worker = self._index_of.get(identity.bytes)
        if worker is None:
            raise ProtocolError(f"a peer calls itself {identity.bytes!r}; the workers are {self._names}")
        if not self._workers.is_dead(worker):
            began = self._clock()
            _handler(frames[0], FROM_WORKER)(self, worker, frames)
            self._note(frames, began, worker, 0)

    def _worker_hello(self, worker: int, frames: _Frames) -> None:
        version, index, pid = _fields(frames[0], Message.WORKER_HELLO)
        if version != VERSION or index != worker:
            raise ProtocolError(
                f"worker {worker} says it is worker {index} and speaks version {version} of the protocol, not {VERSION}"
            )
        self._here.add(worker)
        self._to_client([_pack(Message.WORKER_READY, worker, pid)])
        for message in self._waiting.pop(worker, ()):
            self._to_worker(worker, message)

    def _forward(self, worker: int, frames: _Frames) -> None:
        self._to_client(frames)

    def _progress(self, worker: int, frames: _Frames) -> None:
        _, seq = _fields(frames[0], Message.PROGRESS)
        self._scheduler.executed(worker, seq)
        self._to_client(frames)

    def _transfer(self, worker: int, frames: _Frames) -> None:
        transfer, source, dest, payload = _fields(frames[0], Message.TRANSFER)
        if source != worker or not 0 <= dest < self._count:
            raise ProtocolError(f"worker {worker} sent a transfer from worker {source} to worker {dest}")
        if isinstance(payload, list) and len(payload) in _LENT:  # else the bytes, or the error that took their place
            loan = (payload[_LENT[len(payload)]], source, dest)
            if self._workers.is_dead(dest):
                self._give_back(loan)
                return
            self._lent.add(loan)
        self._to_worker(dest, [_pack(Message.INCOMING, transfer, payload)])

    def _transfer_done(self, worker: int, frames: _Frames) -> None:
        token, source, dest = _fields(frames[0], Message.TRANSFER_DONE)
        if dest != worker or not 0 <= source < self._count:
            raise ProtocolError(f"worker {worker} ended a transfer from worker {source} to worker {dest}")
        self._lent.discard((token, source, dest))
        self._give_back((token, source, dest))

    def _freed(self, worker: int, frames: _Frames) -> None:
        source, dest, handles = _fields(frames[0], Message.FREED)
        if source != worker or not 0 <= dest < self._count:
            raise ProtocolError(f"worker {worker} took memory back from worker {dest} that worker {source} had lent")
        self._to_worker(dest, [_pack(Message.FREED, source, dest, handles)])

    def _give_back(self, loan: tuple[int, int, int]) -> None:
        """Tell the source that its segment is not needed any longer."""
        self._to_worker(loan[1], [_pack(Message.TRANSFER_DONE, *loan)])

    def _worker_died(self, death: Death) -> None:
        dead = death.worker
        self._here.discard(dead)
        self._dead += 1
        self._scheduler.forget(dead)
        self._waiting.pop(dead, None)
        self._to_client([_pack(Message.WORKER_DIED, dead, death.status, death.output)])
        for worker in range(self._count):
            self._to_worker(worker, [_pack(Message.PEER_DIED, dead, death.status)])
        for loan in [loan for loan in self._lent if dead in loan[1:]]:
            self._lent.remove(loan)
            self._give_back(loan)  # dropped when the source is the dead one

    # -- sending

    def _to_worker(self, worker: int, message: Sequence[_Frame]) -> None:
        if worker in self._here:
            self._router.send_multipart([self._names[worker], *message], copy=False)
        elif not self._workers.is_dead(worker):
            self._waiting[worker].append(message)

    def _to_client(self, message: Sequence[_Frame]) -> None:
        self._unsent.append(message)
        self._send_unsent()

    def _send_unsent(self) -> None:
        if not self._answered:
            return
        self._outbox_is_full = False
        while self._unsent:
            try:
                self._outbox.send_multipart(self._unsent[0], zmq.NOBLOCK, copy=False)
            except zmq.Again:  # no client has connected yet: there is no other reason without a high-water mark
                self._outbox_is_full = True
                return
            self._unsent.popleft()


#: What the controller does with each message; a test asks for all that the protocol has.
FROM_CLIENT: Final[dict[int, Callable[[Controller, _Frames], None]]] = {
    Message.HELLO: Controller._hello,
    Message.RECORDS: Controller._records,
    Message.SHUTDOWN: Controller._shutdown,
    Message.TRACE: Controller._trace,
}
FROM_WORKER: Final[dict[int, Callable[[Controller, int, _Frames], None]]] = {
    Message.WORKER_HELLO: Controller._worker_hello,
    Message.TRANSFER: Controller._transfer,
    Message.TRANSFER_DONE: Controller._transfer_done,
    Message.FREED: Controller._freed,
    Message.PROGRESS: Controller._progress,
    Message.VALUE: Controller._forward,
    Message.META: Controller._forward,
    Message.DONE: Controller._forward,
    Message.ERROR: Controller._forward,
    Message.RETURNED: Controller._forward,
}


def _readable(socket: zmq.Socket[bytes]) -> bool:
    """Whether a message waits; asking costs a third of running into zmq.Again."""
    return bool(int(socket.get(zmq.EVENTS)) & zmq.POLLIN)


def _pack(kind: Message, *fields: object) -> bytes:
    assert len(fields) == len(_NAMES[kind]), kind
    return msgpack.packb([kind, *fields])


def _handler(frame: zmq.Frame, handlers: Mapping[int, _Handler]) -> _Handler:
    """By the kind, without decoding the frame, which may be large: a message is an array of fewer than 16 elements."""
    head = frame.buffer[:2].tobytes()
    handler = handlers.get(head[1]) if len(head) == 2 and head[0] & 0xF0 == 0x90 else None
    if handler is None:
        raise ProtocolError(f"no message to the controller starts with bytes {head.hex()!r}")
    return handler


def _fields(frame: zmq.Frame, kind: Message) -> list[Any]:
    """The fields after the kind."""
    names = _NAMES[kind]
    values: list[Any] = msgpack.unpackb(frame.buffer)[1:]
    if len(values) != len(names):
        raise ProtocolError(f"{kind.name} has {len(values)} fields, not {len(names)} ({', '.join(names)})")
    return values


def main(argv: Sequence[str], code: WorkerCode | None = None) -> NoReturn:
    """Run a controller in this process, which ends with it. ``code`` is what the workers run (tests have their own)."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # inherited by all that is started here
    if os.getsid(0) != os.getpid():
        os.setsid()  # LIV-6
    parser = argparse.ArgumentParser(prog="python -m dtorch.controller", description=__doc__)
    parser.add_argument("--directory", required=True)
    parser.add_argument("--workers", type=int, required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--device", required=True)
    parser.add_argument("--client-pid", type=int, required=True)
    parser.add_argument("--stderr-fd", type=int, required=True)
    options = parser.parse_args(argv)
    tempfile.tempdir = options.directory  # the fork server's own socket shall lie there, and vanish with it

    status = 1
    controller = None
    try:
        controller = Controller(options, code or WorkerCode())
        controller.run()
        status = 0
    except ClientGone:
        status = 0
    except BaseException:
        traceback.print_exc()
    try:
        if controller:
            controller.leave()
    except BaseException:
        traceback.print_exc()
        status = 1
    shutil.rmtree(options.directory, ignore_errors=True)
    posix.end_descendants()
    sys.stderr.flush()
    os._exit(status)  # no exit handler: the standard library's would wait for the workers

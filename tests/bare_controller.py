"""A controller alone, for tests: this process speaks to it as the client does, its workers are ``fake_worker.py``."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgpack
import zmq

from dtorch.protocol import VERSION, Message, Record

TESTS = Path(__file__).parent
_PROGRAM = (
    "import sys; from dtorch.controller.process import main; from dtorch.controller.workers import WorkerCode; "
    "main(sys.argv[1:], WorkerCode('fake_worker', 'fake_worker'))"
)
#: Seconds that an answer may take; none takes a tenth of that on a quiet machine.
PATIENCE = 30


class BareController:
    """The process, its two sockets, and what it and the workers wrote."""

    def __init__(self, workers: int, stderr_fd: int | None = None, **environment: str) -> None:
        self.workers = workers
        self.directory = tempfile.mkdtemp(prefix="dtorch-bare-", dir=os.environ["XDG_RUNTIME_DIR"])
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  # closed in close()
        self._output = tempfile.TemporaryFile()  # noqa: SIM115
        forward = self._output.fileno() if stderr_fd is None else stderr_fd
        options = {
            "directory": self.directory,
            "workers": workers,
            "threads": 1,
            "device": "cpu",
            "client-pid": os.getpid(),
            "stderr-fd": forward,
        }
        self.process = subprocess.Popen(
            [sys.executable, "-c", _PROGRAM, *(f"--{name}={value}" for name, value in options.items())],
            stdin=subprocess.PIPE,
            stdout=self._errors,
            stderr=self._errors,
            env={
                **os.environ,
                "DTORCH_ROLE": "controller",
                "PYTHONPATH": os.pathsep.join([str(TESTS.parent), str(TESTS)]),
                **environment,
            },
            pass_fds=[forward],
            start_new_session=True,
        )
        self._context = zmq.Context()
        self.push = self._socket(zmq.PUSH, "in")
        self.pull = self._socket(zmq.PULL, "out")

    def _socket(self, kind: int, name: str) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        socket.linger = 0
        socket.reconnect_ivl = 2
        socket.rcvtimeo = PATIENCE * 1000
        socket.connect(f"ipc://{self.directory}/{name}")
        return socket

    # -- as the client

    def send(self, kind: Message, *fields: object, frames: tuple[bytes, ...] = ()) -> None:
        self.push.send_multipart([msgpack.packb([int(kind), *fields]), *frames])

    def records(self, *records: tuple[object, ...]) -> None:
        """Send one RECORDS message; a record is (kind, worker, fields...)."""
        stream = b"".join(msgpack.packb([int(r[0]), *r[1:]]) for r in records)  # type: ignore[call-overload]
        self.send(Message.RECORDS, len(records), frames=(stream,))

    def order(self, worker: int, name: str, value: object = 0) -> None:
        """Have a fake worker do something (see fake_worker.py)."""
        self.records((Record.OPTION, worker, name, value))

    def hello(self) -> None:
        self.send(Message.HELLO, VERSION, self.workers, "cpu", 1)
        assert self.receive() == [Message.READY, VERSION]

    def receive(self) -> list[Any]:
        values: list[Any] = msgpack.unpackb(self.pull.recv())
        return values

    def receive_kind(self, kind: Message) -> list[Any]:
        """The next message of that kind; others are dropped."""
        while True:
            values = self.receive()
            if values[0] == kind:
                return values

    def up(self) -> dict[int, int]:
        """Say hello and wait for all workers; returns their pids."""
        self.hello()
        ready = [self.receive_kind(Message.WORKER_READY) for _ in range(self.workers)]
        return {worker: pid for _, worker, pid in ready}

    def sync(self, worker: int, request: int = 1) -> list[Any]:
        """What a fake worker has noted so far; the last element is the SYNC's own number."""
        self.records((Record.SYNC, worker, request))
        _, answered, answering, noted = self.receive_kind(Message.DONE)
        assert (answered, answering) == (request, worker)
        return list(noted)

    # -- around it

    def errors(self) -> str:
        """What the controller itself printed."""
        self._errors.seek(0)
        return self._errors.read().decode()

    def output(self) -> str:
        """What it forwarded to the user's stderr so far."""
        self._output.seek(0)
        return self._output.read().decode()

    def wait(self, timeout: float = PATIENCE) -> int:
        return self.process.wait(timeout)

    def hang_up(self) -> None:
        """Be gone, as far as the controller can see."""
        assert self.process.stdin is not None
        self.process.stdin.close()

    def close(self) -> None:
        self.hang_up()
        self.wait()
        self._context.destroy()
        self._errors.close()
        self._output.close()


@contextmanager
def bare_controller(workers: int = 2, stderr_fd: int | None = None, **environment: str) -> Iterator[BareController]:
    controller = BareController(workers, stderr_fd, **environment)
    try:
        yield controller
    finally:
        controller.close()

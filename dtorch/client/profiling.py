"""dtorch.profile(): what client, controller and workers did inside a block, as one Chrome trace.

Order of events. On entering, each worker is waited for and told, by a record, to note what it runs: so the trace holds
the work of the block and no older one. The controller is told by a message. Then the client begins to
note, in native code, with hooks that name modules' forwards. On leaving it stops, the workers are waited for, and one
process after the other hands over its events. :class:`~dtorch.client.timeline.Timeline` writes each one's before the
next is asked, so that the client holds the events of one process at a time.

Whoever is not there any more is named in the file and its lane is empty. A child made by fork writes nothing.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

import msgpack
import torch
from torch.nn.modules import module as hooks

from dtorch import _client
from dtorch.client import lifecycle
from dtorch.client.timeline import CONTROLLER, Log, Timeline, name_of
from dtorch.errors import ControllerDied, EngineError, WorkerDied
from dtorch.protocol import Message

#: Events that a process keeps unless the program says otherwise; one takes 56 bytes there and about 250 in the file.
LIMIT: Final = 500_000

_lock = threading.Lock()
_current: _Recording | None = None  # guarded by _lock

_GONE: Final = (WorkerDied, ControllerDied, EngineError)


@contextlib.contextmanager
def profile(path: str | os.PathLike[str], *, limit: int = LIMIT, modules: bool = True) -> Iterator[None]:
    """Record what client, controller and workers do inside the block, and save one timeline of it.

    The file is in the Chrome trace event format: https://ui.perfetto.dev and chrome://tracing show it, and
    ``benchmarks/plot_trace.py`` draws it. Each process has its lanes. The client's: for each of its threads, the
    operators as it issued them (the time before one is the Python that led to it), inside the modules' forwards and
    ``torch.profiler.record_function`` blocks that they belong to, and what it waited for; the batches it sent; the
    values under way. The controller's: the messages it handled. A worker's: the operators it ran, with shapes and the
    client's lines, transfers, and its waits for them. Arrows lead from a batch to the work that it brought, from a
    value to who waits for it.

    Entering waits until the workers have done what was issued before, leaving until they have done what was issued
    inside. When the block raises, the trace is written all the same. A process that has died by the end is named in
    the file, and its lane is empty. Outside of such a block nothing is recorded, and it costs nothing.

    Args:
        path: the file to write; compressed when the name ends in ".gz", which Perfetto reads too.
        limit: events that one process keeps, the first ones; what comes later is counted, and a warning tells of it.
        modules: whether to show the forwards of ``torch.nn.Module``.

    Raises:
        RuntimeError: another recording is under way in this process.
        FileNotFoundError, IsADirectoryError: the file cannot be where it is to be.
        ValueError: the limit is not a whole number from 1 up.
    """
    recording = _Recording(Path(path), limit, modules)
    recording.start()
    try:
        yield
    finally:
        recording.end()


@dataclass
class _Recording:
    """One block, from its beginning to the file."""

    path: Path
    limit: int
    modules: bool
    begin: int = 0  # time.monotonic_ns()
    missing: dict[int | str, str] = field(default_factory=dict)  # why a process has no lane
    pids: dict[str, int] = field(default_factory=dict)
    _handles: list[Any] = field(default_factory=list)  # of the modules' hooks

    def start(self) -> None:
        global _current
        if isinstance(self.limit, bool) or not isinstance(self.limit, int) or self.limit < 1:
            raise ValueError(f"limit={self.limit!r}: the number of events to keep is a whole number from 1 up")
        if not self.path.absolute().parent.is_dir():
            raise FileNotFoundError(f"{self.path}: there is no folder {self.path.absolute().parent}")
        if self.path.is_dir():
            raise IsADirectoryError(f"{self.path} is a folder; dtorch.profile() writes a file")
        self.engine = lifecycle.running()
        with _lock:
            if _current is not None:
                raise RuntimeError(
                    f"dtorch.profile({str(self.path)!r}) inside another one, which records to {str(_current.path)!r}; "
                    "one at a time"
                )
            _current = self
        self._owner = os.getpid()
        lifecycle.held_back = (
            "no engine can be started inside dtorch.profile(): it records the one that ran when the block began; call "
            "dtorch.init() before the block"
        )
        try:
            self._start_others()
            if self.modules:
                self._handles.append(hooks.register_module_forward_pre_hook(_before_forward))
                self._handles.append(hooks.register_module_forward_hook(_after_forward, always_call=True))
            self.begin = time.monotonic_ns()
            _client.trace_start(self.limit)
        except BaseException:
            for handle in self._handles:
                handle.remove()
            self._stop_others()
            self._close()
            raise

    def _start_others(self) -> None:
        for worker in range(self.engine.workers):
            with self._noting(worker):
                _client.stats(worker, "memory")  # it has come up, and has done what was issued before
                _client.option(worker, "trace", self.limit)
        self._ask_controller(self.limit)
        self.pids = self.engine.pids()

    def _stop_others(self) -> None:
        """Nothing is noted any longer, and what was and has not been taken is forgotten."""
        with contextlib.suppress(*_GONE):
            while self._ask_controller(0)[0]:
                pass
            for worker in range(self.engine.workers):
                with contextlib.suppress(WorkerDied):
                    _client.option(worker, "trace", 0)

    def end(self) -> None:
        """Stop, and write the file; whatever goes wrong, the next recording can start."""
        for handle in self._handles:
            handle.remove()
        if self._owner != os.getpid():
            return  # a child made by fork inside the block: the recording is its parent's
        _client.flush()  # the last batch of the block belongs to it
        _client.trace_stop()
        end = time.monotonic_ns()
        try:
            with Timeline(self.path, self.begin, end, self.missing) as timeline:
                self._write(timeline)
        except BaseException:
            self._stop_others()
            raise
        finally:
            while _client.trace_take()[0]:
                pass
            self._close()
        if timeline.dropped:
            what = ", ".join(f"{name}: {n}" for name, n in timeline.dropped.items())
            warnings.warn(
                f"{self.path} has the first {self.limit} events of each process only ({what} dropped); "
                "dtorch.profile(limit=...) keeps more",
                stacklevel=4,
            )

    def _write(self, timeline: Timeline) -> None:
        names = {thread.native_id: thread.name for thread in threading.enumerate() if thread.native_id}
        timeline.client(os.getpid(), self._taken(_client.trace_take), names)
        for worker in range(self.engine.workers):
            with self._noting(worker):
                self._check_engine()
                _client.stats(worker, "memory")  # it has done its work: then the controller has handled all of it
        with self._noting(CONTROLLER):
            timeline.controller(self.pids.get(CONTROLLER, 0), self._taken(lambda: self._ask_controller(0)))
        for worker in range(self.engine.workers):
            if worker not in self.missing:
                with self._noting(worker):
                    timeline.worker(worker, self.pids.get(name_of(worker), 0), self._taken(partial(self._ask, worker)))
        for who in self.missing:
            timeline.absent(who, self.pids.get(name_of(who), 0))

    def _taken(self, take: Callable[[], Sequence[Any]]) -> Log:
        """All that a process hands over, oldest first."""
        events: list[bytes] = []
        while (reply := take())[0]:
            events.append(reply[0])
        return Log(events, *reply[1:])

    def _ask(self, worker: int) -> list[Any]:
        self._check_engine()
        trace: list[Any] = msgpack.unpackb(_client.stats(worker, "trace"))[3]
        return trace

    def _check_engine(self) -> None:
        """The engine of the block still runs; else asking would start another one."""
        if self.engine.death:
            raise self.engine.death
        if self.engine.is_over:
            raise EngineError("the engine was shut down inside the block")

    def _ask_controller(self, limit: int) -> list[Any]:
        self._check_engine()
        return self.engine.ask_controller(msgpack.packb([Message.TRACE, limit]))

    @contextlib.contextmanager
    def _noting(self, who: int | str) -> Iterator[None]:
        """A process that is gone costs its lane, not the trace."""
        try:
            yield
        except _GONE as gone:
            self.missing.setdefault(who, str(gone).partition("\n")[0])

    def _close(self) -> None:
        global _current
        lifecycle.held_back = ""
        with _lock:
            _current = None


def _before_forward(module: torch.nn.Module, inputs: Any) -> None:
    _client.trace_begin(type(module).__name__)


def _after_forward(module: torch.nn.Module, inputs: Any, output: Any) -> None:
    _client.trace_end()


def _forget() -> None:
    """In a child made by fork: no recording is under way, and who may have held the lock is not here."""
    global _lock, _current
    _lock = threading.Lock()
    _current = None
    lifecycle.held_back = ""


os.register_at_fork(after_in_child=_forget)

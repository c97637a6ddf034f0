"""The events of client, controller and workers as one file in the Chrome trace event format.

A process of the file is a process of the engine, a thread of it is a lane. In a lane, slices ("X" events) lie side by
side or one inside the other, never across. Times are microseconds since the recording began.

The client's events need some reading. A thread notes the moments at which it wrote a record, waited, or entered and
left a named part of the program. What lies before a record is the issuing of its operator, and the slice takes the
operator's name; what lies before anything else is "python". Where the thread slept for most of such a time, as
asyncio's loop does while nothing is ready, the slice begins when it can have woken, and what is before it stays empty.
"""

from __future__ import annotations

import gzip
import json
import os
import platform
import struct
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache, lru_cache
from pathlib import Path
from typing import IO, Final, NamedTuple

import torch

from dtorch import _client
from dtorch._version import __version__
from dtorch.client.failures import BACKWARD_BIT, line_of
from dtorch.protocol import TRACE_EVENT, TRACE_FIELDS, TRACE_MESSAGE, Message, Record, Trace

CONTROLLER: Final = "controller"

#: Lanes. The client's threads have their numbers from 1 on, below these.
_BATCHES, _VALUES = 1_000_001, 1_000_002
_MAIN: Final = 1

#: Nanoseconds: of Python, not worth a slice; of a gap, worth asking whether the thread slept.
_SHORT, _LONG = 1_000, 100_000

_EVENT: Final = struct.Struct(TRACE_EVENT)


class Event(NamedTuple):
    """A trace event (protocol.py: TRACE_FIELDS)."""

    start: int
    end: int
    number: int
    link: int
    bytes: int
    name: int
    site: int
    detail: int
    worker: int
    kind: int
    thread: int


assert Event._fields == tuple(TRACE_FIELDS.split())


@dataclass(frozen=True)
class Log:
    """What one process noted."""

    chunks: list[bytes]
    dropped: int
    texts: list[str]
    threads: list[int] = field(default_factory=list)  # of the client: thread n's number in the system stands at n - 1

    def __iter__(self) -> Iterator[Event]:
        for chunk in self.chunks:
            yield from map(Event._make, _EVENT.iter_unpack(chunk))

    def text(self, number: int) -> str:
        return self.texts[number - 1] if number else ""


def name_of(who: int | str) -> str:
    """A process's name: a worker's by its index."""
    return who if isinstance(who, str) else f"worker-{who}"


#: What a record is called, in the client where it was written, and in the worker that ran it.
_RECORDS: Final[dict[int, tuple[str, str]]] = {
    Record.PUT: ("upload", "upload"),
    Record.MAP: ("upload", "upload"),
    Record.FETCH: ("ask for a value", "hand out a value"),
    Record.SEND: ("send", "send"),
    Record.RECV: ("receive", "receive"),
    Record.ALLOC: ("allocate", "allocate"),
    Record.READ: ("read a file", "read a file"),
    Record.SYNC: ("synchronize", "synchronize"),
    Record.EVENT: ("record an event", "pass an event"),
    Record.DEFINE_OP: ("define an operator", "define an operator"),
}
#: Records that only prepare the one behind them: their time is its time.
_PREPARING: Final = {Record.DEFINE_OP, Record.ALLOC, Record.OPTION}
_OPERATORS: Final = {Record.OP, Record.ASK}
_TRANSFERS: Final = {Record.SEND, Record.RECV, Record.PUT, Record.MAP, Record.FETCH, Record.READ}


@cache
def _op(number: int) -> str:
    return _client.op_name(number)


@lru_cache(maxsize=100_000)
def _line(site: int) -> str:
    """A site for people."""
    line = line_of(site)
    return f"{line} (its backward)" if line and site & BACKWARD_BIT else line


def _record_name(e: Event, in_client: bool) -> str:
    if e.kind in _OPERATORS:
        return _op(e.name) or "an unknown operator"
    names = _RECORDS.get(e.kind)
    return names[not in_client] if names else Record(e.kind).name.lower()


def _asked(e: Event) -> str:
    """What a request is about."""
    if e.detail == Record.ASK:
        return f"what {_op(e.name)} gives"
    return {Record.FETCH: "a value", Record.SYNC: "synchronize"}.get(Record(e.detail), Record(e.detail).name.lower())


class Timeline:
    """The file, written a process at a time. Leaving it completes the file, whatever was written."""

    def __init__(self, path: Path, begin: int, end: int, missing: Mapping[int | str, str]) -> None:
        self.dropped: dict[str, int] = {}  # by process
        self._path = path
        self._begin = begin
        self._end = end
        self._missing = missing
        self._separator = "\n"
        self._waited: set[int] = set()  # requests that a thread of the client waited for
        self._firsts: defaultdict[int, set[int]] = defaultdict(set)  # per worker: records that begin a batch

    def __enter__(self) -> Timeline:
        self._file: IO[str] = gzip.open(self._path, "wt") if self._path.suffix == ".gz" else open(self._path, "w")
        self._file.write('{"displayTimeUnit": "ms", "traceEvents": [')
        return self

    def __exit__(self, *exc: object) -> None:
        about = {
            "made by": f"dtorch {__version__}, torch {torch.__version__}, Python {platform.python_version()}",
            "processors": len(os.sched_getaffinity(0)),
            "block_us": (self._end - self._begin) / 1000,
            "dropped": self.dropped,
            "missing": {name_of(who): why for who, why in self._missing.items()},
        }
        self._file.write(f'\n], "otherData": {json.dumps(about)}}}\n')
        self._file.close()

    # -- the processes

    def client(self, pid: int, log: Log, names: Mapping[int, str]) -> None:
        """``names`` are the Python threads', by their numbers in the operating system."""
        self._process(pid, "client", 0, log.dropped)
        self._lane(pid, _BATCHES, "batches sent")
        self._lane(pid, _VALUES, "values under way")
        for index, tid in enumerate(log.threads):
            self._lane(pid, _MAIN + index, names.get(tid) or _comm(tid))
        threads: dict[int, _Thread] = {}
        for e in log:
            if e.kind == Trace.SENT:
                self._slice(pid, _BATCHES, "batch", "batch", e.start, e.end, _json(records=e.detail, bytes=e.bytes))
                self._flow("s", pid, _BATCHES, f"batch-{e.number}", e.start)
            elif e.kind == Trace.REQUEST:
                for ph, at in (("b", e.start), ("e", e.end)):
                    self._put(
                        f'"ph": "{ph}", "pid": {pid}, "tid": {_VALUES}, "ts": {self._us(at)}, "cat": "request", '
                        f'"id": {e.number}, "name": {_quoted(_asked(e))}, "args": {self._args(e, log, worker=e.worker)}'
                    )
            else:
                tid = _MAIN - 1 + e.thread
                thread = threads.setdefault(tid, _Thread(pid, tid, e.start))
                self._program(thread, e, log)
        for thread in threads.values():
            while thread.spans:
                self._span(thread, max(self._end, thread.cursor))

    def controller(self, pid: int, log: Log) -> None:
        self._process(pid, CONTROLLER, 1, log.dropped)
        self._lane(pid, _MAIN, "messages")
        for e in log:
            if e.start < self._begin:
                continue  # the end of what was said to begin
            kind = Message(e.kind - TRACE_MESSAGE)
            way = f" {'to' if kind is Message.BATCH else 'of'} worker-{e.worker}" if e.worker >= 0 else ""
            args = _json(bytes=e.bytes, **({"records": e.detail} if e.detail else {}))
            self._slice(pid, _MAIN, "message", kind.name + way, e.start, e.end, args)
            if kind is Message.RECORDS:
                self._flow("f", pid, _MAIN, f"batch-{e.number}", e.start)
            elif kind is Message.BATCH and e.detail:  # else it is releases only
                self._firsts[e.worker].add(e.number)
                self._flow("s", pid, _MAIN, f"work-{e.worker}-{e.number}", e.start)

    def worker(self, index: int, pid: int, log: Log) -> None:
        self._process(pid, f"worker-{index}", 2 + index, log.dropped)
        self._lane(pid, _MAIN, f"dtorch:{index}")
        firsts = self._firsts[index]
        for e in log:
            if e.kind == Trace.AWAIT_PEER:
                self._slice(pid, _MAIN, "wait", f"wait: tensor of worker-{e.worker}", e.start, e.end, "{}")
                continue
            if e.kind == Trace.AWAIT_MEMORY:
                self._slice(pid, _MAIN, "wait", "wait: memory", e.start, e.end, "{}")
                continue
            name = _record_name(e, False)
            if e.kind in (Record.SEND, Record.RECV):
                name += f" {'to' if e.kind == Record.SEND else 'from'} worker-{e.worker}"
            category = "op" if e.kind in _OPERATORS else "transfer" if e.kind in _TRANSFERS else "other"
            self._slice(pid, _MAIN, category, name, e.start, e.end, self._args(e, log, record=e.number))
            if e.number in firsts:
                self._flow("f", pid, _MAIN, f"work-{index}-{e.number}", e.start)
            if e.kind == Record.SEND:
                self._flow("s", pid, _MAIN, f"transfer-{e.link}", e.start)
            elif e.kind == Record.RECV:
                self._flow("f", pid, _MAIN, f"transfer-{e.link}", e.end - 1)
            elif e.link in self._waited:
                self._flow("s", pid, _MAIN, f"value-{e.link}", e.start)

    def absent(self, who: int | str, pid: int) -> None:
        """A process that is not there to tell: its empty lane says why."""
        place = 1 if isinstance(who, str) else 2 + who
        self._process(pid or -place, f"{name_of(who)}: no events, {self._missing[who]}", place, 0)

    # -- the client's time line

    def _program(self, thread: _Thread, e: Event, log: Log) -> None:
        """What a thread of the client noted of itself."""
        if e.kind in _PREPARING:
            thread.prepared += e.link
        elif e.kind < TRACE_MESSAGE:
            start = thread.woke(e.end, e.link)
            args = self._args(e, log, worker=e.worker, record=e.number)
            self._slice(thread.pid, thread.tid, "issue", _record_name(e, True), start, e.end, args)
            self._infers(thread, start)
            thread.cursor = e.end
        elif e.kind == Trace.INFER:
            thread.infers.append(e)  # a part of the issuing that ends with the record
        else:
            start = thread.woke(e.start, e.link)
            self._infers(thread, start)
            if e.start - start >= _SHORT:
                self._slice(thread.pid, thread.tid, "python", "python", start, e.start, "{}")
            thread.cursor = e.end
            if e.kind == Trace.SPAN_BEGIN:
                thread.spans.append((log.text(e.name), e.start))
            elif e.kind == Trace.SPAN_END:
                if thread.spans:  # else it began before the recording
                    self._span(thread, e.end)
            elif e.kind == Trace.WAIT:
                args = self._args(e, log, worker=e.worker)
                self._slice(thread.pid, thread.tid, "wait", f"wait: {_asked(e)}", e.start, e.end, args)
                self._waited.add(e.number)
                self._flow("f", thread.pid, thread.tid, f"value-{e.number}", e.end - 1)
            else:
                assert e.kind == Trace.HELD_BACK
                self._slice(thread.pid, thread.tid, "wait", "wait: too far ahead", e.start, e.end, "{}")

    def _infers(self, thread: _Thread, start: int) -> None:
        """What was inferred on the way, from ``start`` on: the thread may have lost its processor before."""
        for e in thread.infers:
            if e.end > start:
                begin = max(e.start, start)
                self._slice(thread.pid, thread.tid, "infer", f"infer {_op(e.name)}", begin, e.end, "{}")
        thread.infers.clear()

    def _span(self, thread: _Thread, end: int) -> None:
        name, start = thread.spans.pop()
        self._slice(thread.pid, thread.tid, "span", name, start, end, "{}")

    # -- events

    def _process(self, pid: int, name: str, place: int, dropped: int) -> None:
        if dropped:
            self.dropped[name] = dropped
            name += f" ({dropped} later events were dropped)"
        for what, args in (("process_name", _json(name=name)), ("process_sort_index", _json(sort_index=place))):
            self._put(f'"ph": "M", "pid": {pid}, "tid": 0, "name": "{what}", "args": {args}')

    def _lane(self, pid: int, tid: int, name: str) -> None:
        for what, args in (("thread_name", _json(name=name)), ("thread_sort_index", _json(sort_index=tid))):
            self._put(f'"ph": "M", "pid": {pid}, "tid": {tid}, "name": "{what}", "args": {args}')

    def _slice(self, pid: int, tid: int, category: str, name: str, start: int, end: int, args: str) -> None:
        self._put(
            f'"ph": "X", "pid": {pid}, "tid": {tid}, "ts": {self._us(start)}, "dur": {(end - start) / 1000:.3f}, '
            f'"cat": "{category}", "name": {_quoted(name)}, "args": {args}'
        )

    def _flow(self, ph: str, pid: int, tid: int, number: str, at: int) -> None:
        """An end of an arrow: "s" where it starts, "f" where it leads; it hangs on the slice around it."""
        kind = number.partition("-")[0]
        self._put(
            f'"ph": "{ph}", "pid": {pid}, "tid": {tid}, "ts": {self._us(at)}, "cat": "flow", "name": "{kind}", '
            f'"id": "{number}"' + (', "bp": "e"' if ph == "f" else "")
        )

    def _put(self, fields: str) -> None:
        self._file.write(f"{self._separator}{{{fields}}}")
        self._separator = ",\n"

    def _us(self, ns: int) -> str:
        return f"{(ns - self._begin) / 1000:.3f}"

    def _args(self, e: Event, log: Log, **more: int) -> str:
        args: dict[str, object] = dict(more)
        if line := _line(e.site):
            args["line"] = line
        if e.detail and e.kind < TRACE_MESSAGE:
            args["shapes"] = log.text(e.detail)
        if e.bytes and e.kind < TRACE_MESSAGE:
            args["bytes"] = e.bytes
        return json.dumps(args)


@dataclass
class _Thread:
    """A thread of the client, and how far it has come."""

    pid: int
    tid: int  # its lane
    cursor: int  # its slices go up to here
    prepared: int = 0  # nanoseconds of work that counts for the record to come
    spans: list[tuple[str, int]] = field(default_factory=list)  # open ones: name, start
    infers: list[Event] = field(default_factory=list)  # since the last slice

    def woke(self, until: int, busy: int) -> int:
        """Where the slice up to ``until`` begins: at the cursor, unless the thread slept for most of the time."""
        busy += self.prepared
        self.prepared = 0
        if until - self.cursor > _LONG and busy < (until - self.cursor) / 2:
            return until - busy
        return self.cursor


def _json(**fields: object) -> str:
    return json.dumps(fields)


@lru_cache(maxsize=100_000)
def _quoted(text: str) -> str:
    return json.dumps(text)


def _comm(tid: int) -> str:
    """The name of a thread that is not Python's."""
    try:
        return Path(f"/proc/self/task/{tid}/comm").read_text().strip()
    except OSError:
        return f"thread {tid}"

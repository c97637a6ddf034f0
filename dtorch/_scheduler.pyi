"""The controller's per-record work, in C++ (``native/scheduler/``)."""

from typing import TypedDict

from typing_extensions import Buffer

class WorkerCounters(TypedDict):
    worker: int
    records: int  # sequenced records split for this worker
    releases: int
    bytes: int
    queued: int  # number of the last sequenced record (WIRE-1)
    executed: int  # number the worker reported last

class Scheduler:
    """Splits record streams per worker and counts; one thread at a time."""

    def __new__(cls, workers: int, lengths: dict[int, int]) -> Scheduler:
        """``lengths`` gives, per kind of record, its number of elements (kind and worker included)."""

    def split(self, stream: Buffer, /) -> list[tuple[int, int, int, int, Buffer, bytes]]:
        """``[(worker, first_seq, count, release_count, records, releases), ...]`` in order of first appearance.

        A stream that is one worker's as a whole, with no release, comes back as the very object passed in; otherwise
        records and releases are fresh ``bytes``. Raises ``ValueError`` naming the byte offset when the stream is
        malformed; nothing is counted then.
        """

    def executed(self, worker: int, seq: int, /) -> None:
        """A worker has executed all up to ``seq``; ``ValueError`` when it cannot have."""

    def attach(self, api: dict[str, int], inbox: int, outbox: int, router: int, events: int, /) -> None:
        """The sockets (libzmq's pointers) and the descriptor that :meth:`serve` works on."""

    def forget(self, worker: int, /) -> None:
        """The worker is dead: its records are dropped from now on, and so is what it still says."""

    def serve(self, routine: bool, watch_outbox: bool, /) -> tuple[int, list[bytes]]:
        """Wait for the next thing that is not routine: ``(source, frames)``.

        ``source`` is 0 for a message of the client, 1 for a worker's (its identity is the first frame), 2 when the
        descriptor is readable, 3 when ``watch_outbox`` and the client's socket can be written to. With ``routine``,
        RECORDS are split and sent to the workers, and workers' PROGRESS and replies to the client, without coming
        back. Runs without the GIL. Raises ``ValueError`` for what a peer must not say.
        """

    def trace(self, limit: int, /) -> tuple[bytes, int]:
        """Start noting up to ``limit`` trace events; or, with 0, stop: the oldest ones, and how many were dropped."""

    def note(self, kind: int, worker: int, start: int, number: int, nbytes: int, records: int, /) -> None:
        """Add a trace event: a message of that kind was handled from ``start`` until now."""

    def streams(self) -> int:
        """How many record streams were accepted."""

    def stats(self) -> list[WorkerCounters]: ...

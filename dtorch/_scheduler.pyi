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

    def stats(self) -> list[WorkerCounters]: ...

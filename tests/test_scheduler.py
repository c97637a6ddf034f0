"""The controller's per-record work: splitting a record stream, numbering, and refusing what is malformed."""

from __future__ import annotations

import random

import msgpack
import pytest

from dtorch._scheduler import Scheduler
from dtorch.protocol import RECORD_FIELDS, Record

LENGTHS = {int(kind): 2 + len(fields.split()) for kind, fields in RECORD_FIELDS.items()}


def record(kind: Record, worker: int, *fields: object) -> bytes:
    data: bytes = msgpack.packb([int(kind), worker, *fields])
    return data


def op(worker: int, number: int = 0) -> bytes:
    return record(Record.OP, worker, number, 7, [1, [2, -3], b"xyz", None, 0.5], [[9, [6, [2, 3], None, 0, 0]]])


def release(worker: int, storage: int, last: int) -> bytes:
    return record(Record.RELEASE, worker, storage, last)


def scheduler(workers: int = 3) -> Scheduler:
    return Scheduler(workers, LENGTHS)


def test_splits_by_worker_in_order_of_first_appearance() -> None:
    parts = scheduler().split(op(2, 1) + op(0, 2) + op(2, 3) + op(2, 4) + op(0, 5))
    assert parts == [
        (2, 1, 3, 0, op(2, 1) + op(2, 3) + op(2, 4), b""),
        (0, 1, 2, 0, op(0, 2) + op(0, 5), b""),
    ]


def test_wire1_numbers_sequenced_records_per_worker_from_one() -> None:
    s = scheduler()
    assert [part[:4] for part in s.split(op(0) + op(1) + op(0))] == [(0, 1, 2, 0), (1, 1, 1, 0)]
    assert [part[:4] for part in s.split(op(1) + release(1, 5, 2) + op(1))] == [(1, 2, 2, 1)]
    assert [part[:4] for part in s.split(op(0) + op(1))] == [(0, 3, 1, 0), (1, 4, 1, 0)]


def test_wire2_releases_are_apart_and_not_numbered() -> None:
    s = scheduler()
    (part,) = s.split(op(1) + release(1, 5, 1) + op(1) + release(1, 6, 2) + release(1, 7, 0))
    assert part == (1, 1, 2, 3, op(1) + op(1), release(1, 5, 1) + release(1, 6, 2) + release(1, 7, 0))
    (part,) = s.split(release(1, 8, 2))
    assert part == (1, 3, 0, 1, b"", release(1, 8, 2))


def test_wire2_refuses_a_release_that_waits_for_a_record_never_sent() -> None:
    with pytest.raises(ValueError, match=r"byte \d+: a RELEASE waits for record 2 of worker 1, which has had 1 "):
        scheduler().split(op(1) + release(1, 5, 2))


def test_a_stream_of_one_worker_is_not_copied() -> None:
    stream = op(1) * 100
    assert scheduler().split(stream)[0][4] is stream
    view = memoryview(stream)
    assert scheduler().split(view)[0][4] is view


def test_an_empty_stream_has_no_parts() -> None:
    assert scheduler().split(b"") == []


def test_every_record_of_the_protocol_is_known() -> None:
    for kind, fields in RECORD_FIELDS.items():
        stream = record(kind, 0, *[0] * len(fields.split()))
        (part,) = scheduler(1).split(stream)
        assert part[2] + part[3] == 1


@pytest.mark.parametrize(
    ("bad", "at", "message"),
    [
        (b"\xc1", 0, "msgpack: expected an array, found byte 0xc1"),
        (op(3), 2, "there is no worker 3 among 3"),
        (op(-1), 2, "there is no worker -1 among 3"),
        (msgpack.packb([99, 0]), 1, "there is no record of kind 99"),
        (msgpack.packb([-1, 0]), 1, "there is no record of kind -1"),
        (msgpack.packb([1 << 40, 0]), 1, "there is no record of kind 1099511627776"),
        (msgpack.packb([1]), 0, "a record of 1 elements has no kind and worker"),
        (msgpack.packb([2, 0, 1]), 0, "a record of kind 2 has 4 elements, not 3"),
        (msgpack.packb([2, 0, "a", 0]), 3, "msgpack: expected an integer, found byte 0xa1"),
        (b"\xdd\xff\xff\xff\xff", 5, "msgpack: the message ends too early"),
    ],
    ids=lambda value: value.replace(" ", "_")[:40] if isinstance(value, str) else "",
)
def test_malformed_input_names_the_byte(bad: bytes, at: int, message: str) -> None:
    good = op(0)
    with pytest.raises(ValueError) as caught:
        scheduler().split(good + bad)
    start = len(good)
    assert str(caught.value) == (
        f"record stream: byte {start + at}: {message} (in the record that starts at byte {start})"
    )


def test_malformed_input_changes_no_counter() -> None:
    s = scheduler()
    s.split(op(0) + release(0, 4, 1))
    before = s.stats()
    for bad in (op(0) + b"\xc1", op(0) + release(0, 4, 99), op(1) + op(7)):
        with pytest.raises(ValueError, match="record stream"):
            s.split(bad)
    assert s.stats() == before


def test_fuzz_truncation_is_refused_or_ends_between_records() -> None:
    rng = random.Random(7)
    pieces = []
    for number in range(40):
        worker = rng.randrange(3)
        pieces.append(
            rng.choice([op(worker, number), record(Record.PUT, worker, 1, [6, [2], None, 0, 0], b"\0" * 300, 7)])
        )
    stream = b"".join(pieces)
    ends = {0}
    for piece in pieces:
        ends.add(max(ends) + len(piece))
    for size in range(len(stream)):
        if size in ends:
            assert sum(part[2] for part in scheduler().split(stream[:size])) == sorted(ends).index(size)
        else:
            with pytest.raises(ValueError, match=r"byte \d+: .*ends too early"):
                scheduler().split(stream[:size])


def test_fuzz_flipped_bytes_never_crash_and_never_lose_a_byte() -> None:
    rng = random.Random(11)
    stream = b"".join(op(n % 3, n) + release(n % 3, n, n // 3) for n in range(60))
    accepted = 0
    for _ in range(3000):
        broken = bytearray(stream)
        for _ in range(rng.randrange(1, 4)):
            broken[rng.randrange(len(broken))] = rng.randrange(256)
        try:
            parts = scheduler().split(bytes(broken))
        except ValueError:
            continue
        accepted += 1
        assert sum(len(memoryview(p[4])) + len(p[5]) for p in parts) == len(broken)
    assert accepted  # a flip inside a field's value leaves the stream well-formed


def test_counts_per_worker() -> None:
    s = scheduler(2)
    s.split(op(1) + op(1) + release(1, 5, 2))
    s.executed(1, 2)
    idle, busy = s.stats()
    size = len(op(1)) * 2 + len(release(1, 5, 2))
    assert busy == {"worker": 1, "records": 2, "releases": 1, "bytes": size, "queued": 2, "executed": 2}
    assert idle == {"worker": 0, "records": 0, "releases": 0, "bytes": 0, "queued": 0, "executed": 0}


def test_refuses_impossible_progress() -> None:
    s = scheduler(1)
    s.split(op(0) * 3)
    s.executed(0, 2)
    for worker, seq in ((0, 4), (0, 1), (1, 0), (-1, 0), (0, -1)):
        with pytest.raises(ValueError, match="worker"):
            s.executed(worker, seq)


@pytest.mark.parametrize(("workers", "lengths"), [(0, LENGTHS), (1 << 20, LENGTHS), (1, {1: 1}), (1, {200: 3})])
def test_refuses_impossible_tables(workers: int, lengths: dict[int, int]) -> None:
    with pytest.raises(ValueError, match="cannot be"):
        Scheduler(workers, lengths)


def test_wants_bytes() -> None:
    with pytest.raises(TypeError):
        scheduler().split("text")  # type: ignore[arg-type]

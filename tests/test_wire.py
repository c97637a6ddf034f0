"""Real traffic, tapped between the client and its peers and read back with the plain msgpack package.

The tap passes on every message as it is. A reader that knows nothing but ``dtorch/protocol.py`` and PyTorch's operator
schemas then follows the streams, counts as the invariants WIRE-1 to WIRE-5 say, and checks each element it meets.
"""

from __future__ import annotations

import itertools
import math
import os
import select
import socket
import struct
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgpack
import pytest
import safetensors.torch
import torch
import zmq
from mistakes import computed
from torch import nn

import dtorch
from dtorch import protocol
from dtorch.client import engine as engine_module
from dtorch.client import imports
from dtorch.protocol import MESSAGE_FIELDS, RECORD_FIELDS, VERSION, Message, Record

Frames = list[bytes]
PATIENCE = 60
#: Tokens of segments share the space of storage ids from here on (the worker's next_token_).
TOKENS = 1 << 62
#: Ids that an ASK sets apart for what the operator may return.
ASK_IDS = 1 << 16
DTYPES = {
    0: torch.uint8,
    1: torch.int8,
    2: torch.int16,
    3: torch.int32,
    4: torch.int64,
    5: torch.float16,
    6: torch.float32,
    7: torch.float64,
    9: torch.complex64,
    10: torch.complex128,
    11: torch.bool,
    15: torch.bfloat16,
}


class Tap:
    """Three sockets' worth of traffic: what the client sent, and what it received, message by message."""

    def __init__(self) -> None:
        self.sent: list[Frames] = []
        self.received: list[Frames] = []
        self._context = zmq.Context()
        self._threads: list[threading.Thread] = []
        self._ending = threading.Event()

    def between(self, directory: str, name: str) -> str:
        """Stand between the client and the controller's socket ``name``; returns the address for the client."""
        near, far = f"ipc://{directory}/tap-{name}", f"ipc://{directory}/{name}"
        source, sink = self._context.socket(zmq.PULL), self._context.socket(zmq.PUSH)
        for end in (source, sink):
            end.set_hwm(0)
            end.linger = 0
            end.reconnect_ivl = 2
            end.sndtimeo = 1000
        log = self.sent if name == "in" else self.received
        (source if name == "in" else sink).bind(near)
        (sink if name == "in" else source).connect(far)
        thread = threading.Thread(target=self._pass_on, args=(source, sink, log), daemon=True)
        self._threads.append(thread)
        thread.start()
        return near

    def _pass_on(self, source: zmq.Socket[bytes], sink: zmq.Socket[bytes], log: list[Frames]) -> None:
        while not self._ending.is_set():
            # The receiver may be gone: then there is nothing to send to, and the end is near.
            if source.poll(50) and sink.poll(50, zmq.POLLOUT):
                frames = source.recv_multipart()
                log.append(frames)
                try:
                    sink.send_multipart(frames)
                except zmq.Again:
                    break  # gone between the question and the sending
        source.close()
        sink.close()

    def before(self, directory: str) -> socket.socket:
        """Stand where the workers look for the client's packet socket; returns the one that the client listens on."""
        near, far = (os.path.join(directory, name) for name in ("tap-replies", "replies"))
        listening, tapping = (socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(2))
        listening.bind(near)
        listening.listen(8)
        listening.setblocking(False)
        tapping.bind(far)
        tapping.listen(8)
        thread = threading.Thread(target=self._pass_packets_on, args=(tapping, near), daemon=True)
        self._threads.append(thread)
        thread.start()
        return listening

    def _pass_packets_on(self, tapping: socket.socket, near: str) -> None:
        poll = select.poll()
        poll.register(tapping, select.POLLIN)
        ways: dict[int, tuple[socket.socket, socket.socket]] = {}
        while not self._ending.is_set():
            for fd, _ in poll.poll(50):
                if fd == tapping.fileno():
                    source, _ = tapping.accept()
                    sink = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                    sink.connect(near)
                    sink.send(source.recv(protocol.DIRECT_BYTES))  # the worker's name
                    ways[source.fileno()] = source, sink
                    poll.register(source, select.POLLIN)
                    continue
                source, sink = ways[fd]
                if packet := source.recv(protocol.DIRECT_BYTES):
                    self.received.append([packet])
                    sink.send(packet)
                else:
                    poll.unregister(fd)
        for pair in ways.values():
            for end in pair:
                end.close()
        tapping.close()

    def close(self) -> None:
        self._ending.set()
        for thread in self._threads:
            thread.join()
        self._context.term()


@contextmanager
def tapped(monkeypatch: pytest.MonkeyPatch, workers: int = 2) -> Iterator[Tap]:
    """An engine whose client side is tapped, ended when the block ends."""
    tap = Tap()

    def connected(self: Any, kind: int, name: str) -> zmq.Socket[bytes]:
        made: zmq.Socket[bytes] = self._context.socket(kind)
        made.set_hwm(0)
        made.linger = 200
        made.connect(tap.between(self.directory, name))
        return made

    def listen(self: Any) -> None:
        self._replies = tap.before(self.directory)

    monkeypatch.setattr(engine_module.Engine, "_socket", connected)
    monkeypatch.setattr(engine_module.Engine, "_listen", listen)
    try:
        dtorch.init(workers=workers, device="cpu", threads_per_worker=1)
        yield tap
    finally:
        dtorch.shutdown()
        tap.close()


def unpack(data: bytes) -> list[Any]:
    """One array, and nothing behind it."""
    values = msgpack.unpackb(data, strict_map_key=False)
    assert isinstance(values, list)
    return values


def stream(data: bytes) -> list[list[Any]]:
    unpacker = msgpack.Unpacker(strict_map_key=False, max_buffer_size=0)
    unpacker.feed(data)
    return list(unpacker)


class Reader:
    """Follows the client's records as a worker would, and checks each."""

    def __init__(self, workers: int) -> None:
        self.seq = [0] * workers
        self.operators: list[dict[int, tuple[str, str]]] = [{} for _ in range(workers)]
        self.last_named: list[dict[int, int]] = [{} for _ in range(workers)]  # storage -> record, while it is held
        self.ever: set[int] = set()
        self.asked_ids: list[range] = []
        self.requests: dict[int, int] = {}  # number -> worker
        self.kinds: set[Record] = set()
        self.op_names: set[str] = set()
        self.extensions: set[int] = set()
        self.generators: set[tuple[int, int]] = set()
        self.sends: dict[int, tuple[int, int]] = {}
        self.recvs: dict[int, tuple[int, int]] = {}
        self.records: list[list[Any]] = []

    def read(self, record: list[Any]) -> None:
        assert isinstance(record, list)
        kind = Record(record[0])
        names = RECORD_FIELDS[kind].split()
        assert len(record) == 2 + len(names), (kind, record)
        worker = record[1]
        assert isinstance(worker, int) and 0 <= worker < len(self.seq), record
        self.kinds.add(kind)
        self.records.append(record)
        fields = dict(zip(names, record[2:], strict=True))
        if kind != Record.RELEASE:
            self.seq[worker] += 1
        for name, value in fields.items():
            check = getattr(self, f"_{name}", None)
            if check is not None:
                check(value)
            else:
                _whole(value)
        getattr(self, f"_{kind.name}", lambda *_: None)(worker, fields)

    # -- the fields that are not just whole numbers

    def _geometry(self, g: Any) -> None:
        assert isinstance(g, list) and 2 <= len(g) <= 5, g
        dtype, sizes, strides, offset, flags = g + [None, 0, 0][len(g) - 2 :]
        assert dtype in DTYPES, g
        assert all(_whole(n) >= 0 for n in sizes), g
        if strides is not None:
            assert len(strides) == len(sizes) and all(_whole(n) >= 0 for n in strides), g
        elif len(g) == 3:
            raise AssertionError(f"strides are left out when they are row-major: {g}")
        assert _whole(offset) >= 0
        assert flags in range(4)

    def _bytes(self, value: Any) -> None:
        assert isinstance(value, bytes)
        assert len(value) <= protocol.INLINE_BYTES

    def _state(self, value: Any) -> None:
        assert isinstance(value, bytes)

    def _name(self, value: Any) -> None:
        assert isinstance(value, str) and value

    def _overload(self, value: Any) -> None:
        assert isinstance(value, str)

    def _what(self, value: Any) -> None:
        assert value in ("memory", "reset_peak", "reset_accumulated", "empty_cache", "log", "live")

    def _module(self, value: Any) -> None:
        assert isinstance(value, str) and value

    def _file(self, value: Any) -> None:
        assert isinstance(value, str) and os.path.isabs(value)

    def _paths(self, value: Any) -> None:
        assert isinstance(value, list) and all(isinstance(path, str) and os.path.isabs(path) for path in value)

    def _lent(self, value: Any) -> None:
        assert type(value) is bool

    def _args(self, value: Any) -> None:
        assert isinstance(value, list)

    def _outs(self, value: Any) -> None:
        for storage, geometry in value:
            _whole(storage)
            self._geometry(geometry)

    def _tensor(self, value: Any) -> None:
        if isinstance(value, list):
            storage, geometry = value
            _whole(storage)
            self._geometry(geometry)
        else:
            _whole(value)

    # -- what the records do to the picture

    def _new(self, worker: int, storage: int) -> None:
        """WIRE-3."""
        assert storage not in self.ever, f"storage {storage} is made twice"
        assert 0 < storage < TOKENS
        self.ever.add(storage)
        self.last_named[worker][storage] = self.seq[worker]

    def _named(self, worker: int, tensor: Any) -> None:
        storage = tensor[0] if isinstance(tensor, list) else tensor
        if storage not in self.ever and any(storage in ids for ids in self.asked_ids):
            self._new(worker, storage)
        assert storage in self.last_named[worker], f"storage {storage} is not held on worker {worker}"
        self.last_named[worker][storage] = self.seq[worker]

    def _request_made(self, worker: int, fields: dict[str, Any]) -> None:
        assert fields["request"] not in self.requests
        self.requests[fields["request"]] = worker

    def _DEFINE_OP(self, worker: int, fields: dict[str, Any]) -> None:
        assert fields["op"] not in self.operators[worker], "sent once"
        self.operators[worker][fields["op"]] = (fields["name"], fields["overload"])

    def _OP(self, worker: int, fields: dict[str, Any]) -> None:
        self._arguments(worker, fields)
        for storage, _ in fields["outs"]:
            self._new(worker, storage)

    def _ASK(self, worker: int, fields: dict[str, Any]) -> None:
        self._request_made(worker, fields)
        self._arguments(worker, fields)
        first = fields["first_storage"]
        self.asked_ids.append(range(first, first + ASK_IDS))

    def _ALLOC(self, worker: int, fields: dict[str, Any]) -> None:
        self._new(worker, fields["storage"])

    def _PUT(self, worker: int, fields: dict[str, Any]) -> None:
        self._new(worker, fields["storage"])
        dtype, sizes = fields["geometry"][:2]
        n = DTYPES[dtype].itemsize
        for size in sizes:
            n *= size
        assert len(fields["bytes"]) == n

    def _MAP(self, worker: int, fields: dict[str, Any]) -> None:
        self._new(worker, fields["storage"])
        assert fields["nbytes"] > protocol.INLINE_BYTES

    def _FETCH(self, worker: int, fields: dict[str, Any]) -> None:
        self._request_made(worker, fields)
        self._named(worker, fields["tensor"])

    def _SEND(self, worker: int, fields: dict[str, Any]) -> None:
        self._named(worker, fields["tensor"])
        self.sends[fields["transfer"]] = (worker, fields["dest"])

    def _RECV(self, worker: int, fields: dict[str, Any]) -> None:
        self._new(worker, fields["storage"])
        self.recvs[fields["transfer"]] = (fields["source"], worker)

    def _SEED(self, worker: int, fields: dict[str, Any]) -> None:
        self.generators.add((worker, fields["generator"]))

    def _RNG_GET(self, worker: int, fields: dict[str, Any]) -> None:
        self._request_made(worker, fields)
        assert (worker, fields["generator"]) in self.generators

    def _RNG_SET(self, worker: int, fields: dict[str, Any]) -> None:
        assert (worker, fields["generator"]) in self.generators

    def _SYNC(self, worker: int, fields: dict[str, Any]) -> None:
        self._request_made(worker, fields)

    def _EVENT(self, worker: int, fields: dict[str, Any]) -> None:
        self._request_made(worker, fields)

    def _READ(self, worker: int, fields: dict[str, Any]) -> None:
        self._request_made(worker, fields)
        self._new(worker, fields["storage"])
        assert fields["pid"] == os.getpid()
        dtype, sizes = fields["geometry"][:2]
        assert fields["nbytes"] == DTYPES[dtype].itemsize * math.prod(sizes)

    def _IMPORT(self, worker: int, fields: dict[str, Any]) -> None:
        self._request_made(worker, fields)

    def _STATS(self, worker: int, fields: dict[str, Any]) -> None:
        self._request_made(worker, fields)

    def _RESIZE(self, worker: int, fields: dict[str, Any]) -> None:
        self._named(worker, fields["storage"])

    def _RELEASE(self, worker: int, fields: dict[str, Any]) -> None:
        """WIRE-2: the number is that of the last record that names the storage."""
        storage, last = fields["storage"], fields["last_seq"]
        if storage >= TOKENS:
            return
        if storage not in self.ever and any(storage in ids for ids in self.asked_ids):
            self.ever.add(storage)  # a result of an ASK that was dropped before anything named it
            assert last <= self.seq[worker]
            return
        assert self.last_named[worker].pop(storage) == last, f"of storage {storage}"

    # -- arguments, by the operator's schema

    def _arguments(self, worker: int, fields: dict[str, Any]) -> None:
        name, overload = self.operators[worker][fields["op"]]
        self.op_names.add(name)
        schema = torch._C._get_schema(name, overload)
        assert len(fields["args"]) == len(schema.arguments), name
        for argument, value in zip(schema.arguments, fields["args"], strict=True):
            self._argument(worker, str(argument.real_type), value, f"{name}.{overload} {argument.name}")

    def _argument(self, worker: int, kind: str, value: Any, where: str) -> None:
        if kind.startswith("Optional["):
            if value is None:
                return
            kind = kind[len("Optional[") : -1]
        if isinstance(value, msgpack.ExtType):
            self._extension(worker, kind, value, where)
        elif kind == "Tensor":
            if value is not None:
                self._tensor(value)
                self._named(worker, value)
        elif kind.startswith("List["):
            assert isinstance(value, list), where
            for element in value:
                self._argument(worker, kind[len("List[") : -1], element, where)
        elif kind in ("int", "SymInt", "ScalarType", "Layout", "MemoryFormat"):
            assert type(value) is int, where
        elif kind == "float":
            assert type(value) is float, where
        elif kind == "bool":
            assert type(value) is bool, where
        elif kind == "str":
            assert type(value) is str, where
        elif kind in ("number", "Scalar"):
            assert type(value) in (int, float, bool), where
        else:
            raise AssertionError(f"{where}: {kind} came as {value!r}")

    def _extension(self, worker: int, kind: str, value: msgpack.ExtType, where: str) -> None:
        self.extensions.add(value.code)
        if value.code == protocol.EXT_CPU_TENSOR:
            assert kind == "Tensor", where
            dtype, wrapped, ndim = value.data[:3]
            assert (wrapped in (0, 1), ndim) == (True, 0), where
            assert len(value.data) == 3 + DTYPES[dtype].itemsize, where
        elif value.code == protocol.EXT_COMPLEX:
            assert kind in ("number", "Scalar"), where
            struct.unpack("<dd", value.data)
        elif value.code == protocol.EXT_GENERATOR:
            assert kind == "Generator", where
            assert (worker, struct.unpack("<I", value.data)[0]) in self.generators, f"{where}: RNG-1"
        else:
            assert value.code == protocol.EXT_DEVICE, where
            assert value.data in (b"\0", b"\1"), where


def _whole(value: Any) -> int:
    assert type(value) is int, value
    return value


def everything() -> None:
    """A program whose records are of every kind, with arguments of every form."""
    x = torch.arange(12.0).view(3, 4).to("dtorch")
    large = torch.ones(300, 300).to("dtorch")
    y = (x * 2 + torch.tensor(3.0)).t()[1:] @ x
    y[0].fill_(7)
    empty = dtorch.empty(5, 5)
    empty[1].fill_(1)
    c = torch.view_as_complex(dtorch.rand(4, 2)) * (1 + 2j)
    (c.conj() + 1j).abs().sum()
    c.conj().imag.cpu()
    c.fill_(1 - 1j)
    x[x > 3].sum().item()
    x[torch.tensor([0, 2])].tolist()
    torch.cat([x, y], 0).std(1, correction=0)
    torch.add(x, 1, out=dtorch.empty(0))
    dtorch.rand(3, generator=torch.Generator(device="dtorch").manual_seed(5))
    state = dtorch.get_rng_state()
    nn.functional.dropout(x, 0.5)
    dtorch.set_rng_state(state)
    torch.manual_seed(7)
    moved = large.to("dtorch:1", torch.bfloat16)
    small = x.to("dtorch:1")
    (moved.sum() + small.sum()).cpu()
    large.t().contiguous().to_torch()
    torch.empty(0, device="dtorch:1").resize_(3).untyped_storage().resize_(100)
    x.untyped_storage().resize_(200)
    layer = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.LayerNorm(8)).to("dtorch:1")
    optimizer = torch.optim.AdamW(layer.parameters(), 0.1)
    for _ in range(2):
        layer(small).pow(2).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    nn.functional.conv2d(dtorch.rand(1, 2, 5, 5), dtorch.rand(3, 2, 3, 3))
    nn.functional.scaled_dot_product_attention(*(dtorch.rand(1, 2, 5, 8) for _ in range(3)), is_causal=True)
    torch.div(x, 3, rounding_mode="floor")
    dtorch.full((2, 2), 1.5, dtype=torch.float64)
    dtorch.zeros(3, dtype=torch.bool) | dtorch.ones(3, dtype=torch.bool)
    with dtorch.allocation_log():
        x + 1
    dtorch.memory_allocated()
    dtorch.reset_peak_memory_stats()
    torch.accelerator.current_stream().record_event().synchronize()
    with tempfile.NamedTemporaryFile() as file:
        file.write(safetensors.torch.save({"x": torch.ones(3, 4)}))
        file.flush()
        dtorch.load_file(file.name)["x"].add_(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(imports, "_modules", {})  # not for the engines of other tests
        dtorch.import_on_workers("colorsys")
    with pytest.raises(dtorch.RemoteError):
        nn.functional.embedding(computed([9]), x).cpu()
    dtorch.synchronize()


def test_every_record_is_as_documented(no_engine: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """WIRE-1, WIRE-2, WIRE-3 and RNG-1 on what a real client writes."""
    with tapped(monkeypatch) as tap:
        everything()
        issued = dtorch.progress()
        counted = dtorch.client_stats()
    reader = Reader(workers=2)
    batches = 0
    for head, *frames in tap.sent:
        kind, *fields = unpack(head)
        if kind != Message.RECORDS:
            continue
        batches += 1
        (records,) = frames
        read = stream(records)
        assert fields == [len(read)], "count"
        for record in read:
            reader.read(record)
    assert reader.kinds == set(Record), "the program above makes every kind"
    assert reader.extensions >= {protocol.EXT_CPU_TENSOR, protocol.EXT_COMPLEX, protocol.EXT_GENERATOR}
    assert reader.sends == reader.recvs
    assert reader.seq[0] >= issued[0][0] and reader.seq[1] >= issued[1][0]
    assert counted["records"] <= sum(reader.seq)
    assert batches >= counted["batches"]
    assert {"aten::mm", "aten::index", "aten::native_layer_norm"} <= reader.op_names


def test_what_was_released_is_all_that_was_made(no_engine: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Followed from the outside: when the program holds no tensor, the worker holds no storage."""
    with tapped(monkeypatch) as tap:
        everything()
        dtorch.synchronize()
    reader = Reader(workers=2)
    for head, *frames in tap.sent:
        if unpack(head)[0] == Message.RECORDS:
            for record in stream(frames[0]):
                reader.read(record)
    assert reader.last_named == [{}, {}]


REPLIES = (Message.VALUE, Message.META, Message.DONE, Message.ERROR)


def test_every_message_is_as_documented(no_engine: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """WIRE-4 and WIRE-5: the handshake, one answer to each request, and nothing that is not msgpack."""
    with tapped(monkeypatch) as tap:
        everything()
    for direction in (tap.sent, tap.received):
        for head, *frames in direction:
            kind, *fields = unpack(head)
            names, _, payloads = MESSAGE_FIELDS[Message(kind)].partition("|")
            assert len(fields) == len(names.split()), Message(kind)
            assert len(frames) == len(payloads.split()), Message(kind)
            assert _plain(fields), fields
    sent = [unpack(head) for head, *_ in tap.sent]
    assert sent[0] == [Message.HELLO, VERSION, 2, "cpu", 1]
    assert {m[0] for m in sent[1:]} <= {Message.RECORDS, Message.SHUTDOWN}
    received = [unpack(head) for head, *_ in tap.received]
    assert received[0] == [Message.READY, VERSION]
    assert sorted(m[1] for m in received if m[0] == Message.WORKER_READY) == [0, 1]

    reader = Reader(workers=2)
    for head, *frames in tap.sent:
        if unpack(head)[0] == Message.RECORDS:
            for record in stream(frames[0]):
                reader.read(record)
    answers = [m for m in received if m[0] in REPLIES]
    assert {m[0] for m in answers} == set(REPLIES)
    assert sorted(m[1] for m in answers) == sorted(reader.requests), "each exactly once"
    for kind, request, worker, *rest in answers:
        assert worker == reader.requests[request]
        if kind == Message.VALUE:
            geometry, payload = rest
            reader._geometry(geometry)
            assert isinstance(payload, bytes) or len(payload) == len(protocol.STRUCT_FIELDS["segment"].split())
        if kind == Message.ERROR:
            (error,) = rest
            assert len(error) == len(protocol.STRUCT_FIELDS["error"].split())
            assert error[:2] == ["op", "IndexError"]
    progress: dict[int, list[int]] = {0: [], 1: []}
    for _, worker, executed in (m for m in received if m[0] == Message.PROGRESS):
        progress[worker].append(executed)
    assert all(seqs == sorted(seqs) and seqs for seqs in progress.values())


def _plain(value: Any) -> bool:
    """Only what msgpack itself knows: nothing here can carry a pickled object but bytes, which are elements."""
    if isinstance(value, list):
        return all(map(_plain, value))
    return value is None or type(value) in (int, float, str, bytes, bool, msgpack.ExtType)


def test_element_bytes_are_the_elements(no_engine: None, monkeypatch: pytest.MonkeyPatch) -> None:
    with tapped(monkeypatch, workers=1) as tap:
        value = torch.tensor([[1.5, -2.0], [0.0, 3.25]])
        x = value.to("dtorch")
        y = x.t() + 1
        z = y.cpu()
    records = [r for head, *frames in tap.sent if unpack(head)[0] == Message.RECORDS for r in stream(frames[0])]
    (put,) = [r for r in records if r[0] == Record.PUT]
    assert put[:5] == [Record.PUT, 0, put[2], [6, [2, 2]], value.numpy().tobytes()]
    (op,) = [r for r in records if r[0] == Record.OP]
    view, one, alpha = op[4]
    assert view == [put[2], [6, [2, 2], [1, 2]]]
    assert one == msgpack.ExtType(protocol.EXT_CPU_TENSOR, bytes([4, 1, 0]) + struct.pack("<q", 1))
    assert alpha == 1
    ((made, geometry),) = op[5]
    assert geometry == [6, [2, 2], [1, 2]], "eager's addition keeps the order of the dimensions"
    (fetch,) = [r for r in records if r[0] == Record.FETCH]
    assert fetch[4] == made
    answer = next(unpack(head) for head, *_ in tap.received if unpack(head)[0] == Message.VALUE)
    assert answer == [Message.VALUE, fetch[2], 0, geometry, z.t().contiguous().numpy().tobytes()]


def test_sites_are_numbers_and_lines_stay_on_the_client(no_engine: None, monkeypatch: pytest.MonkeyPatch) -> None:
    with tapped(monkeypatch, workers=1) as tap:
        x = dtorch.ones(3)
        for _ in range(5):
            x = x + 1
        x = x + 1
        x.cpu()
    records = [r for head, *frames in tap.sent if unpack(head)[0] == Message.RECORDS for r in stream(frames[0])]
    names = {r[2]: r[3] for r in records if r[0] == Record.DEFINE_OP}
    sites = [r[3] for r in records if r[0] == Record.OP and names[r[2]] == "aten::add"]
    assert [len(list(group)) for _, group in itertools.groupby(sites)] == [5, 1]
    everything_sent = b"".join(frame for message in tap.sent for frame in message)
    assert __file__.encode() not in everything_sent

"""Every message between the processes, declared once.

The client, the controller and the workers talk in msgpack arrays inside ZeroMQ frames. This module names every
array's kind and its fields, in order; ``native/common/protocol.h`` is its C++ twin and a test compares the two.
Nothing is pickled.

There are two layers:

* a **message** is one ZeroMQ multipart message. Its first frame is a msgpack array whose first element is a
  :class:`Message`; further frames are payloads (described there);
* a **record** is one msgpack array in a *record stream*: frame 1 of a ``RECORDS`` message is records written one after
  the other, with nothing between them. A record's first element is a :class:`Record`, the second the worker's index.

Invariants:

WIRE-1  Sequenced records (all but RELEASE) are numbered per worker, densely from 1, in the order they stand in the
        stream. Client, controller and worker count alike; the number itself is never sent with the record.
WIRE-2  A RELEASE carries the number of the last sequenced record that names its storage on that worker. It may
        overtake records: the worker frees the storage as soon as that record has been executed, and no earlier.
WIRE-3  Storage ids are never used twice within a session.
WIRE-4  A reply to a request (FETCH, ASK, SYNC, ...) is VALUE, META, DONE or ERROR with the same request number,
        exactly once, unless the worker dies: then WORKER_DIED answers all that it left open.
WIRE-5  Both ends compare VERSION in the handshake (HELLO) and refuse to talk across versions.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Final

#: Raised on every change of a message or record. A changelog line goes with it.
VERSION: Final = 6

#: Values up to this many bytes travel inside a message; larger ones as a descriptor of a shared segment.
INLINE_BYTES: Final = 64 * 1024

#: Replies up to this many bytes go from the worker straight to the client (socket ``replies``), longer ones by way of
#: the controller, and so does one that the direct way cannot take at once. Either way it comes once.
DIRECT_BYTES: Final = 80 * 1024

#: msgpack extension types that stand for an argument of an operator.
EXT_CPU_TENSOR: Final = 1  # [dtype:u8, wrapped:u8, ndim:u8, sizes:i64*ndim, bytes...]: a small CPU tensor by value
EXT_COMPLEX: Final = 2  # two float64: a complex Scalar
EXT_GENERATOR: Final = 3  # u32: a random generator by number; 0 is the worker's default generator
EXT_DEVICE: Final = 4  # u8: 0 "the worker's own device", 1 "cpu"


class Message(IntEnum):
    """First element of a message's first frame."""

    # client -> controller
    HELLO = 1
    RECORDS = 2
    SHUTDOWN = 3
    TRACE = 4
    # controller -> worker
    BATCH = 10
    INCOMING = 11
    PEER_DIED = 12
    EXIT = 13
    # worker -> controller (READY, RETURNED and the replies go on to the client as they are)
    WORKER_HELLO = 20
    TRANSFER = 21
    TRANSFER_DONE = 22
    PROGRESS = 23
    VALUE = 24
    META = 25
    DONE = 26
    ERROR = 27
    RETURNED = 28
    FREED = 29
    # controller -> client
    READY = 30
    REFUSED = 31
    WORKER_DIED = 32
    WORKER_READY = 33
    TRACED = 34


#: Fields of every message's first frame after the kind, in order; then, after "|", its further frames.
MESSAGE_FIELDS: Final[dict[Message, str]] = {
    Message.HELLO: "version workers device threads_per_worker",
    Message.RECORDS: "count | records",
    Message.SHUTDOWN: "",
    Message.TRACE: "limit",
    Message.BATCH: "first_seq count release_count | records releases",
    Message.INCOMING: "transfer payload",
    Message.PEER_DIED: "worker reason",
    Message.EXIT: "",
    Message.WORKER_HELLO: "version worker pid",
    Message.TRANSFER: "transfer source dest payload",
    Message.TRANSFER_DONE: "token source dest",
    Message.PROGRESS: "worker executed_seq",
    Message.VALUE: "request worker geometry payload",
    Message.META: "request worker returns",
    Message.DONE: "request worker result",
    Message.ERROR: "request worker error",
    Message.RETURNED: "worker spare",
    Message.FREED: "source dest handles",
    Message.READY: "version",
    Message.REFUSED: "reason",
    Message.WORKER_DIED: "worker status output",
    Message.WORKER_READY: "worker pid",
    Message.TRACED: "events dropped texts",
}

#: What each message says, one sentence each.
MESSAGE_DOCS: Final[dict[Message, str]] = {
    Message.HELLO: "The client's first message: its version (WIRE-5) and the workers it wants.",
    Message.RECORDS: "`count` records for any workers, in the order in which the program made them.",
    Message.SHUTDOWN: "End the session: workers are told to leave, then the controller leaves.",
    Message.TRACE: "Note up to `limit` trace events from now on; 0: stop, hand over the oldest. Answered by TRACED.",
    Message.BATCH: "`count` sequenced records from number `first_seq` on, and releases to apply at once.",
    Message.INCOMING: "The tensor of a transfer that this worker's RECV waits for, as its sender handed it over.",
    Message.PEER_DIED: "A worker is gone; what waits for a transfer from it fails with `reason`.",
    Message.EXIT: "Leave now.",
    Message.WORKER_HELLO: "A worker's first message; it is ready for records.",
    Message.TRANSFER: "The tensor of a SEND; the controller passes it to `dest` as INCOMING.",
    Message.TRANSFER_DONE: "`dest` needs the lent memory no longer; `source` may use it again.",
    Message.PROGRESS: "All sequenced records up to `executed_seq` have been executed; opens the client's window.",
    Message.VALUE: "The answer to FETCH: the elements, laid out as `geometry` says.",
    Message.META: "The answer to ASK: what the operator returned.",
    Message.DONE: "The answer to SYNC, RNG_GET, STATS, EVENT, READ and IMPORT.",
    Message.ERROR: "The answer to a request that failed, or whose tensor an earlier failure poisoned.",
    Message.RETURNED: "The worker needs an uploaded segment no longer; the client may fill it again.",
    Message.FREED: "Memory lent to `dest` goes: it closes these handles, and says so by one without any. Passed on.",
    Message.READY: "The controller answers HELLO; the session is open although workers may still be starting.",
    Message.REFUSED: "The controller answers HELLO with why it will not serve this client.",
    Message.WORKER_DIED: "A worker ended: its exit status in words and the last lines it printed (WIRE-4).",
    Message.WORKER_READY: "A worker said WORKER_HELLO.",
    Message.TRACED: "Answers TRACE: a `trace` (see below), empty `events` when there are no more.",
}


class Record(IntEnum):
    """First element of a record; the second is always the worker's index."""

    OP = 1
    RELEASE = 2
    DEFINE_OP = 3
    ALLOC = 4
    PUT = 5
    MAP = 6
    FETCH = 7
    ASK = 8
    SEND = 9
    RECV = 10
    SEED = 11
    RNG_GET = 12
    RNG_SET = 13
    SYNC = 14
    RESIZE = 15
    STATS = 16
    OPTION = 17
    EVENT = 18
    READ = 19
    IMPORT = 20


#: Fields of every record after [kind, worker], in order.
RECORD_FIELDS: Final[dict[Record, str]] = {
    Record.OP: "op site args outs",
    Record.RELEASE: "storage last_seq",
    Record.DEFINE_OP: "op name overload",
    Record.ALLOC: "storage geometry nbytes site",
    Record.PUT: "storage geometry bytes site",
    Record.MAP: "storage geometry pid fd offset nbytes lent spare site",
    Record.FETCH: "request site tensor",
    Record.ASK: "request op site args first_storage",
    Record.SEND: "transfer dest site tensor",
    Record.RECV: "transfer source site storage geometry",
    Record.SEED: "generator seed",
    Record.RNG_GET: "request generator",
    Record.RNG_SET: "generator state",
    Record.SYNC: "request",
    Record.RESIZE: "storage nbytes",
    Record.STATS: "request what",
    Record.OPTION: "name value",
    Record.EVENT: "request",
    Record.READ: "request storage geometry pid fd offset nbytes site",
    Record.IMPORT: "request site module file paths",
}

#: What each record does, one sentence each (``docs/protocol.md`` is generated from these tables).
RECORD_DOCS: Final[dict[Record, str]] = {
    Record.OP: "Run an operator. `args` follow the schema; `outs` is one [storage, geometry] per new tensor.",
    Record.RELEASE: "The client holds the storage no longer; free it once `last_seq` has been executed (WIRE-2).",
    Record.DEFINE_OP: "Give an operator its number on this worker; sent once, before its first use.",
    Record.ALLOC: "Make uninitialised storage. Sent when an `empty` tensor is first written or read.",
    Record.PUT: "Make a tensor from the bytes in the record.",
    Record.MAP: "Make a tensor of a segment: a copy if `lent`, else the mapping, RETURNED if `spare` is not 0.",
    Record.FETCH: "Answer with VALUE: the tensor's elements, as they lie where it is dense, else in row-major order.",
    Record.ASK: "Run an operator whose results the client cannot predict; answer with META.",
    Record.SEND: "Hand a tensor to worker `dest`; its RECV with the same `transfer` takes it.",
    Record.RECV: "Wait for the transfer and make a tensor of it.",
    Record.SEED: "Seed a generator (0: the default one); makes the generator when it is new.",
    Record.RNG_GET: "Answer with DONE carrying the generator's state as bytes.",
    Record.RNG_SET: "Set the generator's state from bytes.",
    Record.SYNC: "Answer with DONE when all before it has been executed, or ERROR with the first unreported failure.",
    Record.RESIZE: "Resize a storage to `nbytes`, keeping its bytes (as untyped_storage().resize_).",
    Record.STATS: "Answer with DONE: counters (`memory`, after `reset_peak`, `empty_cache`), `log`, `live` or `trace`.",
    Record.OPTION: "Set a number: `memory_limit`, `lookahead_us`, `record_allocations`, `trace`, ...",
    Record.EVENT: "Answer with DONE carrying the worker's clock in nanoseconds when all before has been executed.",
    Record.READ: "Make a tensor of a part of a file that process `pid` has open as `fd`; answer with DONE.",
    Record.IMPORT: "Import a Python module; answer with DONE: [name, overload] of each operator that is not PyTorch's.",
}

#: Fields of the arrays nested in records and messages.
#: geometry  strides and offset may be nil (row-major, 0); sizes and strides count elements.
#:           A result may start anywhere in its storage, whose first geometry then is all of it up to the result's last
#:           element, and may have flags, which the first geometry never has.
#: tensor    a storage id where the tensor is the storage's first geometry, else a view: [storage, geometry]; an
#:           operator's argument may be sparse.
#: sparse    a sparse tensor is its dense parts one after the other, `tensor` each: indices and values (COO), or
#:           compressed indices, plain indices and values; `layout` is PyTorch's number (1 COO, 2 CSR, 4 CSC, 5 BSR,
#:           6 BSC), `sizes` an array, `same` the place among the record's sparse tensors of the one that it is, or -1.
#: payload   a bin with the bytes, or a segment: the receiver opens /proc/PID/fd/FD and maps `nbytes` from `offset`
#:           privately. The owner leaves them as they are until `token` is released (by a RELEASE with that number as
#:           its storage, or TRANSFER_DONE), which the receiver does when its mapping ends. Between workers with GPUs
#:           also device_memory, which the receiver copies and then releases.
#: device_memory  `handle` opens the allocation on GPU `device`; a copy waits for `event` (dtorch/worker/cuda.py).
#: error     see dtorch.errors.RemoteError; `shapes` is text; `site` a client-side number for the source line;
#:           `kind` is "op" (the program's mistake), "call" (the same, in answer to the ASK that made it), "memory",
#:           "internal" or "peer"; `held` is nil but for "memory": the largest tensors, [bytes, text, site] each.
#: trace     what a process noted for dtorch.profile(), the oldest events first: `events` is a bin of TRACE_EVENT
#:           structs and empty at the end; `dropped` counts what did not fit; `texts` come with the empty one: number n
#:           stands at n - 1.
#: returns   one per result: [storage, geometry] | sparse | [either, ...] | scalar | nil (an argument comes back); a
#:           sparse result's parts are [storage, geometry], the storage a new one or an argument's. Then one more: per
#:           written argument the geometries of its tensors now (out= arguments are resized), sparse ones as results.
STRUCT_FIELDS: Final[dict[str, str]] = {
    "geometry": "dtype sizes strides offset flags",
    "view": "storage geometry",
    "sparse": "layout sizes coalesced same parts",
    "segment": "pid fd offset nbytes token",
    "device_memory": "device handle offset event nbytes token",
    "error": "kind type message op shapes site worker held",
    "trace": "events dropped texts",
}

#: A trace event as `struct` reads it, and its fields. Times are CLOCK_MONOTONIC in nanoseconds, the same for all
#: processes of a machine. `kind` is a Record's number (the client wrote it, a worker ran it), TRACE_MESSAGE plus a
#: Message's number (the controller handled it; `detail` counts its sequenced records) or a Trace. `site` is the
#: client's line; `worker` is -1 where none is meant. Of a record, `number` is its sequence number (WIRE-1), `name` its
#: operator, `bytes` those of the tensors it reads or hands over, `detail` the text of their shapes, `worker` in a
#: worker's SEND and RECV the peer, and `link` the request or transfer that it belongs to. In the client `bytes` are the
#: record's own, and `link` is the time, since its thread's event before, that the thread did not sleep.
TRACE_EVENT: Final = "<QQQQQIIIbBH"
TRACE_FIELDS: Final = "start end number link bytes name site detail worker kind thread"

#: Added to a Message's number to make a trace event's kind.
TRACE_MESSAGE: Final = 64


class Trace(IntEnum):
    """Kinds of trace events that are neither records nor messages."""

    SENT = 128
    WAIT = 129
    HELD_BACK = 130
    REQUEST = 131
    INFER = 132
    SPAN_BEGIN = 133
    SPAN_END = 134
    AWAIT_PEER = 135
    AWAIT_MEMORY = 136


#: What each kind of trace event is, one sentence each.
TRACE_DOCS: Final[dict[Trace, str]] = {
    Trace.SENT: "The client sent its batch `number` of `bytes`, with `detail` records and releases.",
    Trace.WAIT: "A thread of the client waited for the answer to request `number`, made by a record of kind `detail`.",
    Trace.HELD_BACK: "A thread of the client waited because it was too far ahead of the workers.",
    Trace.REQUEST: "From the making of request `number` to its answer; `name` and `detail` as for WAIT.",
    Trace.INFER: "The client inferred the geometry of the results of operator `name`.",
    Trace.SPAN_BEGIN: "A named part of the program begins (text `name`): a module's forward, a record_function block.",
    Trace.SPAN_END: "The innermost such part ends.",
    Trace.AWAIT_PEER: "A worker waited for the tensor of transfer `link` from worker `worker`.",
    Trace.AWAIT_MEMORY: "A worker that was short of memory waited for releases.",
}

#: Bits of geometry.flags.
FLAG_CONJ: Final = 1
FLAG_NEG: Final = 2

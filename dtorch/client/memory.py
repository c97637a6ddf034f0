"""What the workers' memory holds: counters with torch.cuda's names and meaning, limits, and a recorded history.

Counters are those of the point in the program at which they are asked for: asking waits for the worker. "Allocated" is
what tensors and operators' workspace hold, in bytes as they were asked for; "reserved" is what the worker's pool has
taken from the operating system, in steps of 2 MiB.
"""

from __future__ import annotations

import contextlib
import itertools
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgpack

from dtorch import _client
from dtorch.client import history
from dtorch.client.failures import holders, line_of, size_text
from dtorch.client.lifecycle import Device, device_count, index_of, is_initialized, running
from dtorch.errors import WorkerDied


def worker_stats(device: Device = None) -> dict[str, int]:
    """Counters of a worker, in bytes and numbers of things, at this point of the program. Waits for the worker.

    ``allocated``, ``peak``, ``total``, ``freed``: bytes that tensors and operators' workspace hold now, held at most
    since the last reset, and took and freed since the start or ``reset_accumulated_memory_stats``; ``blocks``,
    ``peak_blocks``, ``allocations``, ``frees``: the same in blocks; ``reserved``, ``peak_reserved``, ``limit``: bytes
    of the pool; ``machine``, ``available``: bytes of the machine's memory;
    ``mapped``: bytes of other workers' memory that tensors here stand on; ``loans``: values lent to a reader;
    ``lent``: bytes that only the client still holds, as values it fetched, which are neither in ``allocated`` nor held
    against the limit; ``staged``: bytes of host memory between a GPU and the others;
    ``storages``: storages held; ``donations``: results that took an argument's memory;
    ``lookaheads`` and ``lookahead_hits``: times an operator waited for a release just behind it, and times one came;
    ``retries``, ``ooms``: times memory ran short, and stayed so; ``executed``, ``received``: records.
    """
    running()
    return dict(_stats(device, "memory"))


def _stats(device: Device, what: str) -> list[Any]:
    rows: list[Any] = msgpack.unpackb(_client.stats(index_of(device), what))[3]
    return rows


def device_properties(device: Device = None) -> dict[str, Any]:
    """What a worker tells of its device, by torch.cuda.get_device_properties' names. Waits for it."""
    running()
    return dict(_stats(device, "properties"))


def memory_allocated(device: Device = None) -> int:
    """Bytes held on a device's worker (as torch.cuda.memory_allocated); waits for it."""
    return worker_stats(device)["allocated"]


def max_memory_allocated(device: Device = None) -> int:
    """The most bytes held since the start or the last reset (as torch.cuda.max_memory_allocated); waits for it."""
    return worker_stats(device)["peak"]


def memory_reserved(device: Device = None) -> int:
    """Bytes that a worker's pool has taken from the operating system (as torch.cuda.memory_reserved); waits for it."""
    return worker_stats(device)["reserved"]


def max_memory_reserved(device: Device = None) -> int:
    """The most bytes reserved since the start or the last reset (as torch.cuda.max_memory_reserved); waits for it."""
    return worker_stats(device)["peak_reserved"]


def reset_peak_memory_stats(device: Device = None) -> None:
    """Start the peaks anew from what is held now (as torch.cuda.reset_peak_memory_stats); waits for the worker."""
    running()
    _stats(device, "reset_peak")


def reset_accumulated_memory_stats(device: Device = None) -> None:
    """Count anew what was made and freed (as torch.cuda.reset_accumulated_memory_stats); waits for the worker."""
    running()
    _stats(device, "reset_accumulated")


def empty_cache() -> None:
    """Give the free memory of every worker's pool back to the operating system (as torch.cuda.empty_cache).

    What the client keeps for uploads goes too.
    """
    if is_initialized():
        _client.drop_spares()
        for worker in range(device_count()):
            with contextlib.suppress(WorkerDied):
                _stats(worker, "empty_cache")


def memory_stats(device: Device = None) -> OrderedDict[str, Any]:
    """Counters under the keys of torch.cuda.memory_stats, as far as they mean something here; waits for the worker.

    Each of ``allocated_bytes``, ``reserved_bytes``, ``active_bytes``, ``requested_bytes`` and ``allocation`` has
    ``.all.current`` and ``.all.peak``; ``num_alloc_retries`` and ``num_ooms`` count memory that ran short.
    """
    s = worker_stats(device)
    of = {
        "allocated_bytes": (s["allocated"], s["peak"]),
        "reserved_bytes": (s["reserved"], s["peak_reserved"]),
        "active_bytes": (s["allocated"], s["peak"]),
        "requested_bytes": (s["allocated"], s["peak"]),
        "allocation": (s["blocks"], s["peak_blocks"]),
    }
    rows: OrderedDict[str, Any] = OrderedDict()
    for name, (current, peak) in of.items():
        rows[f"{name}.all.current"] = current
        rows[f"{name}.all.peak"] = peak
    rows["allocated_bytes.all.allocated"] = s["total"]
    rows["allocated_bytes.all.freed"] = s["freed"]
    rows["allocation.all.allocated"] = s["allocations"]
    rows["allocation.all.freed"] = s["frees"]
    rows["num_alloc_retries"] = s["retries"]
    rows["num_ooms"] = s["ooms"]
    return rows


def mem_get_info(device: Device = None) -> tuple[int, int]:
    """(free, total) bytes for a worker (as torch.cuda.mem_get_info): within its limit and the machine; waits for it."""
    s = worker_stats(device)
    free = s["limit"] - s["reserved"]
    return max(0, min(free, s["available"])), min(s["limit"], s["machine"])


def set_per_process_memory_fraction(fraction: float, device: Device = None) -> None:
    """Limit what a worker may reserve to a fraction of the machine's memory (as for torch.cuda); waits for it."""
    if not 0 < fraction <= 1:
        raise ValueError(f"fraction={fraction!r}: a number above 0 and at most 1")
    total = worker_stats(device)["machine"]
    _client.option(index_of(device), "memory_limit", max(1, int(total * fraction)))


def get_per_process_memory_fraction(device: Device = None) -> float:
    """The limit as a fraction of the machine's memory (as for torch.cuda); waits for the worker."""
    s = worker_stats(device)
    return s["limit"] / s["machine"]


def live_tensors(device: Device = None) -> list[dict[str, Any]]:
    """What a worker holds now, largest first; waits for it.

    Each entry has ``bytes``, ``tensor`` ("Tensor[float32, (2, 3)]") and ``line``, the client's line that made it.
    """
    running()
    rows = sorted(_stats(device, "live"), key=lambda row: -int(row[1]))
    return [{"bytes": size, "tensor": text, "line": line_of(site)} for _, size, text, site in rows]


def memory_summary(device: Device = None, abbreviated: bool = False) -> str:
    """A table of a worker's memory and, unless ``abbreviated``, its largest tensors with their lines; waits for it."""
    s = worker_stats(device)
    rows = [
        ("allocated", s["allocated"], s["peak"]),
        ("reserved", s["reserved"], s["peak_reserved"]),
    ]
    text = [f"dtorch:{index_of(device)}      current           peak"]
    text += [f"{name:<10}{size_text(current):>14} {size_text(peak):>14}" for name, current, peak in rows]
    text.append(f"{'blocks':<10}{s['blocks']:>14} {s['peak_blocks']:>14}")
    limit, available, machine = (size_text(s[name]) for name in ("limit", "available", "machine"))
    text.append(f"limit {limit}, the machine has {available} of {machine} available")
    text.append(f"{s['donations']} donations, {s['retries']} times short of memory, {s['ooms']} times out of it")
    if not abbreviated:
        text += holders((row["bytes"], row["tensor"], row["line"]) for row in live_tensors(device)[:10])
    return "\n".join(text)


@contextlib.contextmanager
def _recording(device: Device) -> Iterator[list[list[int]]]:
    """Rows (record number, storage, bytes or -1, site, nanoseconds), there when the block has ended."""
    running()
    index = index_of(device)
    rows: list[list[int]] = []
    _client.option(index, "record_allocations", 1)
    try:
        yield rows
    finally:
        with contextlib.suppress(Exception):  # a failure is for whoever asks for the value, not for the log
            _client.synchronize(index)
        rows.extend(_stats(index, "log"))
        _client.option(index, "record_allocations", 0)


@contextlib.contextmanager
def allocation_log(device: Device = None) -> Iterator[list[tuple[int, int, int]]]:
    """Record what a worker's storages do inside the block: rows (record number, storage id, bytes, or -1 when freed).

    The list is filled when the block ends, after waiting for the worker. For tests and memory reports.
    """
    rows: list[tuple[int, int, int]] = []
    with _recording(device) as recorded:
        yield rows
    rows.extend(itertools.starmap(lambda seq, storage, nbytes, *_: (seq, storage, nbytes), recorded))


@contextlib.contextmanager
def record_memory_history(path: str | Path, device: Device = None) -> Iterator[None]:
    """Record a worker's tensors inside the block and save the timeline as JSON, with a plot beside it as PNG.

    ``path`` gets ``peak_bytes``; ``peak``, the tensors that were held when their sum was largest, largest first, each
    with the client's line that made it; and ``timeline``, rows of (microseconds, bytes held, storage, change in bytes,
    line). The plot needs matplotlib and is left out, with a warning, where that is not installed. What was held before
    the block counts from its beginning on. Leaving the block waits for the worker.
    """
    running()
    index = index_of(device)
    before = _stats(index, "live")
    with _recording(index) as rows:
        yield
    history.save(Path(path), before, rows)

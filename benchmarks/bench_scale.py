"""What grows: the cost of an operator over more workers, live tensors and queued records, and memory over a long run.

workers  a stream of adds that go round-robin to 1, 2, 4, 8 and 16 of 16 workers: the client's processor time per
         operator (its script thread), and the time end to end, beside PyTorch's loop over as many pairs.
live     the client's time per add as live tensors grow to a million, and the time until they are computed, beside
         PyTorch's; then the time to let go of each, and the client's memory for each. Python's collection of garbage,
         which visits all live tensors again and again on either side, is off: it is the larger part otherwise.
queue    the client's time per add, and the memory of client and controller, as records queue up to a million before a
         worker that does nothing (it is stopped by a signal), and the time per record to work them off.
memory   resident memory of client, controller and worker over ten million adds whose results are let go at once.

    dtorch bench scale [--case workers --case memory] [--most-workers 16] [--count 1000000] [--long 10000000]
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import os
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import _bench
import _plot
from _bench import MIB, Row, Table

US = 1e6
WORKERS = (1, 2, 4, 8, 16)
#: A million records are more bytes than the client may be ahead by default.
INFLIGHT_MB = "4096"


def steps(count: int) -> list[int]:
    """1000, 3000, 10000, ... up to count."""
    found = [n for k in range(3, 9) for n in (10**k, 3 * 10**k) if n < count]
    return [*found, count]


def number_text(n: float) -> str:
    """1k, 300k, 1M."""
    return f"{n / 1e6:g}M" if n >= 1e6 else f"{n / 1e3:g}k" if n >= 1000 else f"{n:g}"


def resident() -> dict[str, float]:
    """MiB of client, controller and worker 0."""
    from dtorch.client import engine

    running = engine.current()
    assert running is not None
    pids = running.pids()
    of = {"client": os.getpid(), "controller": pids["controller"], "worker": pids["worker-0"]}
    return {name: _bench.resident_bytes(pid) / MIB for name, pid in of.items()}


# --- the cases: each yields rows -------------------------------------------------------------------------------------


def workers(args: argparse.Namespace) -> Iterator[Row]:
    import torch

    import dtorch

    def loop(devices: list[str], wait: Callable[[], None]) -> tuple[float, float]:
        """Microseconds per add: processor time of this thread, and time until all is computed."""
        count = args.ops // len(devices)
        operands = [(torch.ones(1, device=d), torch.ones(1, device=d)) for d in devices]
        wait()
        start, before = time.perf_counter(), time.thread_time()
        for _ in range(count):
            for a, b in operands:
                a + b
        used = time.thread_time() - before
        wait()
        per = US / (count * len(devices))
        return used * per, (time.perf_counter() - start) * per

    counts = [n for n in WORKERS if n <= args.most_workers]
    sides = _bench.start(args, workers=counts[-1])
    cpu = {n: Row("workers", f"client's CPU time, {n}", "us/op", x=n) for n in counts}
    total = {n: Row("workers", f"end to end, {n}", "us/op", x=n) for n in counts}
    for i in range(args.rounds + 1):
        for n in counts if i % 2 else reversed(counts):
            eager = loop([args.device] * n, sides["eager"].wait)
            ours = loop([f"dtorch:{w}" for w in range(n)], sides["dtorch"].wait)
            if i:  # the first round warms up
                cpu[n].add(eager[0], ours[0])
                total[n].add(eager[1], ours[1])
    dtorch.shutdown()
    yield from (*cpu.values(), *total.values())
    for n in counts[1:]:
        grown = [many / one for one, many in zip(cpu[1].dtorch, cpu[n].dtorch, strict=True)]
        yield Row("workers", f"client's CPU time, {n} / 1", "ratio", dtorch=grown)


def live(args: argparse.Namespace) -> Iterator[Row]:
    import torch

    import dtorch

    sides = _bench.start(args)
    gc.disable()
    rows = [Row("live", f"add, {number_text(n)} live", "us/op", x=n) for n in steps(args.count)]
    totals = [Row("live", f"end to end, {number_text(n)} live", "us/op", x=n) for n in steps(args.count)]
    free = Row("live", "letting go of one", "us", x=args.count)
    memory = Row("live", "client's memory per tensor", "bytes")
    for name, side in sides.items():
        ctypes.CDLL(None).malloc_trim(0)  # what one side has freed must not hide what the other needs
        a, b = torch.ones(1, device=side.device), torch.ones(1, device=side.device)
        side.wait()
        before = _bench.resident_bytes()
        held: list[torch.Tensor] = []
        for row, total, n in zip(rows, totals, steps(args.count), strict=True):
            more = n - len(held)
            start = time.perf_counter()
            held += [a + b for _ in range(more)]
            issued = time.perf_counter() - start
            side.wait()
            seconds = time.perf_counter() - start
            (row.eager if name == "eager" else row.dtorch).append(issued / more * US)
            (total.eager if name == "eager" else total.dtorch).append(seconds / more * US)
        grown = (_bench.resident_bytes() - before) / len(held)
        (memory.eager if name == "eager" else memory.dtorch).append(grown)
        start = time.perf_counter()
        held.clear()
        seconds = time.perf_counter() - start
        (free.eager if name == "eager" else free.dtorch).append(seconds / args.count * US)
        side.wait()
    gc.enable()
    dtorch.shutdown()
    yield from (*rows, *totals, free, memory)


def queue(args: argparse.Namespace) -> Iterator[Row]:
    import torch

    import dtorch
    from dtorch.client import engine

    before = os.environ.get("DTORCH_INFLIGHT_MB")
    os.environ["DTORCH_INFLIGHT_MB"] = INFLIGHT_MB
    try:
        _bench.start(args)
    finally:
        if before is None:
            del os.environ["DTORCH_INFLIGHT_MB"]
        else:
            os.environ["DTORCH_INFLIGHT_MB"] = before
    running = engine.current()
    assert running is not None
    a, b = torch.ones(1, device="dtorch:0"), torch.ones(1, device="dtorch:0")
    (a + b).cpu()
    worker = running.pids()["worker-0"]
    os.kill(worker, signal.SIGSTOP)
    try:
        issued = 0
        for n in steps(args.count):
            start = time.perf_counter()
            for _ in range(n - issued):
                a + b
            seconds = time.perf_counter() - start
            yield Row("queue", f"add, {number_text(n)} queued", "us/op", dtorch=[seconds / (n - issued) * US], x=n)
            issued = n
            sizes = resident()
            for name in ("client", "controller"):
                yield Row("queue", f"{name}'s memory, {number_text(n)}", "MiB", dtorch=[sizes[name]], x=n)
    finally:
        os.kill(worker, signal.SIGCONT)
    start = time.perf_counter()
    dtorch.synchronize()
    yield Row("queue", "working one off", "us", dtorch=[(time.perf_counter() - start) / args.count * US], x=args.count)
    dtorch.shutdown()


def memory(args: argparse.Namespace) -> Iterator[Row]:
    import torch

    import dtorch

    _bench.start(args)
    a, b = torch.ones(1, device="dtorch:0"), torch.ones(1, device="dtorch:0")
    for i in range(11):  # the first stretch warms up: it fills caches and pools
        if i:
            for _ in range(args.long // 10):
                a + b
        else:
            for _ in range(max(1000, args.long // 100)):
                a + b
        dtorch.synchronize()
        done = i * (args.long // 10)
        for name, size in resident().items():
            yield Row("memory", f"{name}, {number_text(done)} ops", "MiB", dtorch=[size], x=done)
    dtorch.shutdown()


CASES: dict[str, Callable[[argparse.Namespace], Iterator[Row]]] = {
    "memory": memory,  # the first, since what others have freed would hide what it needs
    "queue": queue,
    "workers": workers,
    "live": live,
}


def panels(rows: list[Row]) -> list[Any]:
    """A panel per case."""

    def of(case: str, part: str, which: str = "dtorch") -> list[Any]:
        return _plot.curve([row for row in rows if row.case == case and part in row.what], which)

    made: list[Any] = []
    for title, what in (("client's processor time", "CPU"), ("end to end", "end to end")):
        curves = {"PyTorch": of("workers", what, "eager"), "dtorch": of("workers", what)}
        made.append(
            _plot.Lines(f"Round-robin: {title}", "workers", "us per add", curves, number_text, logy=False, floor=0)
        )
    grown = {
        "PyTorch": of("live", "add", "eager"),
        "dtorch": of("live", "add"),
        "dtorch, end to end": of("live", "end"),
    }
    made.append(_plot.Lines("Live tensors", "live", "us per add", grown, number_text, logy=False, floor=0))
    queued = {"dtorch": of("queue", "add")}
    made.append(_plot.Lines("Queued records", "queued", "us per add", queued, number_text, logy=False, floor=0))
    held = {name: of("queue", f"{name}'s") for name in ("client", "controller")}
    made.append(_plot.Lines("Queued records: memory", "queued", "MiB", held, number_text, logy=False, floor=0))
    flat = {name: of("memory", f"{name},") for name in ("client", "controller", "worker")}
    made.append(_plot.Lines("A long run: memory", "adds", "MiB", flat, number_text, logy=False, floor=0))
    return [panel for panel in made if any(panel.curves.values())]


def main() -> None:
    parser = _bench.parser(__doc__ or "", rounds=3)
    parser.add_argument("--case", action="append", choices=CASES, help="may be repeated; default: all")
    parser.add_argument("--ops", type=int, default=100_000, help="adds a round of `workers` (default 100000)")
    parser.add_argument("--most-workers", type=int, default=max(WORKERS), help="default 16")
    parser.add_argument("--count", type=int, default=1_000_000, help="live tensors, queued records (default 1000000)")
    parser.add_argument("--long", type=int, default=10_000_000, help="adds of `memory` (default 10000000)")
    args = parser.parse_args()
    table = Table()
    for case in (case for case in CASES if case in (args.case or CASES)):
        for row in CASES[case](args):
            table.add(row)
    about = _bench.describe(args.threads, args.device)
    print(about)
    table.save(args.out / "scale.csv", about)
    _plot.draw(args.out / "scale.png", "What grows", about, panels(table.rows), columns=2)


if __name__ == "__main__":
    main()

"""What waiting costs: a value's round trip, bandwidths of fetch, upload and copy beside memcpy, and the start.

item      ``x.item()`` on an idle worker: from the question to the number. PyTorch has no such trip, so there is none
          beside it; p50 and p99 of each round.
fetch     ``x.cpu()`` until the tensor is there (a large one is mapped), and until all of it has been read once as well.
upload    ``cpu.to("dtorch")`` until the worker has it.
copy      ``x.to("dtorch:1")`` until worker 1 has it: until it has summed it, less what the sum alone takes there.
          The three are beside ``clone()`` of the same CPU tensor, which copies into memory of its own as they do, and
          beside memcpy, the same copy into memory that is there already.
init      ``dtorch.init(workers=N)`` until every worker has come up, beside ``import torch``, each in a fresh process.

    dtorch bench latency [--case item --case fetch] [--rounds 9] [--largest 1073741824]
"""

from __future__ import annotations

import argparse
import functools
import statistics
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import _bench
import _plot
import torch
from _bench import KIB, MIB, Row, Table, size_text, timed

import dtorch

SIZES = (KIB, 64 * KIB, MIB, 4 * MIB, 16 * MIB, 64 * MIB, 256 * MIB, 1024 * MIB)
WORKERS = (1, 2, 8)
US = 1e6


def item(args: argparse.Namespace) -> list[Row]:
    x = torch.ones(1, device="dtorch:0")
    rows = [Row("item", p, "us") for p in ("p50", "p99")]
    for i in range(args.rounds + 1):
        times = sorted(timed(x.item)[0] * US for _ in range(args.trips))
        if i:  # the first one warms up
            rows[0].add(None, statistics.median(times))
            rows[1].add(None, times[len(times) * 99 // 100])
    return rows


# --- values on their way ---------------------------------------------------------------------------------------------

#: Gets the CPU tensor and the same on worker 0; returns seconds.
Transfer = Callable[[torch.Tensor, torch.Tensor], float]


def until_there(cpu: torch.Tensor, x: torch.Tensor) -> float:
    return timed(x.cpu)[0]


def until_read(cpu: torch.Tensor, x: torch.Tensor) -> float:
    return timed(lambda: x.cpu().sum())[0]


def until_uploaded(cpu: torch.Tensor, x: torch.Tensor) -> float:
    def work() -> torch.Tensor:
        y = cpu.to("dtorch:0")
        dtorch.synchronize(0)
        return y

    return timed(work)[0]


def until_copied(cpu: torch.Tensor, x: torch.Tensor) -> float:
    both = timed(lambda: x.to("dtorch:1").sum().item())[0]
    y = x.to("dtorch:1")
    dtorch.synchronize(1)
    alone = timed(lambda: y.sum().item())[0]
    return max(both - alone, 1e-9)


def transfers(case: str, what: str, transfer: Transfer, args: argparse.Namespace) -> list[Row]:
    """A row beside clone() and one beside memcpy for each size; fewer rounds where a round takes long."""
    rows = []
    for n in (n for n in SIZES if n <= args.largest):
        cpu = torch.rand(n // 4)
        x, there = cpu.to("dtorch:0"), torch.ones_like(cpu)
        dtorch.synchronize()
        clone, copy = (Row(case, f"{what}, {size_text(n)} / {base}", "ms", x=n) for base in ("clone", "memcpy"))
        for i in range(max(2, args.rounds // 3 if n >= 256 * MIB else args.rounds) + 1):
            cloned, _ = timed(cpu.clone)
            copied, _ = timed(functools.partial(there.copy_, cpu))
            seconds = transfer(cpu, x)
            if i:
                clone.add(cloned * 1000, seconds * 1000)
                copy.add(copied * 1000, seconds * 1000)
        rows += [clone, copy]
    return rows


def fetch(args: argparse.Namespace) -> list[Row]:
    return transfers("fetch", "there", until_there, args) + transfers("fetch", "read", until_read, args)


def upload(args: argparse.Namespace) -> list[Row]:
    return transfers("upload", "there", until_uploaded, args)


def copy(args: argparse.Namespace) -> list[Row]:
    return transfers("copy", "there", until_copied, args)


# --- the start -------------------------------------------------------------------------------------------------------


def init(args: argparse.Namespace) -> list[Row]:
    def seconds(program: str) -> float:
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
        return float(done.stdout)

    rows = []
    clock = "import time; t = time.perf_counter(); {}; print(time.perf_counter() - t)"
    for workers in [w for w in WORKERS if w <= args.most_workers]:
        row = Row("init", f"{workers} worker{'s' if workers > 1 else ''} / import torch", "s", x=workers)
        start = clock.format(f"dtorch.init(workers={workers}); dtorch.synchronize()")
        for _ in range(max(1, args.rounds // 3)):
            row.add(seconds(clock.format("import torch")), seconds("import torch, dtorch; " + start))
        rows.append(row)
    return rows


CASES: dict[str, Callable[[argparse.Namespace], list[Row]]] = {
    "item": item,
    "fetch": fetch,
    "upload": upload,
    "copy": copy,
    "init": init,
}


def panels(rows: list[Row]) -> list[Any]:
    """Bandwidth by size, ratios to clone, and the few numbers that have no size."""
    names = {("fetch", "there"), ("fetch", "read"), ("upload", "there"), ("copy", "there")}
    of = {
        f"{case}, {what}": [row for row in rows if row.case == case and row.what.startswith(what + ",")]
        for case, what in sorted(names)
    }
    speeds: dict[str, list[Any]] = {}
    ratios: dict[str, list[Any]] = {}
    for label, found in of.items():
        clones = [row for row in found if row.what.endswith("clone")]
        copies = [row for row in found if row.what.endswith("memcpy")]
        speeds.setdefault("PyTorch, clone", [bandwidth(row, row.eager) for row in clones])
        speeds.setdefault("PyTorch, memcpy", [bandwidth(row, row.eager) for row in copies])
        speeds[label] = [bandwidth(row, row.dtorch) for row in clones]
        ratios[label] = _plot.curve(copies, "ratios")
    trips = [
        (f"item, {row.what}", found) for row in rows if row.case == "item" and (found := _bench.spread(row.dtorch))
    ]
    made: list[Any] = []
    if any(ratios.values()):
        made.append(_plot.Lines("Bandwidth", "bytes", "GB/s", speeds, size_text))
        made.append(_plot.Lines("Time beside memcpy", "bytes", "dtorch / memcpy", ratios, size_text, one=True))
    made += [_plot.Bars("Round trip", "us", trips)] if trips else []
    starts = [row for row in rows if row.case == "init"]
    return made + ([_plot.ratio_bars("Start, beside import torch", starts)] if starts else [])


def bandwidth(row: Row, milliseconds: list[float]) -> tuple[float, tuple[float, float, float]]:
    """A point of a curve: bytes, and GB/s (least, median, most)."""
    assert row.x is not None
    low, middle, high = (row.x / 1e6 / ms for ms in (max(milliseconds), _bench.median(milliseconds), min(milliseconds)))
    return row.x, (low, middle, high)


def main() -> None:
    parser = _bench.parser(__doc__ or "", rounds=9)
    parser.add_argument("--case", action="append", choices=CASES, help="may be repeated; default: all")
    parser.add_argument("--trips", type=int, default=500, help="item() calls a round (default 500)")
    parser.add_argument("--largest", type=int, default=1024 * MIB, help="bytes of the largest value (default 1 GiB)")
    parser.add_argument("--most-workers", type=int, default=max(WORKERS), help="of init (default 8)")
    args = parser.parse_args()
    _bench.start(args, workers=2)
    about = _bench.describe(args.threads, args.device)
    table = Table([about])
    for case in (case for case in CASES if case in (args.case or CASES)):
        if case == "init":
            dtorch.shutdown()  # the processes to come have the machine to themselves; it is the last case
        table.add(*CASES[case](args))
    table.save(args.out / "latency.csv", about)
    _plot.draw(args.out / "latency.png", "What waiting costs", about, panels(table.rows))


if __name__ == "__main__":
    main()

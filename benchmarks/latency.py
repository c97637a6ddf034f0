"""What waiting costs: the round trip of a value, the bandwidth of fetches, uploads and copies, and the start.

item      ``x.item()`` on an idle worker: from the question to the number, p50 and p99. PyTorch has no such trip.
fetch     ``x.to_torch()`` beside ``x.clone()`` of the same CPU tensor, a memcpy into fresh memory: "there" is until
          the tensor is back (a large one is mapped), "read" until all of it has been read once as well.
upload    ``cpu.to("dtorch")`` until the worker has it, beside the same clone.
copy      ``x.to("dtorch:1")`` until worker 1 has summed it, less what the sum alone takes there.
init      ``dtorch.init(workers=N)`` until every worker has come up, beside ``import torch``, each in a fresh process.

Both sides alternate; the table has medians. Ratios above 1 mean that dtorch is faster, except for `item` and `init`.

    python benchmarks/latency.py [--case item --case fetch] [--rounds 15] [--largest 268435456]
        [--json out/latency.json]
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import dtorch

KIB, MIB = 1024, 1024 * 1024


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    """Seconds, and the result, which is let go after the clock was read."""
    start = time.perf_counter()
    result = work()
    return time.perf_counter() - start, result


def text(n: int) -> str:
    return f"{n // MIB} MiB" if n >= MIB else f"{n // KIB} KiB"


def item(args: argparse.Namespace) -> list[dict[str, Any]]:
    x = dtorch.ones(1)
    times = []
    for i in range(500 + args.rounds * 200):
        seconds, _ = timed(x.item)
        if i >= 500:
            times.append(seconds * 1e6)
    times.sort()
    p50, p99 = statistics.median(times), times[len(times) * 99 // 100]
    print(f"item(): p50 {p50:.0f} us, p99 {p99:.0f} us")
    return [{"case": "item", "p50_us": p50, "p99_us": p99}]


def sizes(args: argparse.Namespace) -> list[int]:
    return [n for n in (KIB, 64 * KIB, MIB, 16 * MIB, 256 * MIB, 1024 * MIB) if n <= args.largest]


def transfer(args: argparse.Namespace, name: str, ours: Callable[[Any, Any], float], note: str) -> list[dict[str, Any]]:
    """``ours`` gets the CPU tensor and the same on worker 0 and gives seconds; beside it a clone of the CPU tensor."""
    rows = []
    for n in sizes(args):
        cpu = torch.rand(n // 4)
        there = cpu.to("dtorch:0")
        dtorch.synchronize()
        theirs, mine = [], []
        for i in range(args.rounds + 2):
            clone, _ = timed(cpu.clone)
            seconds = ours(cpu, there)
            if i >= 2:
                theirs.append(clone)
                mine.append(seconds)
        a, b = statistics.median(theirs), statistics.median(mine)
        ratio = statistics.median(x / y for x, y in zip(theirs, mine, strict=True))
        print(f"{name:<14}{text(n):>9}  clone {a * 1e3:9.3f} ms  dtorch {b * 1e3:9.3f} ms  ratio {ratio:7.2f}  {note}")
        rows.append({"case": name, "bytes": n, "clone_s": a, "dtorch_s": b, "ratio": ratio})
    return rows


def fetch(args: argparse.Namespace) -> list[dict[str, Any]]:
    def there(cpu: Any, x: Any) -> float:
        return timed(x.to_torch)[0]

    def read(cpu: Any, x: Any) -> float:
        return timed(lambda: x.to_torch().sum())[0]

    return transfer(args, "fetch", there, "there") + transfer(args, "fetch, read", read, "clone alone is not read")


def upload(args: argparse.Namespace) -> list[dict[str, Any]]:
    def arrives(cpu: Any, x: Any) -> float:
        def work() -> Any:
            y = cpu.to("dtorch:0")
            dtorch.synchronize(0)
            return y

        return timed(work)[0]

    return transfer(args, "upload", arrives, "")


def copy(args: argparse.Namespace) -> list[dict[str, Any]]:
    def arrives(cpu: Any, x: Any) -> float:
        def work() -> float:
            return x.to("dtorch:1").sum().item()

        both = timed(work)[0]
        y = x.to("dtorch:1")
        dtorch.synchronize(1)
        alone = timed(lambda: y.sum().item())[0]
        return max(both - alone, 1e-9)

    return transfer(args, "worker to worker", arrives, "without the sum that waits for it")


def init(args: argparse.Namespace) -> list[dict[str, Any]]:
    def seconds(program: str) -> float:
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
        return float(done.stdout)

    rows = []
    clock = "import time; t = time.perf_counter(); {}; print(time.perf_counter() - t)"
    for workers in (1, 2, 8):
        theirs, mine = [], []
        start = f"dtorch.init(workers={workers}); dtorch.synchronize()"
        for _ in range(3):
            theirs.append(seconds(clock.format("import torch")))
            mine.append(seconds("import torch, dtorch; " + clock.format(start)))
        ratio = statistics.median(b / a for a, b in zip(theirs, mine, strict=True))
        print(f"init(workers={workers}): {statistics.median(mine):.2f} s, {ratio:.2f} of import torch")
        rows.append({"case": "init", "workers": workers, "seconds": statistics.median(mine), "of_import_torch": ratio})
    return rows


CASES = {"item": item, "fetch": fetch, "upload": upload, "copy": copy, "init": init}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", action="append", choices=CASES, help="may be repeated; default: all")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--largest", type=int, default=256 * MIB, help="bytes of the largest value (default 256 MiB)")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    dtorch.init(workers=2, device="cpu", threads_per_worker=1)
    dtorch.synchronize()
    rows = [row for case in args.case or CASES for row in CASES[case](args)]
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(rows, indent=2))


if __name__ == "__main__":
    main()

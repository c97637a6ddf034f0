"""What one small operator costs: a loop of adds on Shape=(1,), eager PyTorch and dtorch in alternating rounds.

Measures, per add: PyTorch's time; dtorch's client time (until the loop is through) and end-to-end time (until the last
value is here). Prints every round, then the median of the rounds' ratios; below 1 dtorch is faster. Both sides use one
thread for an operator. The machine's speed drifts, so only the ratios mean anything.

    python benchmarks/bench_op_overhead.py [--ops 200000] [--rounds 7] [--size 1] [--json out/op_overhead.json]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from pathlib import Path

import torch

import dtorch


def run(device: str, ops: int, size: int) -> tuple[float, float]:
    """Seconds until the loop is through, and until its last value is here."""
    a = torch.ones(size, device=device)
    b = torch.ones(size, device=device)
    c = a
    start = time.perf_counter()
    for _ in range(ops):
        c = a + b
    issued = time.perf_counter() - start
    c.cpu()
    return issued, time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ops", type=int, default=200_000, help="adds a round")
    parser.add_argument("--rounds", type=int, default=7, help="counted rounds, after one warm-up")
    parser.add_argument("--size", type=int, default=1, help="elements of the tensors")
    parser.add_argument("--json", type=Path, help="write the rounds to this file")
    args = parser.parse_args()

    torch.set_num_threads(1)
    dtorch.init(workers=1, device="cpu", threads_per_worker=1)
    versions = f"torch {torch.__version__}, Python {platform.python_version()}"
    print(f"{versions}, {os.cpu_count()} processors, shape ({args.size},)")
    print(f"{'us per add:':<10} {'PyTorch':>10} {'dtorch client':>15} {'end to end':>12} {'ratio':>8}")
    rounds: list[dict[str, float]] = []
    for i in range(args.rounds + 1):
        with torch.no_grad():
            _, eager = run("cpu", args.ops, args.size)
            client, total = run("dtorch", args.ops, args.size)
        if i == 0:
            continue
        row = {"eager": eager / args.ops, "client": client / args.ops, "total": total / args.ops}
        rounds.append(row)
        us = {name: value * 1e6 for name, value in row.items()}
        ratio = row["total"] / row["eager"]
        print(f"{'':<10} {us['eager']:>11.2f} {us['client']:>15.2f} {us['total']:>12.2f} {ratio:>8.2f}")
    ratios = sorted(r["total"] / r["eager"] for r in rounds)
    clients = [r["client"] / r["eager"] for r in rounds]
    print(
        f"dtorch / PyTorch, end to end: median {statistics.median(ratios):.2f} "
        f"(min {ratios[0]:.2f}, max {ratios[-1]:.2f}); client alone: median {statistics.median(clients):.2f}"
    )
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps({"ops": args.ops, "size": args.size, "seconds_per_op": rounds}, indent=2))


if __name__ == "__main__":
    main()

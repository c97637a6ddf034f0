"""``python -m tests.conformance``: run PyTorch's operator tests on dtorch and print what passed and what did not."""

from __future__ import annotations

import argparse
import re
import sys
import time
from pathlib import Path
from typing import TextIO

import torch

from . import run, samples
from .checks import CHECKS


def report(results: list[run.Result], out: TextIO) -> None:
    """One line for each thing that failed or is excluded, then the counts."""
    for result in results:
        for check, problems in result.failures.items():
            more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
            print(f"FAILED   {result.name} {check}: {problems[0]}{more}", file=out)
        for problem in result.needless:
            print(f"NEEDLESS {result.name} {problem}", file=out)
        for check, reason in result.excluded.items():
            print(f"excluded {result.name} {check}: {reason}", file=out)
    counts = {verdict: sum(r.verdict == verdict for r in results) for verdict in ("passed", "failed", "excluded")}
    print(", ".join(f"{count} {verdict}" for verdict, count in counts.items()), file=out)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.conformance", description=__doc__)
    parser.add_argument("--ops", default=".*", metavar="REGEX", help="operators whose whole name matches")
    parser.add_argument(
        "--samples", type=int, default=2, metavar="N", help="samples an operator, spread over all it has"
    )
    parser.add_argument("--dtype", default="float32", help="dtype of the samples (default: float32)")
    parser.add_argument("--checks", nargs="*", default=(), choices=list(CHECKS), help="only these (default: all)")
    parser.add_argument("--threads", type=int, default=1, help="threads of an operator, on both sides (default: 1)")
    parser.add_argument(
        "--limit", type=float, default=60, metavar="SECONDS", help="time for one operator (default: 60)"
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the report there too")
    flags = parser.parse_args()

    names = [n for n in samples.operators(getattr(torch, flags.dtype)) if re.fullmatch(flags.ops, n)]
    exclusions = run.read_exclusions()
    started = time.monotonic()
    count = 0

    def tell(result: run.Result) -> None:
        nonlocal count
        count += 1
        print(f"\r{count}/{len(names)} {result.name:60.60}", end="", file=sys.stderr, flush=True)

    results = run.run(
        names,
        exclusions=exclusions,
        dtype=flags.dtype,
        most=flags.samples,
        limit=flags.limit,
        threads=flags.threads,
        only=tuple(flags.checks),
        tell=tell,
    )
    print(f"\r{len(results)} operators in {time.monotonic() - started:.0f} s{'':60}", file=sys.stderr)
    report(results, sys.stdout)
    if flags.out:
        with flags.out.open("w") as file:
            report(results, file)
    return 1 if any(result.verdict == "failed" for result in results) else 0


if __name__ == "__main__":
    sys.exit(main())

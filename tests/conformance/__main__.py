"""``python -m tests.conformance``: run PyTorch's own tests on dtorch and print what passed and what did not."""

from __future__ import annotations

import argparse
import os
import re
import sys
import time
from pathlib import Path

from . import exclusions, report, run
from .kept import Kept
from .parts import MODULES, How, part


def _samples(text: str) -> tuple[str, int | None]:
    """``5``, ``all``, or ``float32=all``: the dtype (``*`` where none is named), and how many."""
    dtype, _, count = text.rpartition("=")
    return dtype or "*", None if count == "all" else int(count)


def _flags() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.conformance", description=__doc__)
    parser.add_argument("--parts", nargs="*", default=MODULES, choices=MODULES, help="only these (default: all)")
    parser.add_argument(
        "--names", default=".*", metavar="REGEX", help="what matches as a whole (an operator, a module)"
    )
    parser.add_argument(
        "--dtypes", nargs="*", default=("float32",), help='default: float32; "all": every one of a part'
    )
    parser.add_argument(
        "--samples",
        nargs="*",
        type=_samples,
        default=[("*", 2)],
        metavar="[DTYPE=]N",
        help='samples a name, spread over all it has, or "all" (default: 2)',
    )
    parser.add_argument("--checks", nargs="*", default=(), help="only these (default: all)")
    parser.add_argument(
        "--sets", type=int, default=os.cpu_count() or 1, help="worker sets at once (default: one a core)"
    )
    parser.add_argument("--threads", type=int, default=1, help="threads of an operator, on both sides (default: 1)")
    parser.add_argument("--limit", type=float, default=60, metavar="SECONDS", help="for one comparison (default: 60)")
    parser.add_argument(
        "--resume", type=Path, metavar="FILE", help="keep results there, and run nothing whose result is there already"
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the report there too")
    parser.add_argument("--page", type=Path, metavar="FILE", help="write the table there (docs/conformance.md)")
    return parser.parse_args()


def main() -> int:
    flags = _flags()
    most = dict(flags.samples)
    excluded = exclusions.read()
    work = []
    for name in flags.parts:
        of_part = part(name).DTYPES
        for dtype in of_part if "all" in flags.dtypes else [d for d in of_part if d in flags.dtypes]:
            how = How(dtype, most.get(dtype, most.get("*", 2)), tuple(flags.checks))
            work += run.tasks(name, how, excluded, lambda n: re.fullmatch(flags.names, n) is not None)
    started = time.monotonic()
    count = 0

    def tell(result: run.Result) -> None:
        nonlocal count
        count += 1
        end = "\n" if result.failures or not sys.stderr.isatty() else ""
        words = f"{result.part} {result.name} {result.dtype} {result.verdict}"
        print(f"\r{count}/{len(work)} {words:70.70}", end=end, file=sys.stderr, flush=True)

    results = run.run(
        work,
        exclusions=excluded,
        kept=Kept(flags.resume) if flags.resume else None,
        sets=flags.sets,
        limit=flags.limit,
        threads=flags.threads,
        tell=tell,
    )
    print(f"\r{len(results)} names in {time.monotonic() - started:.0f} s{'':70}", file=sys.stderr)
    needless = exclusions.needless(results, excluded)
    report.lines(results, needless, sys.stdout)
    if flags.out:
        with flags.out.open("w") as file:
            report.lines(results, needless, file)
    if flags.page:
        flags.page.write_text(report.page(results, needless, "python -m tests.conformance " + " ".join(sys.argv[1:])))
    return 1 if needless or any(r.verdict == "failed" for r in results) else 0


if __name__ == "__main__":
    sys.exit(main())

"""A copy between two workers, by size, beside a copy of the same bytes within one process on the same kind of device.

copied   ``x.to("dtorch:1")`` of a tensor on worker 0, again and again, until worker 1 has done all of them, per copy.
summed   the same with ``.sum()`` of each copy behind it, so that every byte has been read on the other side.

Beside it is what PyTorch takes for the bytes: on the CPU ``x.clone()``, on a GPU a device-to-device memcpy (``copy_``
into a tensor that is there), and the sum where there is one. On CPU workers a copy is a mapping and costs next to
nothing until it is read. Two workers on one GPU have one memory: the memcpy is the measure, and dtorch / PyTorch of
1.11 means nine tenths of its bandwidth.

    dtorch bench peer_copy [--rounds 9] [--largest 1073741824] [--device cuda]
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import _bench
import _plot
import torch
from _bench import MIB, Row, Side, Table, size_text

import dtorch

SIZES = (MIB // 16, MIB, 4 * MIB, 16 * MIB, 64 * MIB, 256 * MIB, 1024 * MIB)
#: A round moves about so many bytes, in at least FEW and at most MANY copies.
ROUND_BYTES, FEW, MANY = 512 * MIB, 2, 200


def per_copy(copy: Callable[[], torch.Tensor], count: int, wait: Callable[[], None]) -> float:
    """Milliseconds a copy, until all are there."""

    def work() -> torch.Tensor:
        for _ in range(count):
            last = copy()
        wait()
        return last

    seconds, _last = _bench.timed(work)
    return seconds / count * 1000


def one_size(nbytes: int, sides: dict[str, Side], args: argparse.Namespace) -> list[Row]:
    """Both rows of a size."""
    eager, ours = sides["eager"], sides["dtorch"]
    x = torch.rand(nbytes // 4).to(eager.device)
    y = x.cpu().to("dtorch:0")
    there = torch.empty_like(x)
    ours.wait()
    eager.wait()
    by = "memcpy" if args.device == "cuda" else "clone"
    plain: Callable[[], torch.Tensor] = (lambda: there.copy_(x)) if args.device == "cuda" else x.clone
    count = max(FEW, min(MANY, ROUND_BYTES // nbytes))
    works = {
        "copied": (plain, lambda: y.to("dtorch:1")),
        "summed": (lambda: plain().sum(), lambda: y.to("dtorch:1").sum()),
    }
    rows = []
    for what, (theirs, mine) in works.items():
        timed = {
            "eager": lambda work=theirs: {"ms": per_copy(work, count, eager.wait)},
            "dtorch": lambda work=mine: {"ms": per_copy(work, count, ours.wait)},
        }
        found = _bench.alternate(args.rounds, timed)
        label = f"{what}, {size_text(nbytes)} / {by}"
        rows.append(Row("peer copy", label, "ms", found["eager"]["ms"], found["dtorch"]["ms"], nbytes))
    return rows


def main() -> None:
    parser = _bench.parser(__doc__ or "", rounds=9)
    parser.add_argument("--largest", type=int, default=1024 * MIB, help="bytes of the largest tensor (default 1 GiB)")
    args = parser.parse_args()
    sides = _bench.start(args, workers=2)
    about = _bench.describe(args.threads, args.device)
    table = Table([about])
    for nbytes in (n for n in SIZES if n <= args.largest):
        table.add(*one_size(nbytes, sides, args))
    dtorch.shutdown()
    table.save(args.out / "peer_copy.csv", about)
    panels: list[_plot.Lines | _plot.Bars] = []
    for what in ("copied", "summed"):
        rows = [row for row in table.rows if row.what.startswith(what)]
        curves = {"PyTorch": _plot.curve(rows, "eager"), "dtorch": _plot.curve(rows, "dtorch")}
        panels.append(_plot.Lines(f"{what}: time", "bytes", "ms per copy", curves, size_text))
        ratios = {"dtorch": _plot.curve(rows, "ratios")}
        panels.append(_plot.Lines(f"{what}: ratio", "bytes", "dtorch / PyTorch", ratios, size_text, one=True))
    _plot.draw(args.out / "peer_copy.png", "A copy between two workers", about, panels, columns=2)


if __name__ == "__main__":
    main()

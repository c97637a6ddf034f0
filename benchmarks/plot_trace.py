"""Draws a trace of dtorch.profile() for people: what client, controller and workers did, and when.

Four parts. *The whole recording*, a lane a process: whether the client ran Python or waited, the messages that the
controller handled, the operators that each worker ran, by kind. Beside a lane stands how much of the time it was busy.
*A part of it*, magnified until single operators show, with arrows from a batch to the work that it brought. *Where the
workers' time goes*: operators by total time. And the headline: how long the client needed, and how much of its Python
ran while a worker computed, which is the time that it does not cost.

    python examples/sd3.py --preset small --workers 2 --trace out/sd3.json
    python benchmarks/plot_trace.py out/sd3.json                  # writes out/sd3.trace.png, and prints the headline
        [--out FILE.png] [--at 0] [--window 1.2]                    # milliseconds: where and how much to magnify
"""

from __future__ import annotations

import argparse
import bisect
import gzip
import json
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

try:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch
except ImportError:
    raise SystemExit("drawing needs matplotlib: pip install 'dtorch[plot]'") from None

Interval = tuple[float, float]  # from, to; milliseconds

#: Kinds of work, their colours, and the operators' names that mean them; the first that matches counts.
KINDS = {
    "matrix product": ("#3366b8", r"mm\b|linear|matmul|baddbmm|addmv|einsum"),
    "attention": ("#8a4fbf", r"attention"),
    "convolution": ("#1f9e89", r"conv"),
    "norm, softmax": ("#7ab648", r"norm\b|norm_|softmax"),
    "other operator": ("#e3b23c", r"^aten::|^\w+::"),
    "transfer, upload, value": ("#d1495b", r"^(send|receive|upload|hand out|read a file)"),
    "small change": ("#9a9a9a", r""),
}
CLIENT, WAIT, CONTROLLER = "#2b2d42", "#e4e4e4", "#f08a24"
RECORDS_SHOWN = 14  # operators in the bars


def kind_of(name: str) -> str:
    return next(kind for kind, (_, pattern) in KINDS.items() if re.search(pattern, name))


@dataclass
class Slice:
    name: str
    category: str
    start: float  # milliseconds
    end: float


@dataclass
class Process:
    """A process of the trace: its slices by lane, and what its name says."""

    name: str = ""
    place: int = 0
    lanes: dict[int, list[Slice]] = field(default_factory=lambda: defaultdict(list))
    lane_names: dict[int, str] = field(default_factory=dict)


class Trace:
    """What the file says."""

    def __init__(self, path: Path) -> None:
        with gzip.open(path, "rt") if path.suffix == ".gz" else open(path) as file:
            content = json.load(file)
        self.about: dict[str, Any] = content["otherData"]
        processes: dict[int, Process] = defaultdict(Process)
        ends: dict[str, dict[str, tuple[int, float]]] = defaultdict(dict)
        for e in content["traceEvents"]:
            process = processes[e["pid"]]
            if e["ph"] == "M":
                args = e["args"]
                if e["name"] == "process_name":
                    process.name = args["name"]
                elif e["name"] == "process_sort_index":
                    process.place = args["sort_index"]
                elif e["name"] == "thread_name":
                    process.lane_names[e["tid"]] = args["name"]
            elif e["ph"] == "X":
                at = e["ts"] / 1000
                process.lanes[e["tid"]].append(Slice(e["name"], e["cat"], at, at + e["dur"] / 1000))
            elif e["ph"] in "sf":
                ends[e["id"]][e["ph"]] = (e["pid"], e["ts"] / 1000)
        ordered = sorted(processes.values(), key=lambda process: process.place)
        self.client, self.controller, *self.workers = ordered
        places = {pid: place for place, process in enumerate(ordered) for pid in [self._pid_of(processes, process)]}
        #: Arrows: kind, (place of the process, milliseconds) where it starts and where it leads.
        self.arrows = [
            (number.partition("-")[0], (places[both["s"][0]], both["s"][1]), (places[both["f"][0]], both["f"][1]))
            for number, both in ends.items()
            if len(both) == 2
        ]
        self.block = self.about["block_us"] / 1000
        #: When the block was left and its work done; the messages behind that are the recording's own.
        self.end = max([self.block, *(s.end for worker in self.workers for s in worker.lanes.get(1, []))])

    @staticmethod
    def _pid_of(processes: dict[int, Process], wanted: Process) -> int:
        return next(pid for pid, process in processes.items() if process is wanted)

    def program(self) -> list[Slice]:
        """The slices of the client's main thread that are not around others: Python, issuing, waits."""
        return [s for s in self.client.lanes.get(1, []) if s.category in ("issue", "python", "wait")]

    def work(self, worker: Process) -> list[Slice]:
        return [s for s in worker.lanes.get(1, []) if s.category != "wait"]


# -- intervals


def union(intervals: Iterable[Interval], gap: float = 0.0) -> list[Interval]:
    """The same time without overlaps; what is not further apart than ``gap`` becomes one."""
    out: list[Interval] = []
    for start, end in sorted(intervals):
        if out and start <= out[-1][1] + gap:
            out[-1] = (out[-1][0], max(out[-1][1], end))
        else:
            out.append((start, end))
    return out


def length(intervals: Iterable[Interval]) -> float:
    return sum(end - start for start, end in intervals)


def overlap(a: Sequence[Interval], b: Sequence[Interval]) -> float:
    """How long both are under way; each is free of overlaps and in order."""
    starts = [start for start, _ in b]
    total = 0.0
    for start, end in a:
        i = max(0, bisect.bisect_right(starts, start) - 1)
        while i < len(b) and b[i][0] < end:
            total += max(0.0, min(end, b[i][1]) - max(start, b[i][0]))
            i += 1
    return total


def without(slices: Iterable[Slice], waits: Iterable[Slice]) -> list[Interval]:
    """The slices' time but for the waits inside them."""
    out: list[Interval] = []
    inner = sorted((w.start, w.end) for w in waits)
    for start, end in union((s.start, s.end) for s in slices):
        for a, b in inner[bisect.bisect_left(inner, (start, start)) :]:
            if a >= end:
                break
            out.append((start, a))
            start = b
        out.append((start, end))
    return [(a, b) for a, b in out if b > a]


def busy(trace: Trace, worker: Process) -> list[Interval]:
    lane = worker.lanes.get(1, [])
    return without(trace.work(worker), [s for s in lane if s.category == "wait"])


# -- the picture


def bars(axes: Axes, row: float, intervals: Iterable[Interval], colour: str, height: float = 0.8, **how: Any) -> None:
    axes.broken_barh([(a, b - a) for a, b in intervals], (row - height / 2, height), facecolors=colour, **how)


def lanes(axes: Axes, trace: Trace, start: float, end: float, magnified: bool) -> None:
    """One row a process, from the top: client, controller, workers. Magnified, every slice is drawn and named."""
    pixel = (end - start) / 1200
    gap = 0.0 if magnified else pixel

    def inside(slices: Iterable[Slice], waits: bool = False) -> list[Slice]:
        return [s for s in slices if s.end > start and s.start < end and (s.category == "wait") == waits]

    def paint(slices: Iterable[Slice], row: int, colour: str) -> None:
        if not magnified:
            return bars(axes, row, union(((s.start, s.end) for s in slices), gap), colour)
        narrow = [(s.start, s.end) for s in slices if s.end - s.start < 3 * pixel]
        bars(axes, row, narrow, colour)
        wide = [(s.start, s.end) for s in slices if s.end - s.start >= 3 * pixel]
        return bars(axes, row, wide, colour, edgecolor="white", linewidth=0.7)

    def write(slices: Iterable[Slice], row: int, colour: str, size: int = 7) -> None:
        for s in slices:
            a, b = max(s.start, start), min(s.end, end)
            text = s.name.removeprefix("aten::").replace("wait:", "waits for")
            letters = int((b - a) / (end - start) * 1200 / size)
            if letters > 3:
                text = text if len(text) <= letters else text[: letters - 1] + "…"
                axes.text((a + b) / 2, row, text, ha="center", va="center", fontsize=size, color=colour, clip_on=True)

    def rest(slices: list[Slice], row: int) -> None:
        intervals = union((s.start, s.end) for s in slices)
        bars(axes, row, intervals, WAIT, hatch="////", edgecolor="#bbbbbb", linewidth=0)
        write([s for s in slices if s.end - s.start > (end - start) / 8], row, "#444444", 9)

    program = inside(trace.program())
    rest(inside(trace.program(), waits=True), 0)
    paint(program, 0, CLIENT)
    messages = [s for s in trace.controller.lanes.get(1, []) if s.end > start and s.start < end]
    # A message takes microseconds: each is drawn as wide as can be seen.
    paint([Slice(s.name, s.category, s.start, max(s.end, s.start + pixel)) for s in messages], 1, CONTROLLER)
    for row, worker in enumerate(trace.workers, 2):
        here = inside(worker.lanes.get(1, []))
        for kind in reversed(KINDS):
            paint([s for s in here if kind_of(s.name) == kind], row, KINDS[kind][0])
        rest(inside(worker.lanes.get(1, []), waits=True), row)
        if not worker.lanes:
            axes.text((start + end) / 2, row, worker.name, ha="center", va="center", color="#d1495b", fontsize=9)
        if magnified:
            write([s for s in here if not s.name.startswith("receive")], row, "white")  # its wait has a name itself
    if magnified:
        write(program, 0, "white")
        write([s for s in messages if not s.name.startswith("BATCH")], 1, "black")  # those stand inside RECORDS
    axes.set_xlim(start, end)
    axes.set_ylim(1.5 + len(trace.workers), -0.5)
    labels = ["client\n(Python)", "controller", *(worker.name.partition(":")[0] for worker in trace.workers)]
    axes.set_yticks(range(len(labels)), labels)
    axes.tick_params(axis="y", length=0)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)


def arrows(axes: Axes, trace: Trace, start: float, end: float) -> None:
    """From a batch to the work that it brought, and from a worker's tensor to who receives it."""
    for kind, (row, at), (to_row, to) in trace.arrows:
        if not start <= at <= end or kind == "value":
            continue
        colour = "#d1495b" if kind == "transfer" else "#666666"
        how = {"arrowstyle": "-|>", "color": colour, "linewidth": 0.9, "shrinkA": 0, "shrinkB": 0}
        down = 0.4 if to_row > row else -0.4
        if to <= end:
            axes.annotate("", (to, to_row - down), (at, row + down), arrowprops=how, zorder=5)
        else:  # the work comes later: the arrow leads out of the picture, and says how far
            x, y = at + (end - start) * 0.012, to_row - down
            axes.annotate("", (x, y), (at, row + down), arrowprops=how | {"linestyle": "--"}, zorder=5)
            axes.text(x, y + 0.08, f" run {to - at:,.0f} ms later", fontsize=7, color="#333333", va="top", zorder=6)


def window_of(trace: Trace, at: float | None, window: float) -> float:
    """Where to magnify: given, or where a batch was sent in the middle of the longest time of Python without a wait."""
    if at is None:
        longest = max(
            union(((s.start, s.end) for s in trace.program() if s.category != "wait"), 0.5), key=_long, default=(0, 0)
        )
        middle = sum(longest) / 2
        batches = [start for kind, (_, start), _ in trace.arrows if kind == "work"]
        at = min(batches, key=lambda start: abs(start - middle), default=middle) - window / 3
    return max(0.0, min(at, trace.end - window))


def _long(interval: Interval) -> float:
    return interval[1] - interval[0]


def totals(axes: Axes, trace: Trace) -> None:
    """Operators by total time, the workers' parts side by side."""
    spent: dict[str, float] = defaultdict(float)
    calls: dict[str, int] = defaultdict(int)
    for worker in trace.workers:
        waits = [s for s in worker.lanes.get(1, []) if s.category == "wait"]
        for s in trace.work(worker):
            spent[s.name] += length([(s.start, s.end)] if s.category == "op" else without([s], waits))
            calls[s.name] += 1
    shown = sorted(spent, key=lambda name: -spent[name])[:RECORDS_SHOWN]
    rows = range(len(shown))
    axes.barh(rows, [spent[name] for name in shown], color=[KINDS[kind_of(name)][0] for name in shown])
    names = [name.removeprefix("aten::") for name in shown]
    axes.set_yticks(rows, [name if len(name) < 28 else name[:27] + "…" for name in names], fontsize=8)
    for row, name in zip(rows, shown, strict=True):
        axes.text(spent[name], row, f"  {calls[name]:,} times", va="center", fontsize=7, color="#555555")
    axes.invert_yaxis()
    axes.set_xlabel("milliseconds")
    axes.margins(x=0.2)
    axes.set_title("where the workers' time goes", loc="left", fontsize=10)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


@dataclass(frozen=True)
class Figures:
    """The headline's numbers, in milliseconds."""

    end: float
    client: float  # Python and issuing of the main thread
    hidden: float  # of that, while a worker computed
    waited: float
    workers: list[float]  # computing
    any_worker: float  # at least one computing


def figures(trace: Trace) -> Figures:
    program = union((s.start, s.end) for s in trace.program() if s.category != "wait")
    computing = [union(busy(trace, worker)) for worker in trace.workers]
    any_worker = union(i for intervals in computing for i in intervals)
    waited = length((s.start, s.end) for s in trace.program() if s.category == "wait")
    return Figures(
        trace.end,
        length(program),
        overlap(program, any_worker),
        waited,
        [length(c) for c in computing],
        length(any_worker),
    )


def draw(trace: Trace, out: Path, at: float | None, window: float) -> Figures:
    numbers = figures(trace)
    rows = 2 + len(trace.workers)
    figure = Figure(figsize=(15, 3.2 + 1.05 * rows + 3.2), layout="constrained")
    whole, near, below = figure.subplots(3, 1, height_ratios=(rows, rows, 3.6))
    figure.suptitle(headline(numbers), x=0.01, ha="left", fontsize=14, fontweight="bold")

    lanes(whole, trace, 0, trace.end, magnified=False)
    whole.set_title("the whole recording", loc="left", fontsize=10)
    shares = [
        numbers.client,
        length(union((s.start, s.end) for s in trace.controller.lanes.get(1, []))),
        *numbers.workers,
    ]
    for row, share in enumerate(shares):
        text = f"busy {share / trace.end:.1%}\n{share:,.1f} ms"
        whole.annotate(
            text, (1.004, row), xycoords=("axes fraction", "data"), va="center", fontsize=9, annotation_clip=False
        )

    at = window_of(trace, at, window)
    lanes(near, trace, at, at + window, magnified=True)
    arrows(near, trace, at, at + window)
    near.set_title(f"{window:g} ms of it, magnified: each slice is an operator, issued or run", loc="left", fontsize=10)
    near.set_xlabel("milliseconds")
    whole.axvspan(at, at + window, color="#d1495b", alpha=0.25, zorder=4)
    totals(below, trace)

    seen = {kind_of(s.name) for worker in trace.workers for s in trace.work(worker)}
    keys = [
        Patch(color=CLIENT, label="client: Python"),
        Patch(facecolor=WAIT, edgecolor="#bbbbbb", hatch="////", label="waits"),
    ]
    keys += [Patch(color=CONTROLLER, label="controller: a message")]
    keys += [Patch(color=colour, label=kind) for kind, (colour, _) in KINDS.items() if kind in seen]
    below.legend(handles=keys, loc="lower right", frameon=False, fontsize=9, ncols=2)
    figure.text(0.995, 0.005, trace.about["made by"], ha="right", fontsize=7, color="#777777")
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, dpi=110)
    return numbers


def headline(n: Figures) -> str:
    hidden = f"{n.hidden / n.client:.0%}" if n.client else "none"
    return (
        f"The client needed {n.client:,.1f} ms of {n.end:,.1f} ms ({n.client / n.end:.1%}), "
        f"{hidden} of it while a worker computed; workers computed {n.any_worker / n.end:.1%} of the time"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path, help="a file that dtorch.profile() wrote")
    parser.add_argument("--out", type=Path, help="the picture; default: TRACE.png beside it, as NAME.trace.png")
    parser.add_argument("--at", type=float, help="where to magnify, in milliseconds; default: a batch of busy Python")
    parser.add_argument("--window", type=float, default=1.2, help="how much, in milliseconds")
    args = parser.parse_args()
    out = args.out or args.trace.with_name(args.trace.name.split(".")[0] + ".trace.png")
    trace = Trace(args.trace)
    print(headline(draw(trace, out, args.at, args.window)))
    print(f"picture: {out}")


if __name__ == "__main__":
    main()

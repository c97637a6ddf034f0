"""Pictures of the benchmarks' figures: panels of lines or bars, saved as one PNG."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from _bench import Row, number, spread

#: PyTorch is gray wherever it is seen; the others get these, and a label has one color in all panels.
GRAYS = ("#777777", "#222222", "#bbbbbb")
CYCLE = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#17becf")


@dataclass
class Lines:
    """Curves over x: {label: [(x, (min, median, max)), ...]}; the band is min to max."""

    title: str
    xlabel: str
    ylabel: str
    curves: Mapping[str, Sequence[tuple[float, tuple[float, float, float]]]]
    xticks: Callable[[float], str] | None = None  # the text of an x; the points are then equally far apart
    logy: bool = True
    one: bool = False  # a line where both sides are equal
    floor: float | None = None  # the lower end of y


@dataclass
class Bars:
    """Horizontal bars: (label, (min, median, max)), with a whisker from min to max."""

    title: str
    xlabel: str
    bars: Sequence[tuple[str, tuple[float, float, float]]]
    one: bool = False
    colors: Sequence[str] = field(default_factory=list)


def ratio_bars(title: str, rows: Sequence[Row], one: bool = True) -> Bars:
    """The ratios of rows that have some."""
    known = [(f"{row.case}: {row.what}", found) for row in rows if (found := spread(row.ratios))]
    return Bars(title, "dtorch / PyTorch", known, one)


def curve(rows: Sequence[Row], which: str) -> list[tuple[float, tuple[float, float, float]]]:
    """Rows as points; ``which`` is "eager", "dtorch" or "ratios"."""
    return [(row.x, found) for row in rows if row.x is not None and (found := spread(getattr(row, which)))]


def draw(path: Path, title: str, about: str, panels: Sequence[Lines | Bars], columns: int = 1) -> None:
    """Save the panels, ``columns`` in a row; says so and does nothing where matplotlib is missing."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        print(f"{path} was not drawn: matplotlib is missing (pip install 'dtorch[plot]')")
        return
    count = -(-len(panels) // columns)
    heights = [max(_height(panel) for panel in panels[i * columns : (i + 1) * columns]) for i in range(count)]
    width = 10.0 if columns == 1 else max(10.0, 4.4 * columns)
    figure = Figure(figsize=(width, sum(heights) + 0.9), layout="constrained")
    figure.suptitle(title, fontsize=13)
    figure.supxlabel(about, fontsize=7, color="#555555")
    axes = figure.subplots(count, columns, squeeze=False, gridspec_kw={"height_ratios": heights}).flatten()
    colors = _colors(panels)
    for ax, panel in zip(axes, panels, strict=False):
        _lines(ax, panel, colors) if isinstance(panel, Lines) else _bars(ax, panel)
    for ax in axes[len(panels) :]:
        ax.set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=90)
    print(f"saved {path}")


def _height(panel: Lines | Bars) -> float:
    """Inches."""
    return 3.4 if isinstance(panel, Lines) else 0.9 + 0.27 * len(panel.bars)


def _colors(panels: Sequence[Lines | Bars]) -> dict[str, str]:
    """A color for each label of a curve."""
    labels = dict.fromkeys(label for panel in panels if isinstance(panel, Lines) for label in panel.curves)
    grays = [label for label in labels if label.startswith("PyTorch")]
    others = [label for label in labels if label not in grays]
    return {
        **dict(zip(grays, itertools.cycle(GRAYS), strict=False)),
        **dict(zip(others, itertools.cycle(CYCLE), strict=False)),
    }


def _lines(ax: Any, panel: Lines, colors: Mapping[str, str]) -> None:
    xs = sorted({point[0] for points in panel.curves.values() for point in points})
    places = {x: i if panel.xticks else x for i, x in enumerate(xs)}
    for label, points in panel.curves.items():
        if not points:
            continue
        x = [places[point[0]] for point in points]
        low, middle, high = zip(*(point[1] for point in points), strict=True)
        color = colors[label]
        ax.plot(x, middle, marker="o", markersize=3.5, linewidth=1.4, label=label, color=color)
        ax.fill_between(x, low, high, color=color, alpha=0.18, linewidth=0)
    if panel.logy:
        ax.set_yscale("log")
        ax.yaxis.set_major_formatter(_plain)
        low, high = ax.get_ylim()
        if high / low < 30:  # the decades alone would leave one label or none
            ax.yaxis.set_minor_formatter(_plain)
            ax.tick_params(axis="y", which="minor", labelsize=7)
    if panel.floor is not None:
        ax.set_ylim(bottom=panel.floor)
    if panel.xticks:
        ax.set_xticks(range(len(xs)), [panel.xticks(x) for x in xs], rotation=45, ha="right", fontsize=8)
    _finish(ax, panel, "y")
    ax.set(ylabel=panel.ylabel)
    if len(panel.curves) > 1:
        ax.legend(fontsize=8, frameon=False)


def _plain(value: float, _position: int) -> str:
    return f"{value:g}"


def _bars(ax: Any, panel: Bars) -> None:
    labels = [label for label, _ in panel.bars]
    middles = [found[1] for _, found in panel.bars]
    errors = [
        [middle - found[0] for middle, (_, found) in zip(middles, panel.bars, strict=True)],
        [found[2] - middle for middle, (_, found) in zip(middles, panel.bars, strict=True)],
    ]
    colors = list(panel.colors) or CYCLE[0]
    drawn = ax.barh(range(len(labels)), middles, xerr=errors, color=colors, height=0.7, ecolor="#333333", capsize=2)
    ax.bar_label(drawn, labels=[number(value) for value in middles], padding=4, fontsize=8)
    ax.set_yticks(range(len(labels)), labels, fontsize=8)
    ax.invert_yaxis()
    ax.margins(x=0.12, y=0.02)
    _finish(ax, panel, "x")


def _finish(ax: Any, panel: Lines | Bars, axis: str) -> None:
    if panel.one:
        (ax.axhline if axis == "y" else ax.axvline)(1, color="black", linestyle=":", linewidth=1)
    ax.set_title(panel.title, fontsize=10)
    ax.set_xlabel(panel.xlabel, fontsize=9)
    ax.grid(True, axis=axis, alpha=0.3)
    for side in ("top", "right"):
        ax.spines[side].set_visible(False)

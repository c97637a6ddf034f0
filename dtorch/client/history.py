"""A worker's allocation log turned into a file: the timeline, the peak and who held it, and a picture of it."""

from __future__ import annotations

import json
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dtorch.client.failures import line_of


def save(path: Path, before: Sequence[Any], rows: Sequence[Sequence[int]]) -> None:
    """Write ``path`` (JSON) and the picture beside it.

    ``before`` is what was held when the recording began, rows (storage, bytes, tensor, site); ``rows`` are (record
    number, storage, bytes or -1 when freed, site, nanoseconds).
    """
    live: dict[int, tuple[int, int]] = {storage: (size, site) for storage, size, _, site in before}
    held = sum(size for size, _ in live.values())
    peak, at_peak = held, dict(live)
    start = rows[0][4] if rows else 0
    timeline: list[list[Any]] = [[0, held, 0, 0, ""]]
    for _, storage, size, site, ns in rows:
        known = live.pop(storage, (0, 0))
        if size >= 0:
            live[storage] = (size, site)
        change = max(size, 0) - known[0]
        held += change
        timeline.append([(ns - start) // 1000, held, storage, change, line_of(site or known[1])])
        if held > peak:
            peak, at_peak = held, dict(live)
    largest = sorted(at_peak.items(), key=lambda item: -item[1][0])
    holders = [{"storage": storage, "bytes": size, "line": line_of(site)} for storage, (size, site) in largest]
    path.write_text(json.dumps({"peak_bytes": peak, "peak": holders, "timeline": timeline}))
    _plot(path.with_suffix(".png"), timeline, holders, peak)


def _plot(path: Path, timeline: list[list[Any]], holders: list[dict[str, Any]], peak: int) -> None:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        warnings.warn(f"{path.name} was not drawn: matplotlib is not installed (pip install matplotlib)", stacklevel=6)
        return
    figure = Figure(figsize=(10, 6), layout="constrained")
    axes, names = figure.subplots(2, 1, height_ratios=(3, 1))
    axes.step([row[0] / 1000 for row in timeline], [row[1] / 2**20 for row in timeline], where="post")
    axes.axhline(peak / 2**20, linestyle=":", color="gray")
    axes.set(xlabel="milliseconds", ylabel="MiB held by tensors", title=f"peak {peak / 2**20:.1f} MiB")
    names.axis("off")
    text = [f"{h['bytes'] / 2**20:9.2f} MiB  {h['line'] or 'a line that is not known'}" for h in holders[:6]]
    names.text(0, 1, "at the peak:\n" + "\n".join(text), va="top", family="monospace", fontsize=8)
    figure.savefig(path)

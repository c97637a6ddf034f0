"""A Chrome trace file, read and checked against the format: every event, every lane, every arrow."""

from __future__ import annotations

import bisect
import gzip
import json
import math
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

Json = dict[str, Any]


class Chrome:
    """The file's events; making it checks them."""

    def __init__(self, path: Path) -> None:
        with gzip.open(path, "rt") if path.suffix == ".gz" else open(path) as file:
            content = json.load(file)
        assert content.keys() == {"traceEvents", "displayTimeUnit", "otherData"}
        self.about: Json = content["otherData"]
        self.events: list[Json] = content["traceEvents"]
        for e in self.events:
            self._check_event(e)
        self.names: dict[int, str] = {
            e["pid"]: e["args"]["name"] for e in self.events if e["ph"] == "M" and e["name"] == "process_name"
        }
        self.slices = [e for e in self.events if e["ph"] == "X"]
        self._check_lanes()
        self._check_arrows()
        self._check_requests()

    def of(self, process: str, *categories: str, tid: int | None = None) -> list[Json]:
        """A process's slices in order of time, of some categories or all."""
        (pid,) = (pid for pid, name in self.names.items() if name.startswith(process))
        wanted = [e for e in self.slices if e["pid"] == pid and (not categories or e["cat"] in categories)]
        return sorted((e for e in wanted if tid in (None, e["tid"])), key=lambda e: e["ts"])

    def named(self, process: str, name: str) -> list[Json]:
        return [e for e in self.of(process) if e["name"] == name]

    def arrows(self, kind: str) -> list[tuple[Json, Json]]:
        ends: defaultdict[str, dict[str, Json]] = defaultdict(dict)
        for e in self.events:
            if e["ph"] in "sf" and e["name"] == kind:
                ends[e["id"]][e["ph"]] = e
        return [(both["s"], both["f"]) for both in ends.values() if len(both) == 2]

    @staticmethod
    def _check_event(e: Json) -> None:
        fields = {"ph", "pid", "tid", "name"}
        extra = {
            "M": {"args"},
            "X": {"ts", "dur", "cat", "args"},
            "b": {"ts", "cat", "id", "args"},
            "e": {"ts", "cat", "id", "args"},
            "s": {"ts", "cat", "id"},
            "f": {"ts", "cat", "id", "bp"},
        }[e["ph"]]
        assert e.keys() == fields | extra, e
        assert isinstance(e["pid"], int) and isinstance(e["tid"], int)
        assert isinstance(e["name"], str) and e["name"]
        assert isinstance(e.get("args", {}), dict)
        assert e.get("ts", 0) >= 0, "times count from the beginning of the recording"
        assert e.get("dur", 0) >= 0

    def _check_lanes(self) -> None:
        """Every lane has a name, and its slices lie side by side or one inside the other."""
        lanes: defaultdict[tuple[int, int], list[tuple[int, int, str]]] = defaultdict(list)
        for e in self.slices:
            start = round(e["ts"] * 1000)  # whole nanoseconds
            lanes[e["pid"], e["tid"]].append((start, start + round(e["dur"] * 1000), e["name"]))
        titled = {(e["pid"], e["tid"]) for e in self.events if e["name"] == "thread_name"}
        assert lanes.keys() <= titled
        for lane in lanes.values():
            around: list[tuple[int, int, str]] = []
            for start, end, name in sorted(lane, key=lambda s: (s[0], -s[1])):
                while around and around[-1][1] <= start:
                    around.pop()
                assert not around or end <= around[-1][1], f"{name} goes beyond the end of {around[-1][2]}"
                around.append((start, end, name))

    def _check_arrows(self) -> None:
        """Each end hangs on a slice of its lane, and no arrow leads back in time."""
        for kind in ("batch", "work", "transfer", "value"):
            for start, end in self.arrows(kind):
                assert start["ts"] <= end["ts"], kind
        lanes: defaultdict[tuple[int, int], list[tuple[float, float]]] = defaultdict(list)
        for s in self.slices:
            lanes[s["pid"], s["tid"]].append((s["ts"], s["ts"] + s["dur"]))
        for lane in lanes.values():
            lane.sort()
        for e in self.events:
            if e["ph"] in "sf":
                lane = lanes[e["pid"], e["tid"]]
                before = bisect.bisect_right(lane, (e["ts"], math.inf))
                assert any(end >= e["ts"] for _, end in reversed(lane[:before])), e

    def _check_requests(self) -> None:
        begun = Counter(e["id"] for e in self.events if e["ph"] == "b")
        assert begun == Counter(e["id"] for e in self.events if e["ph"] == "e")
        assert set(begun.values()) <= {1}

"""Results in a file, a line each, so that a run of hours can be interrupted and go on where it was."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import torch

from .parts import Found
from .run import Result, Task


class Kept:
    """A result counts for the very same task only: part, name, dtype, number of samples, checks, tolerance and torch.

    To have something run again, after a fault of it was mended, take its line out. A result tells the commit that it is
    of, and the page lists them.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._known: dict[str, dict[str, Any]] = {}
        if path.exists():
            for line in path.read_text().splitlines():
                entry = json.loads(line)
                self._known[entry["task"]] = entry["result"]

    def get(self, task: Task) -> Result | None:
        """The result of the task, without what is excluded of it."""
        known = self._known.get(_key(task))
        return Result(**{**known, "found": Found(**known["found"])}) if known else None

    def put(self, task: Task, result: Result) -> None:
        """Keep it; reasons are not kept, for their file may change."""
        facts = {key: value for key, value in dataclasses.asdict(result).items() if key != "excluded"}
        with self._path.open("a") as file:
            file.write(json.dumps({"task": _key(task), "result": facts}) + "\n")


def _key(task: Task) -> str:
    return json.dumps({**dataclasses.asdict(task), "torch": torch.__version__})

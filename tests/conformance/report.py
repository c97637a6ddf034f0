"""What a run found: as lines to read, and as the table that docs/conformance.md keeps."""

from __future__ import annotations

import platform
import time
from collections import Counter, defaultdict
from collections.abc import Iterable
from typing import TextIO

import torch

from .parts import part
from .run import Result

VERDICTS = ("passed", "failed", "excluded")


def counts(results: Iterable[Result]) -> dict[str, int]:
    """How many names have which verdict."""
    found = dict.fromkeys(VERDICTS, 0)
    for result in results:
        found[result.verdict] += 1
    return found


def lines(results: list[Result], needless: list[str], out: TextIO) -> None:
    """One line for each thing that failed or is excluded, then the counts."""
    for r in results:
        for check, problems in r.failures.items():
            more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
            print(f"FAILED   {r.part} {r.name} {check} {r.dtype}: {problems[0]}{more}", file=out)
        for check, reason in r.excluded.items():
            print(f"excluded {r.part} {r.name} {check} {r.dtype}: {reason}", file=out)
    for problem in needless:
        print(f"NEEDLESS {problem}", file=out)
    print(", ".join(f"{count} {verdict}" for verdict, count in counts(results).items()), file=out)


def page(results: list[Result], needless: list[str], command: str) -> str:
    """docs/conformance.md."""
    groups: dict[tuple[str, str], list[Result]] = defaultdict(list)
    for r in results:
        groups[r.part, r.dtype].append(r)
    text = [
        "# PyTorch's own tests, run on dtorch",
        "",
        "What PyTorch tests itself with (`torch.testing._internal`), done on a dtorch worker and by eager PyTorch on",
        "the CPU, and compared: values bit by bit, strides, dtypes, `requires_grad`, aliases, version counters and the",
        "types of exceptions. `tests/conformance/__init__.py` says how.",
        "",
        f"Written by `{command}`",
        f"on {time.strftime('%Y-%m-%d')} with torch {torch.__version__} and Python {platform.python_version()}.",
        f"The names took {sum(r.seconds for r in results) / 60:.0f} minutes of one worker set. They ran",
        f"{_when(results)}.",
        "",
        "| part | dtype | names | samples run | of | comparisons | passed | failed | excluded |",
        "|---|---|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for (part_name, dtype), of_group in groups.items():
        c = counts(of_group)
        samples, of = (sum(getattr(r.found, field) for r in of_group) for field in ("samples", "of"))
        comparisons = sum(r.found.comparisons for r in of_group)
        text.append(
            f"| {part_name} | {dtype} | {len(of_group)} | {samples:,} | {'all' if samples == of else f'{of:,}'} "
            f"| {comparisons:,} | {c['passed']} | {c['failed']} | {c['excluded']} |"
        )
    text += [
        "",
        "A name counts as excluded when only what is excluded failed of it, and as failed when anything else did.",
        "",
    ]
    text += [f"- **{name}**: {_first_line(part(name).__doc__)}" for name in dict.fromkeys(p for p, _ in groups)]
    text += ["", "## Failed", ""]
    text += [
        f"- {r.part} `{r.name}` {r.dtype}, {check}: {problems[0]}"
        for r in results
        for check, problems in r.failures.items()
    ] or ["Nothing."]
    if needless:
        text += ["", "## Excluded without need", "", *(f"- {problem}" for problem in needless)]
    text += ["", "## Excluded", "", "| part | name | what | dtypes | reason |", "|---|---|---|---|---|"]
    merged: dict[tuple[str, str, str, str], list[str]] = defaultdict(list)
    for r in results:
        for check, reason in r.excluded.items():
            merged[r.part, r.name, check, reason].append(r.dtype)
    text += [
        f"| {part_name} | `{name}` | {check} | {', '.join(dtypes)} | {reason} |"
        for (part_name, name, check, reason), dtypes in merged.items()
    ]
    return "\n".join(text) + "\n"


def _when(results: list[Result]) -> str:
    """Days and commits."""
    found = Counter((r.day, r.commit) for r in results)
    return "; ".join(
        f"on {day} at commit {commit or 'unknown'} ({count})" for (day, commit), count in sorted(found.items())
    )


def _first_line(text: str | None) -> str:
    return (text or "").strip().split("\n")[0]

"""What the memory benchmarks share: contenders in processes of their own, their counters, tables and plots.

A **contender** is "eager" (plain PyTorch on the CPU) or "dtorch" (one worker), and each runs a case in a fresh process
that prints one line of JSON. Both count alike: the allocator that dtorch's workers give to PyTorch is installed in the
eager process too. It counts every byte that PyTorch's CPU kernels ask it for: tensors and operators' workspace. What
is taken by other ways (oneDNN's own buffers, Python's objects) shows in the resident size only.

The resident size of a contender is the sum over all its processes (for dtorch: client, controller, fork server, worker)
of how far VmHWM, the kernel's high-water mark of resident pages, rises above the VmRSS at the beginning; free pages are
given back before. For dtorch that adds peaks that may not coincide, and counts a page that two processes map twice: it
never flatters dtorch.

The parent imports neither torch nor dtorch.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

MIB = 1024 * 1024
CONTENDERS = ("eager", "dtorch")
T = TypeVar("T")

# --- inside a contender's process ------------------------------------------------------------------------------------


class Engine:
    """One contender's device and counters. Make it before any tensor, and before importing what makes tensors."""

    def __init__(self, name: str, threads: int) -> None:
        import torch

        self.name = name
        self.eager = name == "eager"
        self.device = "cpu" if self.eager else "dtorch:0"
        torch.set_num_threads(threads)
        if self.eager:  # the parent has set DTORCH_ROLE=worker: importing dtorch registers no device
            from dtorch import _worker

            _worker.install_allocator()
            self._worker = _worker
        else:
            import dtorch

            dtorch.init(workers=1, device="cpu", threads_per_worker=threads)
            dtorch.synchronize()
            self._dtorch = dtorch

    def stats(self) -> dict[str, int]:
        """Counters in bytes: allocated, peak, reserved, peak_reserved and, on dtorch, more. Waits."""
        return dict(self._worker.allocator_stats() if self.eager else self._dtorch.worker_stats(0))

    def reset(self) -> None:
        """Start the peaks anew from what is held now. Waits."""
        self._worker.reset_peaks() if self.eager else self._dtorch.reset_peak_memory_stats(0)

    def trim(self) -> None:
        """Give free pages back, so that the resident size begins without what earlier work has touched. Waits."""
        self._worker.pool_trim() if self.eager else self._dtorch.empty_cache()

    def wait(self) -> None:
        """Until everything issued is computed."""
        if not self.eager:
            self._dtorch.synchronize(0)


@dataclass
class Reading:
    """What one piece of work needed, in bytes. The peaks and the base are of the allocator."""

    base: int  # allocated when it began
    peak: int
    reserved: int  # reserved when it began, free pages having been given back
    peak_reserved: int
    resident: int  # see the module's docstring
    donations: int

    @property
    def above(self) -> int:
        """The peak above what was there at the beginning."""
        return self.peak - self.base


def measure(engine: Engine, work: Callable[[], T]) -> tuple[Reading, T]:
    """Do the work, wait for it, and read the counters while its result is held."""
    gc.collect()
    engine.wait()
    engine.trim()
    engine.reset()
    before = engine.stats()
    processes = [os.getpid(), *descendants(os.getpid())]
    rss = {pid: status_bytes(pid, "VmRSS") for pid in processes}
    for pid in processes:
        Path(f"/proc/{pid}/clear_refs").write_text("5")  # VmHWM starts anew (proc(5))
    result = work()
    engine.wait()
    resident = sum(status_bytes(pid, "VmHWM") - rss[pid] for pid in processes)
    after = engine.stats()
    donations = after.get("donations", 0) - before.get("donations", 0)
    return Reading(
        before["allocated"], after["peak"], before["reserved"], after["peak_reserved"], resident, donations
    ), result


def status_bytes(pid: int, field: str) -> int:
    """A field of /proc/PID/status that is given in kB."""
    return _kilobytes(Path(f"/proc/{pid}/status"), field)


def rollup_bytes(*fields: str) -> int:
    """The sum of fields of this process's /proc/self/smaps_rollup: Pss, Private_Dirty, ..."""
    return sum(_kilobytes(Path("/proc/self/smaps_rollup"), field) for field in fields)


def _kilobytes(file: Path, field: str) -> int:
    for line in file.read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise LookupError(f"{file} has no {field}")


def descendants(pid: int) -> list[int]:
    """Children of a process, their children, and so on."""
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in (task / "children").read_text().split():
            found += [int(child), *descendants(int(child))]
    return found


def versions() -> dict[str, str]:
    """Of Python and of the libraries that this process has imported."""
    names = ("torch", "diffusers", "transformers", "dtorch")
    found = {name: str(sys.modules[name].__version__) for name in names if name in sys.modules}
    return {"python": platform.python_version(), **found}


# --- in the parent ---------------------------------------------------------------------------------------------------


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags that every memory benchmark has."""
    parser.add_argument("--threads", type=int, default=1, help="of one operator, on both sides (default 1)")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--plot", type=Path, help="draw the figures into this file (PNG; needs matplotlib)")
    parser.add_argument("--contender", choices=CONTENDERS, help=argparse.SUPPRESS)  # we are one; the parent says which


def run_contender(contender: str, *arguments: str) -> Any:
    """Run this script again as a contender; returns what it printed, from JSON."""
    environment = {name: value for name, value in os.environ.items() if name != "DTORCH_ROLE"}
    if contender == "eager":
        environment["DTORCH_ROLE"] = "worker"
    command = [sys.executable, sys.argv[0], "--contender", contender, *arguments]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise SystemExit(f"{contender} ended with status {done.returncode}: {' '.join(command)}")
    return json.loads(done.stdout.splitlines()[-1])


def machine(threads: int) -> dict[str, Any]:
    """What the figures were measured on."""
    cpus = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.partition(":")[2].strip() for line in cpus if line.startswith("model name")), platform.machine())
    return {
        "processor": model,
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(_kilobytes(Path("/proc/meminfo"), "MemTotal") / 2**30, 1),
        "kernel": platform.release(),
        "threads": threads,
    }


def describe(about: dict[str, Any], used: dict[str, str]) -> str:
    """The machine and the versions in one line."""
    libraries = ", ".join(f"{name} {version}" for name, version in used.items())
    hardware = f"{about['processor']}, {about['cores']} cores, {about['memory_gib']} GiB"
    return f"{hardware}, {about['threads']} threads an operator; {libraries}"


def alternating(rounds: int) -> Iterable[tuple[int, str]]:
    """(round, contender), the order changing from round to round."""
    for i in range(rounds):
        for contender in CONTENDERS if i % 2 == 0 else CONTENDERS[::-1]:
            yield i, contender


def median(values: Sequence[float]) -> float:
    """The median, 0 for nothing."""
    return statistics.median(values) if values else 0.0


def save(path: Path, figures: dict[str, Any]) -> None:
    """Write JSON, making the folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(figures, indent=2) + "\n")


def plot(path: Path, title: str, bars: Sequence[tuple[str, float]], unit: str) -> None:
    """Draw horizontal bars, (label, value) each, with a line at 1."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 1 + 0.3 * len(bars)), layout="constrained")
    axes = figure.subplots()
    drawn = axes.barh([label for label, _ in bars], [value for _, value in bars], color="tab:blue")
    axes.bar_label(drawn, fmt="%.2f", padding=3, fontsize=8)
    axes.axvline(1, color="gray", linestyle=":")
    axes.invert_yaxis()
    axes.set(xlabel=unit, title=title)
    axes.margins(x=0.1)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)

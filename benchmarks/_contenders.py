"""Contenders in processes of their own, and what memory they need: counted alike on both sides.

A **contender** is "eager" (plain PyTorch) or "dtorch" (one worker), and each runs a case in a fresh process that prints
one line of JSON. Both count alike. On the CPU the allocator that dtorch's workers give to PyTorch is installed in the
eager process too. It counts every byte that PyTorch's CPU kernels ask it for: tensors and operators' workspace. What
is taken by other ways (oneDNN's own buffers, Python's objects) shows in the resident size only. On a GPU both have
PyTorch's own caching allocator, which counts the same; the CUDA context is in neither's figure.

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
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

from _bench import SIDES, kilobytes

T = TypeVar("T")

# --- inside a contender's process ------------------------------------------------------------------------------------


class Engine:
    """One contender's device and counters. Make it before any tensor, and before importing what makes tensors."""

    def __init__(self, name: str, threads: int, device: str = "cpu") -> None:
        import torch

        self.name = name
        self.eager = name == "eager"
        self.device = device if self.eager else "dtorch:0"
        torch.set_num_threads(threads)
        memory: _Memory
        eager = _EagerCuda if device == "cuda" else _EagerCpu
        memory = eager() if self.eager else _Dtorch(device, threads)
        #: Counters in bytes: allocated, peak, reserved, peak_reserved and, on dtorch, more. Waits.
        self.stats = memory.stats
        #: Start the peaks anew from what is held now. Waits.
        self.reset = memory.reset
        #: Give free memory back, so that the resident size begins without what earlier work has touched. Waits.
        self.trim = memory.trim
        #: Until everything issued is computed.
        self.wait = memory.wait


class _Memory(Protocol):
    """Where a contender's counters are."""

    def stats(self) -> dict[str, int]: ...
    def reset(self) -> None: ...
    def trim(self) -> None: ...
    def wait(self) -> None: ...


class _EagerCpu:
    """The parent has set DTORCH_ROLE=worker: importing dtorch registers no device."""

    def __init__(self) -> None:
        from dtorch import _worker

        _worker.install_allocator()
        self.stats = _worker.allocator_stats
        self.reset = _worker.reset_peaks
        self._worker = _worker

    def trim(self) -> None:
        self._worker.pool_trim()

    def wait(self) -> None:
        pass


class _EagerCuda:
    def __init__(self) -> None:
        import torch

        self._cuda = torch.cuda
        torch.cuda.init()
        self.wait = torch.cuda.synchronize
        self.trim = torch.cuda.empty_cache
        self.reset = torch.cuda.reset_peak_memory_stats

    def stats(self) -> dict[str, int]:
        self.wait()
        return {
            "allocated": self._cuda.memory_allocated(),
            "peak": self._cuda.max_memory_allocated(),
            "reserved": self._cuda.memory_reserved(),
            "peak_reserved": self._cuda.max_memory_reserved(),
        }


class _Dtorch:
    def __init__(self, device: str, threads: int) -> None:
        import dtorch

        dtorch.init(workers=1, device=device, threads_per_worker=threads)
        dtorch.synchronize()
        self._dtorch = dtorch
        self.trim = dtorch.empty_cache

    def stats(self) -> dict[str, int]:
        return dict(self._dtorch.worker_stats(0))

    def reset(self) -> None:
        self._dtorch.reset_peak_memory_stats(0)

    def wait(self) -> None:
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
    return kilobytes(Path(f"/proc/{pid}/status"), field)


def rollup_bytes(*fields: str) -> int:
    """The sum of fields of this process's /proc/self/smaps_rollup: Pss, Private_Dirty, ..."""
    return sum(kilobytes(Path("/proc/self/smaps_rollup"), field) for field in fields)


def descendants(pid: int) -> list[int]:
    """Children of a process, their children, and so on."""
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in (task / "children").read_text().split():
            found += [int(child), *descendants(int(child))]
    return found


# --- in the parent ---------------------------------------------------------------------------------------------------


def add_argument(parser: argparse.ArgumentParser) -> None:
    """The flag by which the parent makes the script a contender."""
    parser.add_argument("--contender", choices=SIDES, help=argparse.SUPPRESS)


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

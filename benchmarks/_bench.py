"""What the benchmarks share: rounds that alternate, rows of figures, their table and CSV, and the line on the machine.

A benchmark measures PyTorch and dtorch by turns in one run, some rounds after a warm-up, and collects `Row`s. A row is
one thing measured, with both sides' values of every round; its ratio is dtorch / PyTorch within a round, because the
machine's speed drifts and only what was measured close together compares. Every row is printed, and saved as CSV.
"""

from __future__ import annotations

import argparse
import csv
import os
import platform
import resource
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

KIB, MIB = 1024, 1024 * 1024
SIDES = ("eager", "dtorch")  # eager: plain PyTorch

# --- figures ---------------------------------------------------------------------------------------------------------


@dataclass
class Row:
    """One thing measured. ``eager`` is empty where PyTorch has nothing of the kind; times are better when small."""

    case: str
    what: str
    unit: str
    eager: list[float] = field(default_factory=list)
    dtorch: list[float] = field(default_factory=list)
    x: float | None = None  # the size, or whatever the case varies, for plots

    def add(self, eager: float | None, dtorch: float) -> None:
        """A round."""
        if eager is not None:
            self.eager.append(eager)
        self.dtorch.append(dtorch)

    @property
    def ratios(self) -> list[float]:
        """dtorch / PyTorch, a value per round; empty where there is no such thing."""
        pairs = zip(self.eager, self.dtorch, strict=True) if self.eager else ()
        return [d / e for e, d in pairs if e]


def spread(values: Sequence[float]) -> tuple[float, float, float] | None:
    """(min, median, max)."""
    return (min(values), statistics.median(values), max(values)) if values else None


def median(values: Sequence[float]) -> float:
    """The median, 0 for nothing."""
    return statistics.median(values) if values else 0.0


def number(value: float) -> str:
    """With three digits that mean something."""
    if value == 0:
        return "0"
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.2f}" if abs(value) >= 1 else f"{value:.3g}"


def size_text(nbytes: float) -> str:
    """4 B, 1 KiB, 64 MiB."""
    for unit, scale in (("GiB", 1024 * MIB), ("MiB", MIB), ("KiB", KIB)):
        if nbytes >= scale:
            return f"{nbytes / scale:g} {unit}"
    return f"{nbytes:g} B"


class Table:
    """Prints rows as they come, keeps them, and saves them."""

    HEAD = ("min", "median", "max")

    def __init__(self, notes: Sequence[str] = ()) -> None:
        self.rows: list[Row] = []
        for note in notes:
            print(note)
        groups = "".join(f"{name:^30}" for name in ("PyTorch", "dtorch", "dtorch / PyTorch"))
        print(f"{'':<62}{groups}\n{'':<62}{''.join(f'{name:>10}' for name in self.HEAD * 3)}", flush=True)

    def add(self, *rows: Row) -> None:
        """Print rows and keep them."""
        for row in rows:
            self.rows.append(row)
            text = f"{row.case:<17} {row.what:<33} {row.unit:<9} "
            for values in (row.eager, row.dtorch, row.ratios):
                found = spread(values)
                text += "".join(f"{number(value):>10}" for value in found) if found else f"{'-':>10}" * 3
            print(text, flush=True)

    def save(self, path: Path, about: str) -> None:
        """Write a CSV file that begins with two comments: what was measured on, and how busy others kept it.

        It is the end of the run: the engine is shut down.
        """
        others = disturbance()
        print(others)
        path.parent.mkdir(parents=True, exist_ok=True)
        groups = [f"{name}_{part}" for name in (*SIDES, "ratio") for part in self.HEAD]
        with path.open("w", newline="") as file:
            file.write(f"# {about}\n# {others}\n")
            out = csv.writer(file)
            out.writerow(["case", "what", "unit", "x", "rounds", *groups])
            for row in self.rows:
                figures = [spread(values) or ("", "", "") for values in (row.eager, row.dtorch, row.ratios)]
                x = "" if row.x is None else f"{row.x:g}"
                cells = [f"{cell:.6g}" if cell != "" else "" for figure in figures for cell in figure]
                out.writerow([row.case, row.what, row.unit, x, len(row.dtorch), *cells])
        print(f"saved {path}")


def alternate(rounds: int, sides: Mapping[str, Callable[[], dict[str, float]]]) -> dict[str, dict[str, list[float]]]:
    """Call each side by turns, first once to warm up, and collect what each returns: {side: {what: a value a round}}.

    Who begins changes from round to round.
    """
    found: dict[str, dict[str, list[float]]] = {name: {} for name in sides}
    for name in sides:
        sides[name]()
    for _, name in turns(rounds, list(sides)):
        for what, value in sides[name]().items():
            found[name].setdefault(what, []).append(value)
    return found


def turns(rounds: int, names: Sequence[str] = SIDES) -> Iterator[tuple[int, str]]:
    """(round, side), the order changing from round to round."""
    for i in range(rounds):
        for name in names if i % 2 == 0 else reversed(names):
            yield i, name


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    """Seconds, and the result, which the caller lets go after the clock was read."""
    start = time.perf_counter()
    result = work()
    return time.perf_counter() - start, result


# --- the command line, and both sides in this process ----------------------------------------------------------------


def parser(doc: str, rounds: int = 0, device: bool = True) -> argparse.ArgumentParser:
    """A parser with the flags that benchmarks have; ``doc`` is the script's docstring.

    Without ``rounds`` the figures need none (they are counted, not timed); ``device`` is False for what is the CPU's.
    """
    made = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.prog = f"dtorch bench {name_of(sys.argv[0])}"
    if rounds:
        made.add_argument("--rounds", type=int, default=rounds, help=f"rounds after the warm-up (default {rounds})")
    made.add_argument("--threads", type=int, default=1, help="of one operator, on both sides (default 1)")
    if device:
        made.add_argument(
            "--device", choices=("cpu", "cuda"), default="cpu", help="what both sides compute on (default cpu)"
        )
    made.add_argument("--out", type=Path, default=Path("out"), help="folder for NAME.csv and NAME.png (default out)")
    return made


def name_of(script: str) -> str:
    """The benchmark's name: of bench_NAME.py."""
    return Path(script).stem.removeprefix("bench_")


@dataclass
class Side:
    """PyTorch or dtorch in this process: its device, and waiting until all that was issued is computed."""

    name: str
    device: str
    wait: Callable[[], None]


def start(args: argparse.Namespace, workers: int = 1) -> dict[str, Side]:
    """Start the workers and wait until they are up; returns both sides by name."""
    import torch

    import dtorch

    torch.set_num_threads(args.threads)
    dtorch.init(workers=workers, device=args.device, threads_per_worker=args.threads)
    dtorch.synchronize()
    eager = Side("eager", args.device, torch.cuda.synchronize if args.device == "cuda" else lambda: None)
    return {"eager": eager, "dtorch": Side("dtorch", "dtorch:0", dtorch.synchronize)}


# --- the machine -----------------------------------------------------------------------------------------------------


def describe(threads: int, device: str = "cpu", used: Mapping[str, str] | None = None) -> str:
    """The machine, threads and versions in one line."""
    cpus = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.partition(":")[2].strip() for line in cpus if line.startswith("model name")), platform.machine())
    memory = kilobytes(Path("/proc/meminfo"), "MemTotal") / 2**30
    parts = [model, f"{len(os.sched_getaffinity(0))} cores", f"{memory:.1f} GiB", f"Linux {platform.release()}"]
    if device == "cuda":
        import torch

        parts.append(torch.cuda.get_device_name())
    parts.append(f"{threads} thread{'s' if threads > 1 else ''} an operator")
    parts += [f"{name} {version}" for name, version in (used or versions()).items()]
    return ", ".join(parts)


def versions() -> dict[str, str]:
    """Of Python and of the libraries that this process has imported."""
    names = ("torch", "diffusers", "transformers", "dtorch")
    found = {name: str(sys.modules[name].__version__) for name in names if name in sys.modules}
    return {"Python": platform.python_version(), **found}


def _busy() -> float:
    """Seconds that the machine's processors have been busy, or taken away by a hypervisor, since it started."""
    user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, _first_line("/proc/stat").split()[1:9])
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def _first_line(file: str) -> str:
    with open(file) as opened:
        return opened.readline()


_BEGIN = (time.monotonic(), _busy())


def disturbance() -> str:
    """What others took of the machine since this process began: the figures of a busy machine are worth less.

    A stream of small operators needs two free processors, eager PyTorch one; so the ratio suffers too. Shuts the engine
    down, since the time of a process is ours to know once it has ended.
    """
    if "dtorch" in sys.modules:
        sys.modules["dtorch"].shutdown()
    ours = 0.0
    for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN):
        used = resource.getrusage(who)
        ours += used.ru_utime + used.ru_stime
    whole = (time.monotonic() - _BEGIN[0]) * (os.cpu_count() or 1)
    others = max(0.0, _busy() - _BEGIN[1] - ours) / whole
    return f"other processes took {others:.0%} of the machine's processor time meanwhile"


def resident_bytes(pid: int | str = "self") -> int:
    """The resident size of a process."""
    return kilobytes(Path(f"/proc/{pid}/status"), "VmRSS")


def kilobytes(file: Path, what: str) -> int:
    """A field of a /proc file that is given in kB, as bytes."""
    for line in file.read_text().splitlines():
        if line.startswith(what + ":"):
            return int(line.split()[1]) * 1024
    raise LookupError(f"{file} has no {what}")


def cpu_seconds(pid: int) -> dict[str, float]:
    """Processor time of a process's threads so far: "main", and "others" together; to the nanosecond where Linux
    counts that (schedstat), else to the clock tick."""
    found = {"main": 0.0, "others": 0.0}
    for task in Path(f"/proc/{pid}/task").iterdir():
        try:
            seconds = int((task / "schedstat").read_text().split()[0]) / 1e9
        except OSError:
            fields = (task / "stat").read_text().rpartition(")")[2].split()
            seconds = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
        found["main" if int(task.name) == pid else "others"] += seconds
    return found

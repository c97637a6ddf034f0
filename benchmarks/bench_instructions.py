"""Instructions per operator of the client, the worker and PyTorch itself: counted and not timed, so free of noise.

Each operator is issued a few times and then some more times; the difference is what one costs. A thread is let go one
instruction at a time, which `_stepper` does without any tool; that is slow (a second for 50,000), so operators are few.
The counts are of user space, by library: dtorch's own module, torch (dispatcher, kernels), Python, ZeroMQ, and others
(libc, libstdc++); "native" is dtorch, torch and others. PyTorch's column is eager's whole operator.

What the counts are: the cost of a record, not of a batch (the client sends once, outside the count), with geometry
known and collection of garbage off. What they cannot show: time, caches, the kernel, other threads. The slowed worker
looks at its socket before every record, which a fast one does every 20 us; that is most of its "zmq", and why that
column is left out of what is compared.

instructions.json, beside this file, is the baseline for one torch, Python, compiler and processor; --check compares
"dtorch" and "native" of each operator within --tolerance and exits with 1 if one is
outside, be it above or below: a baseline that is too high hides the next loss. --renew writes it; commit it with the
change that moved it. For another torch, Python, compiler or processor there is no number to hold against; --check then
compares with the nearest baseline within a factor of 2 and says so.

    dtorch bench instructions [--op add] [--check] [--renew]
"""

from __future__ import annotations

import argparse
import collections
import gc
import json
import os
import platform
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import _bench
import _plot
from _bench import Row, Table
from _stepper import MARK, Map, Refused, Stepper

BASELINE = Path(__file__).with_name("instructions.json")
#: How often an operator is issued in the two stretches that are subtracted.
FEW, MORE = 4, 12
RENEW = f"{sys.executable} -m dtorch bench instructions --renew"
LOOSE = 2.0  # the factor for a baseline of another torch, Python, compiler or processor
LIBRARIES = ("dtorch", "torch", "others", "python", "zmq")
Counts = dict[str, float]  # instructions per operator, by library

# --- the process that is counted: the client of a worker -------------------------------------------------------------


def _operators(device: str) -> dict[str, Callable[[], Any]]:
    """What is counted, by name; each gives a function that issues one operator."""
    import torch
    from torch.nn import functional as F

    a, b = torch.ones(4, device=device), torch.ones(4, device=device)
    x, weight, bias = torch.ones(2, 16, device=device), torch.ones(16, 16, device=device), torch.ones(16, device=device)
    q = torch.ones(1, 2, 4, 8, device=device)
    return {
        "add": lambda: a + b,
        "mul by a number": lambda: a * 2.0,
        "add in place": lambda: a.add_(b),
        "transpose": lambda: x.t(),
        "linear": lambda: F.linear(x, weight, bias),
        "layer_norm": lambda: F.layer_norm(x, (16,), bias, bias),
        "sdpa": lambda: F.scaled_dot_product_attention(q, q, q),
    }


def subject(commands: IO[str]) -> None:
    """Do what the tracer says, a line a command, and mark what is to be counted.

    client NAME N   issue the operator N times between two marks to this thread
    eager NAME N    the same with plain PyTorch
    worker NAME N   issue it N times, then send; mark to the worker when all is computed

    The first line out has the worker's pid, and the operators' names with whether they make a record.
    """
    import torch

    import dtorch
    from dtorch import _client
    from dtorch.client import engine

    dtorch.init(workers=1, device="cpu", threads_per_worker=1)
    sides = {"client": _operators("dtorch:0"), "eager": _operators("cpu")}
    sides["worker"] = sides["client"]
    running = engine.current()
    assert running is not None
    dtorch.synchronize()
    worker = running.pids()["worker-0"]

    def issue(operator: Callable[[], Any], count: int) -> None:
        for _ in range(count):
            operator()

    torch.set_grad_enabled(False)
    names: dict[str, bool] = {}
    for name in sides["client"]:
        issue(sides["eager"][name], 3 * MORE)
        issue(sides["client"][name], 3 * MORE)  # geometries are known from here on, the pools are filled
        before = dtorch.client_stats()["records"]
        issue(sides["client"][name], 1)
        names[name] = dtorch.client_stats()["records"] > before
    dtorch.synchronize()
    gc.disable()
    about = {"worker": worker, "names": names, "key": key(), "versions": _bench.versions()}
    print(json.dumps(about), flush=True)
    for line in commands:
        side, name, count = line.rstrip("\n").split("\t")
        if side == "worker":
            issue(sides[side][name], int(count))
            _client.flush()
            dtorch.synchronize()
            os.kill(worker, MARK)
        else:
            signal.raise_signal(MARK)
            issue(sides[side][name], int(count))
            signal.raise_signal(MARK)
            dtorch.synchronize()
        print("done", flush=True)


def key() -> dict[str, str]:
    """What a count depends on besides our sources."""
    import torch

    from dtorch import _build

    return {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "compiler": _build.COMPILER,
        "processor": f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}",
    }


# --- the tracer, which imports neither torch nor dtorch --------------------------------------------------------------


class Subject:
    """The counted client and its worker, from here."""

    def __init__(self) -> None:
        # The client's flusher thread must not send in the middle: it would take its turn at the buffer's lock.
        environment = {**os.environ, "DTORCH_FLUSH_US": "200000", "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1"}
        command = [sys.executable, __file__, "--subject"]
        self._process = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        found = json.loads(self._answer())
        self.key: dict[str, str] = found["key"]
        self.versions: dict[str, str] = found["versions"]
        self.names: dict[str, bool] = found["names"]
        self._worker: int = found["worker"]

    def _say(self, *command: object) -> None:
        assert self._process.stdin is not None
        print(*command, sep="\t", file=self._process.stdin, flush=True)

    def _answer(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"the counted process ended with status {self._process.wait()}")
        return line

    def here(self, side: str, name: str, count: int) -> collections.Counter[str]:
        """Of the process's own thread: "client" or "eager"."""
        stepper = Stepper(self._process.pid)
        try:
            self._say(side, name, count)
            stepper.run_to_mark()
            counted = stepper.step_to_mark()
        finally:
            stepper.release()
        self._answer()
        return Map(self._process.pid).by_library(counted)

    def worker(self, name: str, count: int) -> collections.Counter[str]:
        stepper = Stepper(self._worker)
        try:
            stepper.stop()
            self._say("worker", name, count)
            counted = stepper.step_to_mark()
        finally:
            stepper.release()
        self._answer()
        return Map(self._worker).by_library(counted)

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def count(subject: Subject, side: str, name: str) -> Counts:
    """Instructions per operator on a side, by library."""

    def measure(times: int) -> collections.Counter[str]:
        return subject.worker(name, times) if side == "worker" else subject.here(side, name, times)

    few, more = measure(FEW), measure(MORE)
    return {lib: (more[lib] - few[lib]) / (MORE - FEW) for lib in LIBRARIES}


def compared(counts: Counts) -> dict[str, float]:
    """What of it is held against the baseline."""
    return {"dtorch": counts["dtorch"], "native": counts["dtorch"] + counts["torch"] + counts["others"]}


def check(found: dict[str, Counts], known: list[Any], key: dict[str, str], tolerance: float) -> int:
    """Compare with the baseline; prints what is outside of it and returns the exit status."""
    if not known:
        print("there is no baseline; --renew makes one")
        return 1
    exact = [entry for entry in known if entry["key"] == key]
    nearest = max(known, key=lambda entry: sum(entry["key"][name] == value for name, value in key.items()))
    counts = (exact[0] if exact else nearest)["counts"]
    low, high = (1 - tolerance, 1 + tolerance) if exact else (1 / LOOSE, LOOSE)
    if not exact:
        print(f"no baseline is for {key}; comparing within a factor of {LOOSE:g} with the one for {nearest['key']}")
    bad = 0
    for name, now in found.items():
        before = compared(counts[name]) if name in counts else {}
        for what, value in compared(now).items():
            base = before.get(what, 0)
            if base and not low <= value / base <= high:
                bad += 1
                print(f"{name}: {what} takes {value:,.0f} instructions per operator, the baseline has {base:,.0f}")
        if not before:
            bad += 1
            print(f"{name} is not in the baseline")
    if bad:
        print(f"if this is meant, write the baseline anew and commit it:\n    {RENEW}")
    else:
        print(f"all counts are within {low:.2f} to {high:.2f} of the baseline")
    return 1 if bad else 0


def renew(found: dict[str, Counts], known: list[Any], key: dict[str, str]) -> None:
    """Write what was counted into the baseline; what was not counted now stays."""
    counts = next((entry["counts"] for entry in known if entry["key"] == key), {})
    rounded = {name: {lib: round(n, 1) for lib, n in by_library.items()} for name, by_library in found.items()}
    others = [entry for entry in known if entry["key"] != key]
    BASELINE.write_text(json.dumps([*others, {"key": key, "counts": counts | rounded}], indent=1) + "\n")
    print(f"saved {BASELINE}")


def main() -> int:
    parser = _bench.parser(__doc__ or "", device=False)
    parser.add_argument("--op", action="append", help="may be repeated; default: all")
    parser.add_argument("--check", action="store_true", help="compare with the baseline; exit 1 when outside")
    parser.add_argument("--tolerance", type=float, default=0.1, help="of --check (default 0.1)")
    parser.add_argument("--renew", action="store_true", help="write the baseline of this torch, Python, ...")
    parser.add_argument("--subject", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.subject:
        subject(sys.stdin)
        return 0

    process = Subject()
    found: dict[str, Counts] = {}
    plain: dict[str, Counts] = {}
    table = Table()
    try:
        for name in args.op or process.names:
            if name not in process.names:
                parser.error(f"--op: there is no {name!r}; choose from {', '.join(process.names)}")
            eager = {} if args.check else count(process, "eager", name)
            plain |= {f"PyTorch, {name}": eager} if eager else {}
            for side in ("client", "worker") if process.names[name] else ("client",):
                counts = found[f"{side}, {name}"] = count(process, side, name)
                table.add(*rows(side, name, counts, eager))
    except Refused as why:
        print(f"dtorch bench instructions: {why}", file=sys.stderr)
        return 3
    finally:
        process.close()
    about = f"{_bench.describe(args.threads, used=process.versions)}, {process.key['compiler']}"
    print(about)
    table.save(args.out / "instructions.csv", about)
    draw(args.out / "instructions.png", about, found, plain)
    known = json.loads(BASELINE.read_text()) if BASELINE.exists() else []
    if args.renew:
        renew(found, known, process.key)
    return check(found, known, process.key, args.tolerance) if args.check else 0


def rows(side: str, name: str, counts: Counts, eager: Counts) -> list[Row]:
    """The rows of one operator on one side."""
    made = []
    for lib in (*LIBRARIES, "native"):
        ours, theirs = (compared(c)["native"] if lib == "native" and c else c.get(lib, 0) for c in (counts, eager))
        if ours:
            made.append(Row(side, f"{name}: {lib}", "instr/op", [theirs] if theirs else [], [ours]))
    return made


def draw(path: Path, about: str, found: dict[str, Counts], plain: dict[str, Counts]) -> None:
    """Two panels of bars: our own module's, and all that is native, beside PyTorch's."""
    operators = list(dict.fromkeys(name.partition(", ")[2] for name in found))
    both = sorted({**plain, **found}.items(), key=lambda item: operators.index(item[0].partition(", ")[2]))
    panels = []
    for title, what, shown in (
        ("in dtorch's own module", "dtorch", list(found.items())),
        ("native: dtorch, torch, libc", "native", both),
    ):
        bars = [(name, (value := compared(counts)[what], value, value)) for name, counts in shown]
        colors = ["#777777" if name in plain else "#1f77b4" for name, _ in shown]
        panels.append(_plot.Bars(title, "instructions per operator", bars, colors=colors))
    _plot.draw(path, "Instructions per operator", about, panels)


if __name__ == "__main__":
    sys.exit(main())

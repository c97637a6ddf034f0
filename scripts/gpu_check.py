"""The steps of scripts/gpu_check.sh, run one after the other with a time limit each, and the page that tells of them.

A step is a command in a process of its own; its output goes to a file. It has passed when it ends with status 0 and
`Step.judge` has nothing to say against what it printed. Whatever becomes of it, the next one follows, unless that needs
it. All steps together have `DEADLINE` seconds: a step gets its limit or what is left, and what comes too late is not
run. Needs the standard library alone, so that it can also tell of an environment in which nothing else works.
"""

from __future__ import annotations

import argparse
import csv
import datetime as dt
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
WORK = ROOT / "build" / "gpu_check"
PAGE = ROOT / "docs" / "gpu-results.md"
DEADLINE = 465.0  # seconds
LEAST = 5.0  # with less time left a step is not begun

PASSED, FAILED, TIMED_OUT, NOT_RUN = "passed", "failed", "timed out", "not run"

# --- steps -----------------------------------------------------------------------------------------------------------

Judge = Callable[[str], str]


@dataclass
class Step:
    """Something to run, and what became of it."""

    name: str
    command: Sequence[str]
    limit: float  # seconds
    needs: Sequence[str] = ()  # steps that must have passed
    modules: Sequence[str] = ()  # that Python must find
    figures: str = ""  # the CSV file that it writes into WORK
    judge: Judge = lambda output: ""  # what is wrong although the status is 0

    state: str = NOT_RUN
    seconds: float = 0.0
    note: str = ""
    output: str = ""


def run_all(steps: Sequence[Step], folder: Path, deadline: float = DEADLINE) -> None:
    """Run the steps in order; returns when the last one is over, within the deadline (and the time of a kill)."""
    folder.mkdir(parents=True, exist_ok=True)
    begin = time.monotonic()
    for step in steps:
        step.note = _obstacle(step, steps)
        left = deadline - (time.monotonic() - begin)
        if not step.note and left < LEAST:
            step.note = f"no time was left of the {deadline:.0f} s"
        if not step.note:
            say(f"{step.name} (at most {min(step.limit, left):.0f} s) ...")
            run(step, folder / f"{step.name}.log", min(step.limit, left))
        say(f"{step.name}: {step.state}{f' in {step.seconds:.0f} s' if step.seconds else ''}. {step.note}".rstrip(" ."))


def _obstacle(step: Step, steps: Sequence[Step]) -> str:
    """Why a step cannot be run; "" if it can."""
    for other in steps:
        if other.name in step.needs and other.state != PASSED:
            return f"needs {other.name} ({other.state})"
    importlib.invalidate_caches()  # an earlier step may have installed it
    missing = [name for name in step.modules if importlib.util.find_spec(name) is None]
    return f"needs the Python packages {', '.join(missing)}" if missing else ""


def run(step: Step, log: Path, limit: float) -> None:
    """Run a step in a session of its own, which ends with it."""
    begin = time.monotonic()
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))}
    log.unlink(missing_ok=True)
    with log.open("wb") as file:
        try:
            process = subprocess.Popen(
                step.command,
                cwd=ROOT,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError as error:
            step.state, step.note = FAILED, str(error)
            return
        try:
            status: int | None = process.wait(limit)
        except subprocess.TimeoutExpired:
            status = None
        _kill(process)
    step.seconds = time.monotonic() - begin
    step.output = log.read_text(errors="replace")
    if status is None:
        step.state, step.note = TIMED_OUT, f"stopped after {limit:.3g} s"
    elif status:
        step.state, step.note = FAILED, f"status {status}: {last_line(step.output)}"
    else:
        step.note = step.judge(step.output)
        step.state = FAILED if step.note else PASSED
        step.note = step.note or last_line(step.output)


def _kill(process: subprocess.Popen[bytes]) -> None:
    """End what is left of a step's session (engines end by themselves once their client has)."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()


def last_line(output: str) -> str:
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    return lines[-1][:160] if lines else "it printed nothing"


def say(text: str) -> None:
    print(f"gpu_check: {text}", flush=True)


# --- what is run -----------------------------------------------------------------------------------------------------

#: Says what the machine has, as one line of JSON; fails where there is no GPU, with the line all the same.
PROBE = """
import importlib.util, json, platform, sys
found = {"Python": platform.python_version(), "machine": platform.platform()}
for name in ("torch", "cupy", "triton"):
    try:
        found[name] = __import__(name).__version__
    except ImportError:
        found[name] = "missing"
gpus = []
if found["torch"] != "missing":
    import torch
    found["CUDA"] = str(torch.version.cuda)
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
found["GPUs"] = ", ".join(gpus) or "none"
print(json.dumps(found), flush=True)
sys.exit(0 if gpus or sys.argv[1] == "cpu" else "torch sees no GPU")
"""

ALWAYS = ("torch", "zmq", "msgpack")
EXAMPLES = ("diffusers", "transformers", "tokenizers", "PIL", "tqdm")


def gpu_tests(output: str) -> str:
    """pytest is content when every test was skipped; we are not."""
    return "" if re.search(r"\b[1-9]\d* passed", output) else f"no test has run: {last_line(output)}"


def steps(device: str, install: bool, build: bool) -> Iterator[Step]:
    """All steps, the most telling first."""
    python = sys.executable
    if install:
        yield Step("packages", [python, __file__, "--install"], 90)
    yield Step("environment", [python, "-c", PROBE, device], 40)
    needs = []
    if build:
        yield Step("build", [python, "native/build.py"], 240)
        needs = ["build"]

    def example(name: str, *flags: str, modules: Sequence[str] = ()) -> Step:
        command = [python, f"examples/{name}.py", "--device", device, "--check", *flags]
        return Step(f"example-{name}", command, 45, needs, (*ALWAYS, *modules))

    def bench(name: str, limit: float, *flags: str, modules: Sequence[str] = ()) -> Step:
        command = [python, "-m", "dtorch", "bench", name, "--device", device, "--out", str(WORK), *flags]
        return Step(f"bench-{name}", command, limit, needs, (*ALWAYS, *modules), f"{name}.csv")

    yield example("custom_kernel", "--workers", "2")
    marked = sorted(str(f.relative_to(ROOT)) for f in ROOT.glob("tests/test_*.py") if "mark.gpu" in f.read_text())
    yield Step(
        "tests",
        [python, "-m", "pytest", "-m", "gpu", "-q", "-p", "no:cacheprovider", *marked],
        150,
        needs,
        (*ALWAYS, "pytest"),
        judge=gpu_tests,
    )
    yield bench("op_overhead", 70, "--op", "add", "--op", "sdpa", "--records", "0")
    yield bench("peer_copy", 40, "--rounds", "5", "--largest", str(256 << 20))
    yield bench("sd3", 100, modules=EXAMPLES)
    yield example("sd3", "--workers", "2", "--out", str(WORK / "sd3.png"), modules=EXAMPLES)
    yield example("llama", "--train", modules=EXAMPLES)
    yield example("await_values", "--workers", "2")


def install() -> int:
    """Ask pip for what is missing, torch never: it stays as it is. Says what could not be had; 1 if that is needed."""
    torch = subprocess.run([sys.executable, "native/build.py", "--installed-torch"], capture_output=True, text=True)
    WORK.mkdir(parents=True, exist_ok=True)
    held = WORK / "constraints.txt"
    held.write_text(torch.stdout if torch.returncode == 0 else "")
    cuda = subprocess.run(
        [sys.executable, "-c", "import torch; print(torch.version.cuda or '')"], capture_output=True, text=True
    ).stdout.partition(".")[0]
    groups = [
        ("needed", {"zmq": "pyzmq>=25", "msgpack": "msgpack>=1.0", "pytest": "pytest>=8"}),
        (
            "copies between workers go through host memory",
            {"cupy": f"cupy-cuda{cuda.strip()}x"} if cuda.strip() else {},
        ),
        (
            "the examples sd3 and llama are not run",
            {"diffusers": "diffusers>=0.35", "transformers": "transformers>=5", "tokenizers": "tokenizers"}
            | {"PIL": "pillow", "tqdm": "tqdm", "safetensors": "safetensors"},
        ),
    ]
    status = 0
    for else_what, packages in groups:
        missing = [package for module, package in packages.items() if importlib.util.find_spec(module) is None]
        if not missing:
            continue
        pip = [sys.executable, "-m", "pip", "install", "-q", "--retries", "1", "--timeout", "10", "-c", str(held)]
        if subprocess.run([*pip, *missing]).returncode:
            print(f"pip could not install {' '.join(missing)}: {else_what}")
            status |= else_what == "needed"
    return status


# --- the page --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Target:
    """What a ratio dtorch / PyTorch is to be, for the rows that `case` and `what` match."""

    case: str
    what: str
    most: float
    least_bytes: float = 0
    most_bytes: float = float("inf")


#: Of add, the smallest size and the large ones; a copy at nine tenths of memcpy's speed is 1.11 of its time. The files
#: have sizes to six digits, so that 4 MiB is a little less there.
TARGETS = (
    Target(r"add ", r"stream$", 1.0, most_bytes=4),
    Target(r"(add|sdpa) ", r"stream$", 1.0, least_bytes=4e6),
    Target(r"sd3 ", r"client$", 0.30),
    Target(r"sd3 ", r"end to end$", 0.95),
    Target(r"sd3 ", r"peak memory", 0.95),
    Target(r"peer copy", r"copied", 1.11, least_bytes=16e6),
)


@dataclass
class Figure:
    """A row of a benchmark's CSV file: medians, and their ratio."""

    cells: dict[str, str] = field(default_factory=dict)

    def text(self, column: str) -> str:
        cell = self.cells.get(column) or ""
        return f"{float(cell):.3g}" if cell else "-"

    def verdict(self) -> tuple[str, str]:
        """The target and whether it is met; ("", "") where there is none."""
        size, ratio = float(self.cells.get("x") or 0), self.cells.get("ratio_median")
        for target in TARGETS:
            fits = re.match(target.case, self.cells["case"]) and re.match(target.what, self.cells["what"])
            if fits and ratio and target.least_bytes <= size <= target.most_bytes:
                return f"<= {target.most:g}", "met" if float(ratio) <= target.most else "**missed**"
        return "", ""


def figures(step: Step, folder: Path) -> list[Figure]:
    """What a benchmark has measured; nothing where it did not come to its end."""
    file = folder / step.figures
    if not step.figures or step.state != PASSED or not file.is_file():
        return []
    lines = [line for line in file.read_text().splitlines() if not line.startswith("#")]
    return [Figure(row) for row in csv.DictReader(lines)]


def page(done: Sequence[Step], folder: Path, rehearsal: bool, seconds: float) -> str:
    """The text of docs/gpu-results.md."""
    now = dt.datetime.now(dt.UTC).strftime("%Y-%m-%d %H:%M UTC")
    lines = ["# Results on a GPU", ""]
    lines += [f"Written by `scripts/gpu_check.sh` on {now} (commit {_commit()}, {seconds:.0f} s); do not edit.", ""]
    if rehearsal:
        lines += ["**A rehearsal on the CPU. Nothing on this page was measured on a GPU.**", ""]
    machine = next((_json(step.output) for step in done if step.name == "environment"), {})
    lines += [*(f"- {name}: {value}" for name, value in machine.items()), ""]
    lines += ["## Steps", "", "| step | state | seconds | last words |", "|---|---|---|---|"]
    for step in done:
        state = step.state if step.state == PASSED else f"**{step.state}**"
        lines.append(f"| {step.name} | {state} | {step.seconds:.0f} | {_cell(step.note)} |")
    lines += ["", "## Benchmarks", ""]
    lines += ["Medians of PyTorch CUDA and dtorch, by turns on one card; the ratio is the median of the rounds'.", ""]
    lines += ["| case | what | unit | PyTorch | dtorch | ratio | target | |", "|---|---|---|---|---|---|---|---|"]
    for step in done:
        for row in figures(step, folder):
            middle = (row.text(f"{name}_median") for name in ("eager", "dtorch", "ratio"))
            cells = [row.cells["case"], row.cells["what"], row.cells["unit"], *middle, *row.verdict()]
            lines.append(f"| {' | '.join(map(_cell, cells))} |")
        if step.figures and step.state != PASSED:
            lines.append(f"| {step.name} | **{step.state}** | | | | | | |")
    for step in (step for step in done if step.state in (FAILED, TIMED_OUT)):
        tail = [line[:300].replace("```", "'''") for line in step.output.splitlines()[-25:]]
        lines += ["", f"## The end of {step.name}", "", "```", *tail, "```"]
    return "\n".join([*lines, ""])


def _json(output: str) -> dict[str, str]:
    """The probe's line, which warnings may surround."""
    for line in output.splitlines():
        if line.startswith("{"):
            try:
                return {str(name): str(value) for name, value in json.loads(line).items()}
            except ValueError:
                continue
    return {}


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def _commit() -> str:
    found = subprocess.run(["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    return found.stdout.strip() or "unknown"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--out", type=Path, help="the page to write (default docs/gpu-results.md)")
    parser.add_argument("--no-install", action="store_true", help="do not ask pip for what is missing")
    parser.add_argument("--no-build", action="store_true", help="the native modules are built already")
    parser.add_argument("--only", action="append", metavar="STEP", help="run only this step; may be repeated")
    parser.add_argument("--rehearse", action="store_true", help="on the CPU; writes to build/gpu_check by default")
    parser.add_argument("--install", action="store_true", help=argparse.SUPPRESS)  # the step packages
    options = parser.parse_args()
    if options.install:
        return install()
    begin = time.monotonic()
    chosen = list(steps("cpu" if options.rehearse else "cuda", not options.no_install, not options.no_build))
    if options.only:
        if unknown := set(options.only) - {step.name for step in chosen}:
            parser.error(
                f"there is no step {', '.join(sorted(unknown))}; {', '.join(step.name for step in chosen)} are"
            )
        chosen = [step for step in chosen if step.name in options.only]
    run_all(chosen, WORK)
    out: Path = options.out or (WORK / "results.md" if options.rehearse else PAGE)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(page(chosen, WORK, options.rehearse, time.monotonic() - begin))
    bad = [f"{step.name} ({step.state})" for step in chosen if step.state != PASSED]
    say(f"{len(chosen) - len(bad)} of {len(chosen)} steps passed; {out}")
    if bad:
        say(f"not passed: {', '.join(bad)}")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())

"""``dtorch bench``: each benchmark runs, prints, saves its figures and a picture; what they share does what it says.

Nothing is asserted about a time. The one comparison is of counted instructions with the committed baseline.
"""

from __future__ import annotations

import csv
import importlib.util
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from dtorch import bench

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "benchmarks"
NAMES = sorted(script.stem.removeprefix("bench_") for script in FOLDER.glob("bench_*.py"))

#: The smallest run of each that still goes through all its parts.
TINY = {
    "instructions": "--op add --check",
    "latency": "--rounds 1 --trips 20 --largest 65536 --most-workers 1",
    "liveness_limit": "--model llama_last",
    "llama": "--rounds 1 --width 64 --layers 1 --tokens 4 --new 3 --no-memory",
    "memory": "--rounds 1 --case fetch",
    "op_overhead": "--rounds 1 --op add --op sdpa --size 4 --size 4096 --budget 1 --records 500 --same-core",
    "peer_copy": "--rounds 1 --largest 1048576",
    "scale": "--rounds 1 --ops 300 --most-workers 2 --count 2000 --long 20000",
    "sd3": "--rounds 1 --preset tiny --workers 1 --no-memory",
}
WITHOUT_RATIO = {"instructions"}  # where --check leaves PyTorch's own count out
needs_models = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("diffusers", "transformers", "tokenizers", "PIL")),
    reason="needs the extra 'examples': pip install 'dtorch[examples]'",
)
MODELS = {"liveness_limit", "llama", "sd3"}


def run(*command: str, cwd: Path, status: int = 0) -> str:
    """Run Python; returns what it printed."""
    command = (sys.executable, *command)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == status, f"{command} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}"
    return done.stdout + done.stderr


@pytest.fixture
def shared(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module that benchmarks share."""
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module("_bench")


@pytest.mark.alarm(150)
@pytest.mark.parametrize("name", [pytest.param(name, marks=needs_models if name in MODELS else ()) for name in NAMES])
def test_a_benchmark_prints_and_saves_its_figures_and_a_picture(name: str, tmp_path: Path) -> None:
    if name == "instructions" and os.environ.get("DTORCH_SANITIZE"):
        pytest.skip("a sanitizer's own instructions are no baseline")
    said = run(str(FOLDER / f"bench_{name}.py"), *TINY[name].split(), cwd=tmp_path)
    file = tmp_path / "out" / f"{name}.csv"
    about, others, *lines = file.read_text().splitlines()
    assert others.startswith("# other processes took ") and others.removeprefix("# ") in said
    assert about.startswith("# ") and "torch 2." in about and "cores" in about and "thread" in about
    assert about.removeprefix("# ") in said
    rows = list(csv.DictReader(lines))
    assert rows
    for row in rows:
        assert f"{row['case']} " in said and row["what"] in said
        for side in ("eager", "dtorch", "ratio"):
            found = [float(row[f"{side}_{part}"]) for part in ("min", "median", "max") if row[f"{side}_{part}"]]
            assert found == sorted(found) and all(map(math.isfinite, found)), row
        assert row["dtorch_median"], row
    assert name in WITHOUT_RATIO or any(row["ratio_median"] for row in rows)
    assert (tmp_path / "out" / f"{name}.png").read_bytes().startswith(b"\x89PNG")


def test_the_list_has_a_sentence_for_each(tmp_path: Path) -> None:
    lines = [
        line.split(maxsplit=1)
        for line in run("-m", "dtorch", "bench", cwd=tmp_path).splitlines()
        if line.startswith("  ")
    ]
    assert [line[0] for line in lines] == NAMES == sorted(TINY)
    assert all(sentence.endswith(".") and len(sentence.split()) > 5 for _, sentence in lines)


def test_an_unknown_name_is_refused_with_the_list(tmp_path: Path) -> None:
    said = run("-m", "dtorch", "bench", "speed", cwd=tmp_path, status=2)
    assert "there is no benchmark 'speed'" in said and all(f"  {name} " in said for name in NAMES)


def test_a_benchmark_is_its_script_with_its_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    became: list[object] = []
    monkeypatch.setattr(os, "execve", lambda *arguments: became.extend(arguments))
    bench.main(["latency", "--rounds", "2"])
    assert became[:2] == [sys.executable, [sys.executable, str(FOLDER / "bench_latency.py"), "--rounds", "2"]]


# ---------------------------------------------------------------------------------------------------- what they share


def test_a_ratio_is_taken_within_a_round(shared: ModuleType) -> None:
    row = shared.Row("case", "what", "s")
    for eager, dtorch in ((1.0, 0.5), (4.0, 8.0), (2.0, 1.0)):
        row.add(eager, dtorch)
    assert row.ratios == [0.5, 2.0, 0.5]
    assert shared.spread(row.ratios) == (0.5, 0.5, 2.0)
    alone = shared.Row("case", "what", "s", dtorch=[1.0])
    assert alone.ratios == [] and shared.spread(alone.eager) is None


def test_sides_take_turns_after_a_warm_up(shared: ModuleType) -> None:
    order: list[str] = []

    def side(name: str) -> dict[str, float]:
        order.append(name)
        return {"time": float(len(order))}

    found = shared.alternate(2, {name: lambda name=name: side(name) for name in ("eager", "dtorch")})
    assert order == ["eager", "dtorch", "eager", "dtorch", "dtorch", "eager"]
    assert found == {"eager": {"time": [3.0, 6.0]}, "dtorch": {"time": [4.0, 5.0]}}


def test_a_cpu_clock_counts_what_a_process_computes(shared: ModuleType) -> None:
    before = shared.cpu_seconds(os.getpid())
    start = os.times().user
    while os.times().user < start + 0.1:
        pass
    after = shared.cpu_seconds(os.getpid())
    assert sum(after.values()) - sum(before.values()) >= 0.09


# -------------------------------------------------------------------------------------------- the instruction baseline

KEY = {"torch": "2.13.0", "python": "3.11.7", "compiler": "c++ 12", "processor": "x86_64 AVX2"}
COUNTS = {"client, add": {"dtorch": 1000.0, "torch": 2000.0, "python": 9.0, "zmq": 9.0, "others": 500.0}}


@pytest.fixture
def instructions(shared: ModuleType) -> ModuleType:
    return importlib.import_module("bench_instructions")


def _scaled(factor: float) -> dict[str, dict[str, float]]:
    return {name: {lib: n * factor for lib, n in counts.items()} for name, counts in COUNTS.items()}


@pytest.mark.parametrize(("factor", "status"), [(1.0, 0), (1.09, 0), (0.91, 0), (1.11, 1), (0.89, 1)])
def test_a_count_outside_ten_percent_fails_the_check_either_way(
    instructions: ModuleType, capsys: pytest.CaptureFixture[str], factor: float, status: int
) -> None:
    known = [{"key": KEY, "counts": COUNTS}]
    assert instructions.check(_scaled(factor), known, KEY, 0.1) == status
    said = capsys.readouterr().out
    assert ("bench instructions --renew" in said) == bool(status)
    if status:
        assert f"client, add: dtorch takes {1000 * factor:,.0f} instructions per operator" in said


@pytest.mark.parametrize(("factor", "status"), [(1.9, 0), (2.1, 1)])
def test_another_compiler_is_held_against_the_nearest_baseline_loosely(
    instructions: ModuleType, capsys: pytest.CaptureFixture[str], factor: float, status: int
) -> None:
    far = {"torch": "2.11.0", "python": "3.14.0", "compiler": "clang", "processor": "aarch64"}
    known = [{"key": far, "counts": _scaled(100)}, {"key": KEY, "counts": COUNTS}]
    assert instructions.check(_scaled(factor), known, {**KEY, "compiler": "c++ 13"}, 0.1) == status
    assert "no baseline is for" in capsys.readouterr().out


def test_what_the_baseline_lacks_fails_the_check(instructions: ModuleType) -> None:
    assert instructions.check(COUNTS, [], KEY, 0.1) == 1
    assert instructions.check(COUNTS, [{"key": KEY, "counts": {}}], KEY, 0.1) == 1


def test_the_committed_baseline_has_all_that_is_compared(instructions: ModuleType) -> None:
    entries = json.loads((FOLDER / "instructions.json").read_text())
    assert entries
    for entry in entries:
        assert set(entry["key"]) == set(KEY)
        assert all(set(counts) == set(instructions.LIBRARIES) for counts in entry["counts"].values())

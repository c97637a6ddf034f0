"""scripts/gpu_check.sh runs to its end whatever its steps do, tells what became of each, and writes its page."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def check() -> ModuleType:
    spec = importlib.util.spec_from_file_location("gpu_check", ROOT / "scripts" / "gpu_check.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules["gpu_check"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def python(program: str) -> list[str]:
    return [sys.executable, "-c", program]


CSV = """# a machine
# others
case,what,unit,x,rounds,eager_median,dtorch_median,ratio_median
add 4 B,stream,us,4,3,2.0,1.5,0.75
add 4 B,value,us,4,3,2.0,90,45
add 4 MiB,stream,us,4.1943e+06,3,2.0,2.2,1.1
peer copy,"copied, 64 MiB / memcpy",ms,67108864,3,1.0,1.05,1.05
"""


def test_every_step_has_its_turn_and_its_state(check: ModuleType, tmp_path: Path) -> None:
    Step = check.Step
    steps = [
        Step("good", python("print('words'); print('the last ones')"), 20),
        Step("bad", python("print('before'); raise SystemExit('a reason | here')"), 20),
        Step("late", python("import time; print('begun', flush=True); time.sleep(60)"), 0.5),
        Step("absent", ["/no/such/program"], 20),
        Step("after bad", python(""), 20, needs=("good", "bad")),
        Step("lacking", python(""), 20, modules=("os", "dt_no_such_module")),
        Step("skipping", python("print('=== 9 skipped in 0.1s ===')"), 20, judge=check.gpu_tests),
        Step("testing", python("print('=== 2 passed, 9 skipped in 0.1s ===')"), 20, judge=check.gpu_tests),
        Step("measuring", python(f"open({str(tmp_path / 'a.csv')!r}, 'w').write({CSV!r})"), 20, figures="a.csv"),
    ]
    check.run_all(steps, tmp_path)
    assert {step.name: (step.state, step.note) for step in steps} == {
        "good": ("passed", "the last ones"),
        "bad": ("failed", "status 1: a reason | here"),
        "late": ("timed out", "stopped after 0.5 s"),
        "absent": ("failed", "[Errno 2] No such file or directory: '/no/such/program'"),
        "after bad": ("not run", "needs bad (failed)"),
        "lacking": ("not run", "needs the Python packages dt_no_such_module"),
        "skipping": ("failed", "no test has run: === 9 skipped in 0.1s ==="),
        "testing": ("passed", "=== 2 passed, 9 skipped in 0.1s ==="),
        "measuring": ("passed", "it printed nothing"),
    }
    lines = check.page(steps, tmp_path, False, 1.0).splitlines()
    assert "| good | passed | 0 | the last ones |" in lines
    assert any(line.startswith("| bad | **failed** | 0 | status 1: a reason \\| here |") for line in lines)
    assert "| add 4 B | stream | us | 2 | 1.5 | 0.75 | <= 1 | met |" in lines
    assert "| add 4 B | value | us | 2 | 90 | 45 |  |  |" in lines
    assert "| add 4 MiB | stream | us | 2 | 2.2 | 1.1 | <= 1 | **missed** |" in lines
    assert "| peer copy | copied, 64 MiB / memcpy | ms | 1 | 1.05 | 1.05 | <= 1.11 | met |" in lines
    assert "## The end of late" in lines and "begun" in lines
    assert not any("rehearsal" in line for line in lines)


def test_all_steps_together_keep_the_deadline(check: ModuleType, tmp_path: Path) -> None:
    steps = [check.Step(f"step {i}", python("import time; time.sleep(60)"), 50) for i in range(3)]
    check.run_all(steps, tmp_path, deadline=5.5)
    assert [(step.state, step.note) for step in steps] == [
        ("timed out", steps[0].note),
        ("not run", "no time was left of the 6 s"),
        ("not run", "no time was left of the 6 s"),
    ]


def test_the_limits_leave_time_for_every_step(check: ModuleType) -> None:
    """Were build and tests to use up their limits, the benchmarks would still have the figures to make."""
    limits = {step.name: step.limit for step in check.steps("cuda", True, True)}
    assert limits["build"] + limits["tests"] + limits["bench-op_overhead"] <= check.DEADLINE < 480
    assert {"example-custom_kernel", "bench-sd3", "bench-peer_copy", "example-sd3", "example-llama"} <= limits.keys()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU, and the step passes")
def test_the_command_says_that_there_is_no_gpu_and_exits_with_1(tmp_path: Path) -> None:
    out = tmp_path / "folder" / "results.md"
    steps = ["--only", "environment", "--only", "bench-peer_copy", "--no-build", "--no-install"]
    command = [str(ROOT / "scripts" / "gpu_check.sh"), *steps, "--out", str(out)]
    environment = {"PATH": "/usr/bin:/bin", "PYTHON": sys.executable}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 1, done.stderr
    assert "environment: failed" in done.stdout and "torch sees no GPU" in done.stdout
    assert "0 of 2 steps passed" in done.stdout
    page = out.read_text()
    assert f"- torch: {torch.__version__}" in page.splitlines() and "- GPUs: none" in page.splitlines()
    assert "| bench-peer_copy | **failed** |" in page


def test_a_python_that_is_none_is_named(tmp_path: Path) -> None:
    environment = {"PATH": "/usr/bin:/bin", "PYTHON": "/no/python"}
    command = [str(ROOT / "scripts" / "gpu_check.sh")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=20, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("gpu_check: /no/python is not a Python of 3.11 or newer; name one: PYTHON=")

"""The examples do what their opening says, on one, two and four workers, and equal eager PyTorch bit by bit."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from chrome import Chrome

import dtorch
from dtorch.client import imports

if TYPE_CHECKING:
    from dtorch.client.engine import Engine

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = ROOT / "examples"
WORKERS = [1, 2, pytest.param(4, marks=pytest.mark.slow)]
needs_models = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("diffusers", "transformers", "tokenizers", "PIL")),
    reason="needs the extra 'examples': pip install 'dtorch[examples]'",
)


def run(script: str, *flags: str, cwd: Path) -> str:
    """Run an example to its end and return what it printed; a failure shows everything it said."""
    command = [sys.executable, str(EXAMPLES / script), *flags]
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, f"{command} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}"
    return done.stdout


@needs_models
@pytest.mark.parametrize("workers", WORKERS)
def test_sd3_draws_the_picture_of_eager_pytorch(workers: int, tmp_path: Path) -> None:
    flags = ["--preset", "tiny", "--workers", str(workers), "--check"]
    if workers == 2:
        flags += ["--table", "--rounds", "1", "--trace", "out/trace.json"]
    lines = run("sd3.py", *flags, cwd=tmp_path).splitlines()
    assert "check passed: latents and picture are bit-identical to eager PyTorch's" in lines
    assert lines[-1] == "picture: out/sd3.png"
    assert (tmp_path / "out" / "sd3.png").read_bytes().startswith(b"\x89PNG")
    if workers == 2:
        rows = [re.fullmatch(r"(PyTorch|dtorch) +[\d.]+ s +[\d.]+ s +[\d.]+ MiB", line) for line in lines]
        assert [row[1] for row in rows if row] == ["PyTorch", "dtorch"]
        trace = Chrome(tmp_path / "out" / "trace.json")
        assert set(trace.names.values()) == {"client", "controller", "worker-0", "worker-1"}
        assert {"draw", "SD3Transformer2DModel"} <= {e["name"] for e in trace.of("client", "span")}
        for worker in ("worker-0", "worker-1"):
            assert len(trace.of(worker, "op")) > 50


@needs_models
def test_sd3_medium_has_the_sizes_of_stable_diffusion_3_medium(tmp_path: Path) -> None:
    """Built on the meta device, which needs no memory: the parameter counts are those of the published model."""
    program = f"""
import sys, torch
sys.path.insert(0, {str(EXAMPLES)!r})
from _sd3_model import PRESETS, build_modules
with torch.device("meta"):
    modules = build_modules(PRESETS["medium"])
for name, module in modules.items():
    if isinstance(module, torch.nn.Module):
        print(name, sum(weight.numel() for weight in module.parameters()))
"""
    command = [sys.executable, "-c", program]
    lines = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=True).stdout
    assert dict(line.split() for line in lines.splitlines()) == {
        "text_encoder": "123650304",
        "text_encoder_2": "694659840",
        "text_encoder_3": "4762310656",
        "transformer": "2028328000",
        "vae": "83819683",
    }


@needs_models
@pytest.mark.parametrize("workers", WORKERS)
def test_llama_trains_and_writes_what_eager_pytorch_does(workers: int, tmp_path: Path) -> None:
    flags = ("--train", "--layers", "2", "--tokens", "16", "--workers", str(workers), "--check")
    lines = run("llama.py", *flags, cwd=tmp_path).splitlines()
    losses = next(line for line in lines if line.startswith("losses: ")).split()[1:]
    assert len(losses) == 20
    assert float(losses[-1]) < float(losses[0])
    assert lines[-1].startswith("check passed: 20 losses, ")


@pytest.mark.parametrize("workers", WORKERS)
def test_await_values_does_python_work_while_workers_compute(workers: int, tmp_path: Path) -> None:
    lines = run("await_values.py", "--workers", str(workers), "--check", cwd=tmp_path).splitlines()
    assert lines[-1] == f"check passed: {2 * workers} walks give the values of eager PyTorch"
    counts = [re.search(r"(\d+) while workers computed", line) for line in lines]
    assert int(next(count for count in counts if count)[1]) > 0


@pytest.mark.parametrize("workers", WORKERS)
def test_custom_kernel_trains_as_eager_pytorch_does(workers: int, tmp_path: Path) -> None:
    lines = run("custom_kernel.py", "--workers", str(workers), "--check", cwd=tmp_path).splitlines()
    assert lines[-1] == f"check passed: {workers} networks train as in eager PyTorch, the gradients are right"
    losses = [line.split()[3:] for line in lines if line.startswith("losses on ")]
    assert len(losses) == workers
    assert all(float(found[-1]) < float(found[0]) for found in losses)


def test_custom_kernel_is_refused_what_its_kernels_cannot_do(monkeypatch: pytest.MonkeyPatch, engine: Engine) -> None:
    monkeypatch.setattr(imports, "_modules", {})  # engines of later tests need not find it
    monkeypatch.syspath_prepend(str(EXAMPLES))
    kernels = dtorch.import_on_workers("_kernels")
    m = torch.arange(6.0, device="dtorch").view(2, 3).t()
    assert torch.equal(kernels.swiglu(m, m).cpu(), torch.nn.functional.silu(m).cpu() * m.cpu())  # any strides
    x = torch.ones(3, device="dtorch")
    with pytest.raises(RuntimeError, match=r"swiglu: shapes \(3,\) and \(2,\) differ"):
        kernels.swiglu(x, x[:2])
    with pytest.raises(RuntimeError, match="swiglu: float32 only"):
        kernels.swiglu(x.double(), x.double())


def test_a_failed_check_names_the_value_and_gives_exit_code_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    import _engine

    eager = torch.zeros(2, 3)
    ours = eager.clone()
    ours[1, 0] = 0.5
    problem = _engine.difference("latents", ours, eager)
    assert _engine.difference("latents", eager, eager) is None
    assert _engine.verdict([None, problem], "all equal") == 1
    assert capsys.readouterr().out == (
        "check failed: latents: 1 of 6 values differ, first at flat index 3: 0.5, but eager PyTorch has 0.0; "
        "the largest difference is 0.5\n"
    )
    assert _engine.verdict([None], "all equal") == 0

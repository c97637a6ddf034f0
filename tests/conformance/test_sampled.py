"""Every operator of PyTorch's own tests, with two samples each: what eager does, dtorch does, bit by bit.

Deterministic: the samples and the numbers drawn depend on the operator alone. The whole of it runs in child processes,
so an operator that crashes fails by name.
"""

from __future__ import annotations

import io
from pathlib import Path

import pytest
import torch

pytest.importorskip("expecttest", reason="torch.testing._internal needs it: pip install 'dtorch[test]'")

from . import run, samples
from .__main__ import report

PARTS = 6


@pytest.mark.slow
@pytest.mark.alarm(240)
@pytest.mark.parametrize("part", range(PARTS))
def test_operators_do_what_eager_does(part: int) -> None:
    names = sorted(samples.operators(torch.float32))[part::PARTS]
    results = run.run(names, exclusions=run.read_exclusions(), most=2)
    assert [result.name for result in results] == names
    said = io.StringIO()
    report(results, said)
    assert all(result.verdict != "failed" for result in results), "\n" + said.getvalue()


def test_every_exclusion_names_an_operator() -> None:
    known = samples.operators(torch.float32)
    assert [e for e in run.read_exclusions() if not any(e.covers(name, e.check, e.dtype) for name in known)] == []


def test_an_exclusion_without_a_reason_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "exclusions.txt"
    path.write_text("# a comment\nadd out *\n")
    with pytest.raises(ValueError, match=r"exclusions\.txt:2: OPERATOR CHECK DTYPE REASON, not 'add out \*'"):
        run.read_exclusions(path)


def test_an_exclusion_that_passes_is_an_error() -> None:
    result = run.Result("add", found={"forward": [], "out": ["sample 0: wrong"]})
    run.settle(result, [run.Exclusion("add", "out", "*", "known")], "float32")
    assert (result.verdict, result.failures) == ("excluded", {})
    run.settle(result, [run.Exclusion("add", "forward", "*", "outdated")], "float32")
    assert (result.verdict, result.needless) == ("failed", ["forward passes, yet is excluded: outdated"])

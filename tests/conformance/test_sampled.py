"""Every part of PyTorch's own tests, with two samples a name: what eager does, dtorch does, bit by bit.

Deterministic: the samples and the numbers drawn depend on the name alone. All of it runs in child processes, so what
crashes fails by name.
"""

from __future__ import annotations

import io
import os
from pathlib import Path

import pytest
import torch

pytest.importorskip("expecttest", reason="torch.testing._internal needs it: pip install 'dtorch[test]'")

from . import exclusions, parts, report, run
from .exclusions import Exclusion
from .kept import Kept
from .parts import Found, How


@pytest.mark.slow
@pytest.mark.alarm(300)
@pytest.mark.parametrize("part", parts.MODULES)
def test_a_part_does_what_eager_does(part: str) -> None:
    excluded = exclusions.read()
    tasks = run.tasks(part, How(parts.part(part).DTYPES[0], most=2), excluded)
    assert tasks
    results = run.run(tasks, exclusions=excluded, sets=os.cpu_count() or 1)
    assert [result.name for result in results] == [task.name for task in tasks]
    needless = exclusions.needless(results, excluded)
    said = io.StringIO()
    report.lines(results, needless, said)
    assert not needless and all(result.verdict != "failed" for result in results), "\n" + said.getvalue()


#: Names in exclusions.txt that torch has since 2.13 or a little before.
NEW = {"nn.functional.linear_cross_entropy.chunked*"}


def test_every_exclusion_names_what_there_is() -> None:
    known = [(p, dtype, n) for p in parts.MODULES for dtype in parts.part(p).DTYPES for n in parts.part(p).names(dtype)]
    unknown = [e for e in exclusions.read() if not any(e.covers(p, n, dtype) for p, dtype, n in known)]
    assert [e for e in unknown if torch.__version__ >= "2.13" or e.name not in NEW] == []


def test_an_exclusion_without_a_reason_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "exclusions.txt"
    path.write_text("# a comment\noperators add out *\n")
    expected = r"exclusions\.txt:2: PART NAME CHECK DTYPE REASON, not 'operators add out \*'"
    with pytest.raises(ValueError, match=expected):
        exclusions.read(path)


def _result(problem: list[str], *, loosened: int = 0, of: int = 1) -> run.Result:
    found = Found({"forward": [], "out": problem}, samples=1, of=of, comparisons=2, loosened=loosened)
    return run.Result("operators", "add", "float32", found)


def test_what_is_excluded_does_not_fail() -> None:
    line = Exclusion("operators", "add", "out", "*", "known")
    result = _result(["sample 0: wrong"])
    assert (result.verdict, result.failures) == ("failed", {"out": ["sample 0: wrong"]})
    exclusions.mark(result, [line])
    assert (result.verdict, result.failures, result.excluded) == ("excluded", {}, {"out": "known"})
    assert exclusions.needless([result], [line]) == []


def test_an_exclusion_that_passes_is_an_error() -> None:
    line = Exclusion("operators", "a*", "out", "*", "outdated")
    expected = "operators add out *: passes, yet is excluded: outdated"
    assert exclusions.needless([_result([])], [line]) == [expected]
    assert exclusions.needless([_result([], of=2)], [line]) == []  # the sample that did not run may fail
    assert exclusions.needless([_result([]), _result(["sample 0: wrong"])], [line]) == []  # in another dtype


def test_a_tolerance_that_nothing_needs_is_an_error() -> None:
    line = Exclusion("operators", "add", "within:1e-6", "*", "another kernel")
    assert exclusions.tolerance([line], "operators", "add", "float32") == 1e-6
    assert exclusions.needless([_result([], loosened=1)], [line]) == []
    assert len(exclusions.needless([_result([])], [line])) == 1


def test_a_check_in_which_eager_always_raises_compares_nothing() -> None:
    found = Found()
    for refused in (True, False):
        found.add("forward", "a case", None, refused=refused)
        found.add("plain", "a case", None, refused=True)
        found.add("errors", "a case", None, refused=True)
    found.require_results(("errors",))
    assert found.checks == {"forward": [], "errors": [], "plain": ["compared nothing: eager itself raises in all of 2"]}


def test_a_name_that_raises_fails_and_the_others_go_on() -> None:
    how = How("float32", most=1, only=("forward",))
    tasks = [run.Task("operators", name, how) for name in ("add", "no such operator", "sub")]
    results = run.run(tasks, exclusions=[])
    assert [result.verdict for result in results] == ["passed", "failed", "passed"]
    assert results[1].failures == {"run": ["its samples: the check raised KeyError: 'no such operator'"]}


def test_a_kept_result_is_not_run_again(tmp_path: Path) -> None:
    path = tmp_path / "results"
    task = run.Task("operators", "add", How("float32", most=1, only=("forward",)))
    heard: list[run.Result] = []
    first = run.run([task], exclusions=[], kept=Kept(path), tell=heard.append)
    again = run.run([task], exclusions=[], kept=Kept(path), tell=heard.append)
    assert first == again == [heard[0]] == [heard[1]]
    assert first[0].found.comparisons == 1 and first[0].seconds > 0
    assert len(path.read_text().splitlines()) == 1
    other = run.Task("operators", "add", How("float64", most=1, only=("forward",)))
    assert Kept(path).get(other) is None

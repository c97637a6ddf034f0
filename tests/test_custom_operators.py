"""Custom operators run on the workers once their module was imported there (dtorch/client/imports.py).

The operators are those of ``custom_operators.py``; as everywhere, a program runs on the CPU and on a worker and gives
the same bits.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from same import Device, eager_threads, same

import dtorch
from dtorch.client import imports

if TYPE_CHECKING:
    from dtorch.client.engine import Engine

Program = Callable[[Device], Any]
ops: Any = torch.ops.dtorch_test


@pytest.fixture(autouse=True)
def _remembered_for_one_test(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(imports, "_modules", {})


@pytest.fixture
def imported(engine: Engine) -> Iterator[Engine]:
    dtorch.import_on_workers("custom_operators")
    with eager_threads(engine.threads_per_worker):
        yield engine


def named(**programs: Program) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("program", programs.values(), ids=programs.keys())


# -- operators give eager's bits


def _trained(on: Device) -> Any:
    x, y = on.parameter(3, 4), on.parameter(3, 4)
    out = ops.mul_add(x.sin(), y, 3.0)
    out.square().sum().backward()
    return [out, x.grad, y.grad]


def _clipped(on: Device) -> Any:
    x, count = on(4, 5), on.put(torch.zeros((), dtype=torch.int64))
    before = x._version
    ops.clip(x[1], -0.5, 0.5)
    above = ops.clip_counting(x.t(), count, 0.75)
    return [x, count, above, x._version > before]


def _accumulated(on: Device) -> Any:
    x = on(3)
    back = ops.accumulate_(x, on(3))
    return [x, back, back is x]


def _drawn(on: Device) -> Any:
    torch.manual_seed(9)
    return [ops.noisy(on(5)), torch.rand(3, device=on.name), ops.noisy(on(2, 2))]


def _sized_by_data(on: Device) -> Any:
    f = (ops.positive, ops.positive_without_fake)
    return [op(x) for x in (on(9), on(9), on(9).abs(), -on(9).abs()) for op in f]


def _mapped(on: Device) -> Any:
    return torch.func.vmap(ops.mul_add, in_dims=(0, None))(on(5, 3), on(3))


def _compiled(on: Device) -> Any:
    torch._dynamo.reset()

    @torch.compile(backend="aot_eager", fullgraph=True)
    def f(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        values, _ = ops.numpy_sort(x, True)
        out: torch.Tensor = ops.mul_add(values, y)
        ops.clip(out, -1.0, 1.0)
        return out.cos()

    x, y = on.parameter(3, 4), on.parameter(3, 4)
    f(x.detach(), y).sum().backward()
    return [f(on(2, 6), on(2, 6)), y.grad]


@named(
    with_gradients=_trained,
    through_numpy=lambda on: [ops.numpy_sort(on(3, 5), True), ops.numpy_sort(on(7), False)],
    in_place=_clipped,
    in_place_returning=_accumulated,
    lists=lambda on: [ops.parts(on(6, 2), [1, 2, 3], "ab"), ops.parts(on(4), [4], "", other=on(2, 2))],
    random=_drawn,
    sized_by_data=_sized_by_data,
    numbers=lambda on: [ops.total(on(9), 3), ops.total(on(9), 0.5)],
    for_the_cpu_alone=lambda on: [
        ops.half_of(on(3, 4)),
        ops.half_of(on(3, 4), 3.0),
    ],
    taking_itself_apart=lambda on: ops.composed(on(3, 4)),
    views=lambda on: ops.mul_add(on(4, 6)[1:, ::2].t(), on(3, 3), -1.0),
    empty=lambda on: ops.mul_add(on(0, 3), on(0, 3)),
    vmap=_mapped,
    compiled=_compiled,
)
@pytest.mark.usefixtures("imported")
def test_a_custom_operator_gives_eagers_bits(program: Program) -> None:
    same(program)


def test_it_runs_on_the_worker_that_has_its_tensors(imported: Engine) -> None:
    pids = [ops.process(torch.zeros(2, device=f"dtorch:{i}"))[0].item() for i in range(2)]
    assert pids == [imported.pids()[f"worker-{i}"] for i in range(2)]


@pytest.mark.usefixtures("imported")
def test_with_a_fake_kernel_nobody_waits_for_the_worker() -> None:
    asked = dtorch.client_stats()["geometry_asks"]
    x = torch.randn(3, 7, device="dtorch")
    y = ops.mul_add(ops.half_of(x), x)
    ops.clip(y, 0.0, 1.0)
    assert dtorch.client_stats()["geometry_asks"] == asked
    ops.positive(y)
    assert dtorch.client_stats()["geometry_asks"] == asked + 1
    assert y.min().item() >= 0


# -- a mistake in an operator is an error that says so, and the worker lives on


@pytest.mark.usefixtures("imported")
def test_an_exception_of_a_kernel_is_raised_where_the_value_is_asked_for() -> None:
    x = torch.zeros(3, device="dtorch")
    y = ops.refusing(x) + 1
    with pytest.raises(
        dtorch.RemoteError, match=r"dtorch_test::refusing\(Tensor\[float32, \(3,\)\]\) failed"
    ) as raised:
        y.cpu()
    assert (raised.value.remote_type, raised.value.remote_message) == ("LookupError", "it does not like its argument")
    assert raised.value.filename == __file__


@pytest.mark.usefixtures("imported")
def test_without_a_fake_kernel_it_is_raised_at_the_call() -> None:
    with pytest.raises(LookupError, match="it does not like its argument"):
        ops.refusing_at_once(torch.zeros(3, device="dtorch"))


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("leaving", "SystemExit: 3"),
        ("mistaken", r"gave Float\[6\] where its fake kernel says Float\[3\]; correct the one"),
        ("nothing", "returned None where its schema says Tensor"),
        ("elsewhere", "where dtorch holds dense ones only"),
    ],
)
def test_a_mistaken_operator_does_not_end_the_worker(imported: Engine, name: str, text: str) -> None:
    x = torch.ones(3, device="dtorch")
    with pytest.raises(dtorch.RemoteError, match=text):
        getattr(ops, name)(x).cpu()
    assert x.sum().item() == 3
    assert not imported.dead_workers


@pytest.mark.usefixtures("imported")
def test_what_an_operator_hands_back_is_memory_of_its_own() -> None:
    x = torch.ones(3, device="dtorch")
    y = ops.itself(x)
    y += 1
    assert x.tolist() == [1, 1, 1]
    assert y.tolist() == [2, 2, 2]


@pytest.mark.usefixtures("imported")
def test_what_an_operator_does_to_its_arguments_shape_is_its_own_affair() -> None:
    x = torch.arange(3.0, device="dtorch")
    assert ops.twisting(x).shape == (3, 1)
    assert (x + 1).tolist() == [1, 2, 3]


@pytest.mark.usefixtures("imported")
def test_an_operator_cannot_make_views() -> None:
    with pytest.raises(NotImplementedError, match="gives a view of an argument"):
        ops.view_of(torch.ones(3, device="dtorch"))


# -- modules that are not there


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str, str], Path]]:
    """Writes a module where this process finds it; it is forgotten after the test."""
    monkeypatch.syspath_prepend(tmp_path)
    before = set(sys.modules)

    def write(name: str, text: str) -> Path:
        file = tmp_path / f"{name}.py"
        file.write_text(text)
        importlib.invalidate_caches()
        return file

    yield write
    for name in set(sys.modules) - before:
        if getattr(sys.modules[name], "__file__", None) == str(tmp_path / f"{name}.py"):
            del sys.modules[name]


Write = Callable[[str, str], Path]
ON_A_WORKER = "import os\nif os.environ.get('DTORCH_ROLE') == 'worker':\n    "
DEFINING = """
import torch
library = torch.library.Library("{name}", "DEF")
library.define("third(Tensor x) -> Tensor")
library.impl("third", lambda x: x / 3, "CPU")
"""


@pytest.mark.usefixtures("engine")
def test_an_operator_that_no_worker_knows_says_what_to_do(write: Write) -> None:
    write("dt_unknown", DEFINING.format(name="dt_unknown"))
    importlib.import_module("dt_unknown")
    x = torch.full((2,), 6.0, device="dtorch")
    with pytest.raises(NotImplementedError, match=r"worker 0 has no operator dt_unknown::third: .*import_on_workers"):
        torch.ops.dt_unknown.third(x)
    dtorch.import_on_workers("dt_unknown")
    assert torch.ops.dt_unknown.third(x).tolist() == [2, 2]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("raise KeyError('not today')", r"KeyError: 'not today' \(File \".*dt_failing\.py\", line 3, in <module>\)"),
        ("raise SystemExit(1)", "SystemExit: 1"),
        ("import dt_not_there", "No module named 'dt_not_there'"),
        ("import dtorch; dtorch.init()", "has no attribute 'init' in a worker process"),
    ],
)
def test_a_module_that_a_worker_cannot_import_is_named_with_the_reason(
    engine: Engine, write: Write, text: str, said: str
) -> None:
    write("dt_failing", ON_A_WORKER + text)
    with pytest.raises(dtorch.RemoteError, match="import of dt_failing failed on worker 0: ImportError: ") as raised:
        dtorch.import_on_workers("dt_failing")
    assert raised.match(said)
    assert raised.value.filename == __file__
    assert torch.ones(2, device="dtorch:1").sum().item() == 2
    assert not engine.dead_workers


@pytest.mark.usefixtures("engine")
def test_a_module_that_is_not_here_is_no_business_of_the_workers() -> None:
    with pytest.raises(ModuleNotFoundError, match="dt_nowhere"):
        dtorch.import_on_workers("dt_nowhere")


@pytest.mark.usefixtures("engine")
def test_a_worker_must_find_the_very_same_file(write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write("dt_double", "")
    importlib.import_module("dt_double")
    other = tmp_path / "other"
    other.mkdir()
    (other / "dt_double.py").write_text("")
    monkeypatch.syspath_prepend(other)
    with pytest.raises(dtorch.RemoteError, match=rf"found it in {other}/dt_double\.py, and the client imported {file}"):
        dtorch.import_on_workers("dt_double")


def test_the_script_itself_cannot_be_imported() -> None:
    with pytest.raises(ValueError, match="workers cannot import the script that runs"):
        dtorch.import_on_workers("__main__")
    with pytest.raises(TypeError, match="takes a module's name"):
        dtorch.import_on_workers(os)  # type: ignore[arg-type]


# -- before and between engines


def test_what_was_imported_before_an_engine_started_is_imported_by_it(no_engine: None, write: Write) -> None:
    write("dt_early", DEFINING.format(name="dt_early"))
    dtorch.import_on_workers("dt_early")
    for _ in range(2):
        dtorch.init(workers=2)
        assert torch.ops.dt_early.third(torch.full((2,), 6.0, device="dtorch:1")).tolist() == [2, 2]
        dtorch.shutdown()


def test_a_start_whose_workers_cannot_import_fails(no_engine: None, write: Write) -> None:
    write("dt_early_failing", ON_A_WORKER + "raise KeyError('not today')")
    dtorch.import_on_workers("dt_early_failing")
    with pytest.raises(dtorch.RemoteError, match="import of dt_early_failing failed on worker 0"):
        dtorch.init(workers=1)
    assert not dtorch.is_initialized()


def test_a_worker_that_died_is_left_out(no_engine: None, write: Write) -> None:
    write("dt_left_out", DEFINING.format(name="dt_left_out"))
    dtorch.init(workers=2)
    x = torch.full((2,), 6.0, device="dtorch:1")
    dead = torch.ones(2, device="dtorch:0") + 1
    from dtorch.client import engine

    running = engine.current()
    assert running is not None and running.wait_for_workers(60)
    os.kill(running.pids()["worker-0"], signal.SIGKILL)
    with pytest.raises(dtorch.WorkerDied):
        while True:
            (dead + 1).cpu()
    dtorch.import_on_workers("dt_left_out")
    assert torch.ops.dt_left_out.third(x).tolist() == [2, 2]


def test_an_operator_defined_anew_is_another_operator(engine: Engine) -> None:
    """Its library went, and with it all that was known of it."""
    for arguments in ("Tensor x", "Tensor x, Tensor y", "int n, Tensor x"):
        library = torch.library.Library("dt_fleeting", "DEF")
        library.define(f"op({arguments}) -> Tensor")
        x = torch.ones(2, device="dtorch")
        given = [x if a.startswith("Tensor") else 3 for a in arguments.split(", ")]
        with pytest.raises(NotImplementedError, match="has no operator dt_fleeting::op"):
            torch.ops.dt_fleeting.op(*given)
        library._destroy()
    assert not engine.dead_workers

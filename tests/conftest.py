"""What every test gets: an alarm, and a check that it left nothing behind; for those that ask, an engine to share.

* A test that takes longer than ALARM seconds fails, with the stack of every thread.
* A test after which a process or directory of an engine is left fails, and names it. The shared engine is exempt.
* ``engine`` is the running engine (two CPU workers), shared by all tests that ask for it and started anew when one of
  them has ended or hurt it; ``gpu_engine`` is the same of CUDA workers. ``no_engine``: the test starts its own.
* A test marked ``gpu`` is skipped, and counted, where PyTorch has no GPU.
"""

from __future__ import annotations

import faulthandler
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from typing import TYPE_CHECKING

import processes
import pytest

if TYPE_CHECKING:
    from dtorch.client.engine import Engine

#: Seconds that one test may take. A test that honestly needs more says so: @pytest.mark.alarm(300).
ALARM = 120
#: Seconds that the processes of an engine which has ended may take to be gone.
GONE = 2.0


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "alarm(seconds): the test may take that long instead of 120 s")
    processes.mark_this_run()
    os.environ["XDG_RUNTIME_DIR"] = tempfile.mkdtemp(prefix="dt-test-")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if marked:
        import torch

        if not torch.cuda.is_available():
            for item in marked:
                item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU"))


def pytest_unconfigure(config: pytest.Config) -> None:
    shutil.rmtree(os.environ["XDG_RUNTIME_DIR"], ignore_errors=True)


@pytest.fixture(autouse=True)
def _alarm(request: pytest.FixtureRequest) -> Iterator[None]:
    marker = request.node.get_closest_marker("alarm")
    seconds = marker.args[0] if marker else ALARM

    def ring(number: int, frame: object) -> None:
        faulthandler.dump_traceback(file=sys.__stderr__, all_threads=True)
        pytest.fail(f"took longer than {seconds} s; the stacks are on stderr", pytrace=True)

    before = signal.signal(signal.SIGALRM, ring)
    signal.alarm(seconds)
    # The handler above needs the interpreter. Should native code hold it, this ends the whole run instead.
    faulthandler.dump_traceback_later(seconds + 30, exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def _current() -> Engine | None:
    """The engine of this process, without importing dtorch for the question."""
    module = sys.modules.get("dtorch.client.engine")
    engine: Engine | None = module.current() if module else None
    return engine if engine is not None and not engine.is_over else None


@pytest.fixture(autouse=True)
def _nothing_left(_alarm: None) -> Iterator[None]:
    before = processes.ours()
    yield
    engine = _current()
    shared = processes.of_session(engine.pids()["controller"]) if engine else set()
    left = processes.wait_gone(processes.ours() - before - shared, GONE)
    folders = processes.directories() - ({engine.directory} if engine else set())
    report = ""
    if left:
        report += f"processes left:\n{processes.describe(left)}\n"
        for pid in left:
            try:
                os.kill(pid, signal.SIGKILL)  # not to disturb the tests to come
            except ProcessLookupError:
                pass
    if folders:
        report += f"directories left: {sorted(folders)}\n"
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)
    if report:
        pytest.fail(report, pytrace=False)


@pytest.fixture
def engine(_engine_at_end: None) -> Engine:
    """The shared engine: two CPU workers of one thread, all alive and up."""
    return _shared("cpu")


@pytest.fixture
def gpu_engine(_engine_at_end: None) -> Engine:
    """The same of two CUDA workers; with one GPU they share it."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read by every process when it first multiplies
    return _shared("cuda")


def _shared(device: str) -> Engine:
    import dtorch

    running = _current()
    if running is None or running.workers != 2 or running.device != device or running.dead_workers:
        dtorch.shutdown()
        dtorch.init(workers=2, device=device)
        running = _current()
        assert running is not None
        assert running.wait_for_workers(60)
    return running


@pytest.fixture(scope="session")
def _engine_at_end() -> Iterator[None]:
    yield
    import dtorch

    dtorch.shutdown()


@pytest.fixture
def no_engine() -> Iterator[None]:
    """None runs when the test starts, and what it started is ended after it."""
    import dtorch

    dtorch.shutdown()
    yield
    dtorch.shutdown()

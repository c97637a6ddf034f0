"""However a client, the controller, the fork server or a worker ends: nothing stays, and who lives is told.

ENG and LIV are the invariants in ``dtorch/client/engine.py`` and ``dtorch/controller/workers.py``.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import leaving_client
import processes
import pytest
import torch

import dtorch
from dtorch.client import engine as engine_module

if TYPE_CHECKING:
    from dtorch.client.engine import Engine

#: Seconds within which everything has to be gone, from the end of the process that matters.
GONE = 2.0
PATIENCE = 60


@contextmanager
def client(work: str, end: str) -> Iterator[tuple[subprocess.Popen[str], dict[str, Any]]]:
    """A client process in a group of its own, and what it announced: its directory and its engine's pids."""
    process = subprocess.Popen(
        [sys.executable, str(Path(leaving_client.__file__)), work, end],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        process_group=0,
        env={**os.environ, "PYTHONPATH": str(Path(dtorch.__file__).parent.parent)},
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line, process.communicate()[1]
        yield process, json.loads(line)
    finally:
        process.kill()
        process.communicate()


def nothing_stays(announced: dict[str, Any], since: float) -> None:
    leader = announced["controller"]
    assert processes.wait_gone(processes.of_session(leader), since + GONE - time.monotonic()) == set()
    assert processes.of_session(leader) == set()
    gone = processes.wait_until(lambda: not os.path.exists(announced["directory"]), since + GONE - time.monotonic())
    assert gone, f"{announced['directory']} stays"


# -- the client ends


@pytest.mark.parametrize("work", ["idle", "busy", "starting"])
@pytest.mark.parametrize(("end", "status"), [("normal", 0), ("exception", 1), ("_exit", 7), ("thread", 0), ("fork", 0)])
def test_eng1_liv1_a_client_that_ends_leaves_nothing(work: str, end: str, status: int) -> None:
    with client(work, end) as (process, announced):
        announced_at = time.monotonic()
        stderr = process.communicate(timeout=PATIENCE)[1]
        ended = time.monotonic()
        assert process.returncode == status, stderr
        nothing_stays(announced, ended)
        if end == "fork":
            pass  # it went on working after the fork, which takes as long as starting does
        else:
            assert ended - announced_at < GONE + 1.0, "ENG-2: shutting down takes at most two seconds"
        if end == "exception":
            assert "the program's own mistake" in stderr


@pytest.mark.parametrize("work", ["idle", "busy", "starting"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_liv1_liv6_a_client_ended_by_a_signal_leaves_nothing(work: str, number: signal.Signals) -> None:
    with client(work, "wait") as (process, announced):
        sent = time.monotonic()
        os.killpg(process.pid, number)  # as a terminal does
        stderr = process.communicate(timeout=PATIENCE)[1]
        nothing_stays(announced, sent)
        if number == signal.SIGINT:
            assert "KeyboardInterrupt" in stderr
        else:
            assert process.returncode == -number


def test_liv1_a_client_that_becomes_another_program_leaves_nothing() -> None:
    with client("idle", "exec") as (process, announced):
        assert processes.wait_until(lambda: processes.name_of(process.pid) == "sleep", PATIENCE)
        nothing_stays(announced, time.monotonic())
        assert processes.alive(process.pid)


def test_client_and_controller_killed_at_once_leave_a_directory_that_the_next_engine_sweeps(no_engine: None) -> None:
    with client("idle", "wait") as (process, announced):
        os.kill(announced["controller"], signal.SIGSTOP)  # so that it cannot clean up before it is killed too
        process.kill()
        process.wait()
        os.kill(announced["controller"], signal.SIGKILL)
        assert processes.wait_gone(processes.of_session(announced["controller"]), GONE) == set()
        assert os.path.exists(announced["directory"])
        dtorch.init(workers=1, device="cpu")
        assert not os.path.exists(announced["directory"])


# -- the client lives


def fresh(workers: int = 2) -> Engine:
    dtorch.init(workers=workers, device="cpu")
    current = engine_module.current()
    assert current is not None
    assert current.wait_for_workers(PATIENCE)
    return current


def kill_while_waiting(pid: int, number: signal.Signals, wait: Callable[[], object]) -> float:
    """Call ``wait`` and, once the process computes, kill it; returns when that was."""
    killed: list[float] = []

    def kill() -> None:
        processes.wait_until(processes.is_computing(pid), PATIENCE)
        killed.append(time.monotonic())
        os.kill(pid, number)

    killer = threading.Thread(target=kill)
    killer.start()
    try:
        wait()
    finally:
        killer.join()
    return killed[0]


@pytest.mark.parametrize(
    "ask",
    [
        lambda t: t.item(),
        lambda t: t.to_torch_async().get(timeout=PATIENCE),
        lambda t: dtorch.synchronize(),
        lambda t: t.cpu(),
    ],
    ids=["item", "future", "synchronize", "cpu"],
)
def test_eng4_who_waits_on_a_worker_that_dies_is_told(no_engine: None, ask: Callable[[torch.Tensor], object]) -> None:
    engine = fresh()
    result = leaving_client.make_busy(0)
    start = time.monotonic()
    with pytest.raises(dtorch.WorkerDied) as caught:
        kill_while_waiting(engine.pids()["worker-0"], signal.SIGKILL, lambda: ask(result))
    assert (caught.value.worker, caught.value.status) == (0, "killed by SIGKILL")
    assert str(caught.value).startswith("worker 0 died: killed by SIGKILL.")
    assert time.monotonic() - start < PATIENCE
    # The other one goes on, and what is asked of the dead one fails at once.
    assert leaving_client.value(1) == 6.0
    with pytest.raises(dtorch.WorkerDied):
        leaving_client.value(0)
    assert set(engine.pids()) == {"controller", "worker-1"}


def test_a_crash_is_told_with_the_last_lines(no_engine: None, capfd: pytest.CaptureFixture[str]) -> None:
    engine = fresh()
    result = leaving_client.make_busy(0)
    with pytest.raises(dtorch.WorkerDied) as caught:
        kill_while_waiting(engine.pids()["worker-0"], signal.SIGSEGV, result.item)
    assert caught.value.status == "killed by SIGSEGV"
    assert "Fatal Python error: Segmentation fault" in caught.value.output
    assert "Fatal Python error: Segmentation fault" in str(caught.value)
    assert processes.wait_until(lambda: "[worker-0] Fatal Python error" in capfd.readouterr().err, PATIENCE)


def test_eng4_who_waits_is_told_of_the_controllers_death_and_may_start_again(no_engine: None) -> None:
    engine = fresh()
    leader = engine.pids()["controller"]
    result = leaving_client.make_busy(0)
    computing = processes.is_computing(engine.pids()["worker-0"])

    def kill() -> None:
        processes.wait_until(computing, PATIENCE)
        os.kill(leader, signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    with pytest.raises(dtorch.ControllerDied) as caught:
        result.item()
    told = time.monotonic()
    killer.join()
    assert caught.value.status == "killed by SIGKILL"
    nothing_stays({"controller": leader, "directory": engine.directory}, told)
    with pytest.raises(dtorch.DtorchError):
        leaving_client.value(1)
    dtorch.shutdown()
    fresh()
    assert leaving_client.value(1) == 6.0


def test_a_failing_controller_is_told_with_its_traceback(no_engine: None) -> None:
    import msgpack
    import zmq

    engine = fresh()
    result = leaving_client.make_busy(0)
    with zmq.Context() as context, context.socket(zmq.PUSH) as intruder:
        intruder.linger = 5000
        intruder.connect(f"ipc://{engine.directory}/in")
        intruder.send_multipart([msgpack.packb([2, 1]), b"\xc1"])
    with pytest.raises(dtorch.ControllerDied) as caught:
        result.item()
    assert caught.value.status == "exit status 1"
    assert "record stream: byte 0: msgpack: expected an array, found byte 0xc1" in caught.value.output


def test_liv2_who_waits_is_told_of_the_fork_servers_death(no_engine: None) -> None:
    engine = fresh()
    result = leaving_client.make_busy(0)
    server = processes.parent_of(engine.pids()["worker-0"])
    os.kill(server, signal.SIGKILL)
    with pytest.raises(dtorch.WorkerDied) as caught:
        result.item()
    assert caught.value.status == "ended with the fork server (killed by SIGKILL)"


def test_eng2_shutdown_again_and_from_many_threads(no_engine: None) -> None:
    engine = fresh()
    leaving_client.make_busy(0)
    leader = engine.pids()["controller"]
    start = time.monotonic()
    threads = [threading.Thread(target=dtorch.shutdown) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    dtorch.shutdown()
    assert time.monotonic() - start < GONE
    nothing_stays({"controller": leader, "directory": engine.directory}, start)


def test_eng3_a_forked_child_has_no_engine(no_engine: None) -> None:
    fresh()
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            dtorch.shutdown()
            os.write(write, str(engine_module.current()).encode())
        finally:
            os._exit(0)
    os.close(write)
    assert os.waitpid(pid, 0)[1] == 0
    assert os.read(read, 100) == b"None"
    os.close(read)
    assert leaving_client.value(0) == 6.0


def test_eight_workers_import_torch_once(no_engine: None) -> None:
    engine = fresh(8)
    pids = engine.pids()
    workers = [pid for name, pid in pids.items() if name != "controller"]
    (server,) = {processes.parent_of(pid) for pid in workers}
    for pid, has_torch in ((pids["controller"], False), (server, True)):
        with open(f"/proc/{pid}/maps") as maps:
            assert ("libtorch" in maps.read()) == has_torch
    # The fork server must stay single-threaded for its forks to be safe.
    assert len(os.listdir(f"/proc/{server}/task")) == 1
    # A worker shares the fork server's pages: its own ones are a fraction of a torch import's.
    assert max(_private_mib(pid) for pid in workers) < 60


def _private_mib(pid: int) -> float:
    with open(f"/proc/{pid}/smaps_rollup") as file:
        return sum(int(line.split()[1]) for line in file if line.startswith("Private_")) / 1024


def test_init_says_why_the_controller_cannot_run(no_engine: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DTORCH_QUIET", "maybe")
    with pytest.raises(dtorch.ControllerDied) as caught:
        dtorch.init(workers=1, device="cpu")
    assert "DTORCH_QUIET='maybe' is not a whole number" in caught.value.output


def test_a_folder_with_a_long_name_is_not_used(
    no_engine: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    deep = tmp_path / ("x" * 100)
    deep.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(deep))
    monkeypatch.setattr("tempfile.tempdir", os.environ["HOME"] if len(os.environ["HOME"]) < 20 else "/tmp")
    engine = fresh(1)
    assert not engine.directory.startswith(str(deep))
    assert list(deep.iterdir()) == []
    dtorch.shutdown()
    assert not os.path.exists(engine.directory)
    shutil.rmtree(deep)

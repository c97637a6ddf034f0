"""The controller: handshake, routing, workers' output, and the deaths of all around it. The workers are fakes."""

from __future__ import annotations

import os
import shutil
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import msgpack
import processes
import pytest
from bare_controller import PATIENCE, BareController, bare_controller

from dtorch.controller import process
from dtorch.protocol import VERSION, Message, Record

#: Seconds within which everything of an engine has to be gone.
GONE = 2.0


def everything_goes(controller: BareController) -> None:
    """Within GONE seconds from now, no process of its session and not its directory."""
    start = time.monotonic()
    leader = controller.process.pid
    assert processes.wait_gone({leader}, GONE) == set()
    assert processes.wait_until(lambda: not processes.of_session(leader), start + GONE - time.monotonic())


# -- handshake


def test_handles_every_message_of_the_protocol() -> None:
    assert set(process.FROM_CLIENT) == {m for m in Message if m < 10}
    assert set(process.FROM_WORKER) == {m for m in Message if 20 <= m < 30}


def test_wire5_hello_is_answered_with_ready() -> None:
    with bare_controller() as c:
        c.send(Message.HELLO, VERSION, 2, "cpu", 1)
        assert c.receive() == [Message.READY, VERSION]


@pytest.mark.parametrize("fields", [(VERSION + 1, 2, "cpu", 1), (VERSION + 1,), (VERSION + 1, 2, "cpu", 1, "new")])
def test_wire5_another_version_is_refused(fields: tuple[object, ...]) -> None:
    with bare_controller() as c:
        c.send(Message.HELLO, *fields)
        kind, reason = c.receive()
        assert kind == Message.REFUSED
        assert f"the client speaks version {VERSION + 1} of the protocol, the controller version {VERSION}" in reason


def test_hello_is_answered_before_anything_else_is_told() -> None:
    with bare_controller(1, FAKE_PRELOAD="fail") as c:
        assert processes.wait_until(lambda: "OSError" in c.output(), PATIENCE)
        c.hello()
        assert c.receive()[:2] == [Message.WORKER_DIED, 0]


def test_another_number_of_workers_is_refused() -> None:
    with bare_controller(2) as c:
        c.send(Message.HELLO, VERSION, 3, "cpu", 1)
        assert c.receive() == [
            Message.REFUSED,
            "the client asks for 3 workers, the controller was started with 2",
        ]


def test_wire5_a_worker_of_another_version_ends_the_controller() -> None:
    with bare_controller(1, FAKE_VERSION="99") as c:
        assert c.wait() == 1
        assert f"worker 0 says it is worker 0 and speaks version 99 of the protocol, not {VERSION}" in c.errors()


def test_ready_does_not_wait_for_the_workers(tmp_path: object) -> None:
    gate = f"{tmp_path}/gate"
    os.mkfifo(gate)
    with bare_controller(2, FAKE_GATE=gate) as c:
        c.hello()
        c.records((Record.SEED, 1, 0, 5), (Record.SEED, 0, 0, 5), (Record.RELEASE, 1, 70, 1))
        c.records((Record.SEED, 1, 0, 6), (Record.SYNC, 1, 42))
        opened = os.open(gate, os.O_RDWR)  # lets all readers in
        noted = [["RELEASE", 70, 1], ["SEED", 1], ["SEED", 2], 3]
        assert c.receive_kind(Message.DONE) == [Message.DONE, 42, 1, noted]
        os.close(opened)


# -- routing


def test_records_go_to_their_workers_in_order() -> None:
    with bare_controller(3) as c:
        c.up()
        c.records((Record.SEED, 2, 0, 1), (Record.SEED, 0, 0, 1), (Record.MAP, 2, 1, 2, 3, 4, 5, 6, False, 0, 7))
        c.records((Record.RELEASE, 2, 9, 2), (Record.SEED, 2, 0, 1))
        assert c.sync(2) == [["SEED", 1], ["MAP", 2], ["RELEASE", 9, 2], ["SEED", 3], 4]
        assert c.sync(0) == [["SEED", 1], 2]
        assert c.sync(1) == [1]


def test_a_large_stream_of_one_worker_arrives_whole() -> None:
    with bare_controller(1) as c:
        c.up()
        c.records(*[(Record.PUT, 0, n, None, b"x" * 1000, 0) for n in range(1000)])
        assert c.sync(0)[-2:] == [["PUT", 1000], 1001]


@pytest.mark.parametrize("kind", [Message.VALUE, Message.META, Message.DONE, Message.ERROR])
def test_replies_are_passed_on_as_they_are(kind: Message) -> None:
    frame = msgpack.packb([int(kind), 7, 1, {"any": "thing"}])
    with bare_controller(2) as c:
        c.up()
        c.order(1, "raw", [frame, b"a payload", b""])
        assert c.pull.recv_multipart() == [frame, b"a payload", b""]


def test_progress_is_noted_and_passed_on() -> None:
    with bare_controller(1) as c:
        c.up()
        c.order(0, "progress", 1)
        assert c.receive() == [Message.PROGRESS, 0, 1]
        c.order(0, "progress", 5)
        assert c.wait() == 1
        assert "worker 0 says it executed record 5, but it had reached 1 of 2" in c.errors()


def test_transfers_reach_their_worker_and_come_back() -> None:
    with bare_controller(2) as c:
        c.up()
        segment = [0, 17, 0, 4096, 5]
        c.order(0, "transfer", [1, segment])
        assert processes.wait_until(lambda: ["TRANSFER_DONE", 5, 0, 1] in c.sync(0), PATIENCE)
        c.order(0, "transfer", [1, b"bytes"])
        error = ["op", "IndexError", "text", "op", "", 0, 0]
        c.order(0, "transfer", [1, error])
        assert processes.wait_until(lambda: ["INCOMING", 1, error] in c.sync(1), PATIENCE)
        assert processes.wait_until(lambda: ["INCOMING", 1, b"bytes"] in c.sync(1), PATIENCE)
        assert ["INCOMING", 1, segment] in c.sync(1)


def test_gpu_memory_on_loan_is_passed_on_and_taken_back() -> None:
    with bare_controller(2) as c:
        c.up()
        lent = [0, b"handle", 512, b"event", 4096, 5]
        c.order(0, "transfer", [1, lent])
        assert processes.wait_until(lambda: ["INCOMING", 1, lent] in c.sync(1), PATIENCE)
        c.order(0, "raw", [msgpack.packb([int(Message.FREED), 0, 1, [b"handle"]])])
        assert processes.wait_until(lambda: ["FREED", 0, 1, [b"handle"]] in c.sync(1), PATIENCE)
        assert ["TRANSFER_DONE", 5, 0, 1] not in c.sync(0)
        c.order(1, "exit", 1)
        assert processes.wait_until(lambda: ["TRANSFER_DONE", 5, 0, 1] in c.sync(0), PATIENCE)


def test_nobody_takes_back_what_another_lent() -> None:
    with bare_controller(2) as c:
        c.up()
        c.order(1, "raw", [msgpack.packb([int(Message.FREED), 0, 1, [b"handle"]])])
        assert c.wait() == 1
        assert "worker 1 took memory back from worker 1 that worker 0 had lent" in c.errors()


@pytest.mark.parametrize(
    ("frame", "error"),
    [
        (b"", "no message to the controller starts with bytes ''"),
        (b"\x93\x63\x01\x02", "no message to the controller starts with bytes '9363'"),
        (msgpack.packb([int(Message.WORKER_HELLO), 1, 0, 1]), "starts with bytes '9414'"),
        (msgpack.packb([int(Message.RECORDS)]), "RECORDS has 0 fields, not 1 (count)"),
    ],
)
def test_a_client_that_breaks_the_protocol_ends_the_controller(frame: bytes, error: str) -> None:
    with bare_controller(1) as c:
        c.hello()
        c.push.send_multipart([frame, b""])
        assert c.wait() == 1
        assert error in c.errors()


def test_a_malformed_record_is_named_by_its_byte() -> None:
    with bare_controller(1) as c:
        c.hello()
        c.send(Message.RECORDS, 1, frames=(b"\x93\x0b\x00\x00",))
        assert c.wait() == 1
        assert "ValueError: record stream: byte 0: a record of kind 11 has 4 elements, not 3" in c.errors()
        everything_goes(c)


def test_a_wrong_count_of_records_is_refused() -> None:
    with bare_controller(1) as c:
        c.hello()
        c.send(Message.RECORDS, 3, frames=(msgpack.packb([Record.SYNC, 0, 1]),))
        assert c.wait() == 1
        assert "a RECORDS message says 3 records and holds 1" in c.errors()


def test_records_before_hello_are_refused() -> None:
    with bare_controller(1) as c:
        c.records((Record.SYNC, 0, 1))
        assert c.wait() == 1
        assert "records came before a HELLO that was accepted" in c.errors()


# -- what workers print


def test_output_is_forwarded_line_by_line_under_the_workers_name() -> None:
    with bare_controller(2) as c:
        c.up()
        c.order(1, "print", "hello from here\nand here")
        c.order(0, "print", "näh")
        expected = {"[worker-1] hello from here", "[worker-1] and here", "[worker-0] näh"}
        assert processes.wait_until(lambda: expected <= set(c.output().splitlines()), PATIENCE)


def test_quiet_keeps_the_output_away() -> None:
    with bare_controller(1, DTORCH_QUIET="1") as c:
        c.up()
        c.order(0, "print", "hello")
        c.order(0, "exit", 3)
        assert c.receive_kind(Message.WORKER_DIED) == [Message.WORKER_DIED, 0, "exit status 3", "hello"]
        assert c.output() == ""


def test_a_stderr_that_nobody_reads_stops_nothing() -> None:
    reader, writer = os.pipe()
    with bare_controller(1, stderr_fd=writer) as c:
        c.up()
        c.order(0, "flood", 20_000)  # 2 MB; the pipe takes 64 KiB
        assert c.sync(0)
        c.send(Message.SHUTDOWN)
        everything_goes(c)
    os.close(reader)
    os.close(writer)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can act as another user")
def test_another_user_is_refused_at_the_log_even_where_modes_let_it_in() -> None:
    program = (
        "import os, socket, sys; s = socket.socket(socket.AF_UNIX); os.setuid(65534); s.connect(sys.argv[1]); "
        "print(s.recv(1))"
    )
    with bare_controller(1) as c:
        c.up()
        command = [sys.executable, "-S", "-c", program, f"{c.directory}/log"]
        attempt = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
        assert "PermissionError" in attempt.stderr
        # Every folder above the socket lets the other user through: the mode bits alone would have let it in.
        ways = [path for path in (Path(c.directory), *Path(c.directory).parents) if not os.stat(path).st_mode & 0o001]
        modes = {path: stat.S_IMODE(os.stat(path).st_mode) for path in ways}
        try:
            for path, mode in modes.items():
                os.chmod(path, mode | 0o011)
            os.chmod(f"{c.directory}/log", 0o777)
            attempt = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
        finally:
            for path, mode in modes.items():
                os.chmod(path, mode)
        assert attempt.stdout == "b''\n"
        assert "refused a process of user 65534 at the log socket" in c.errors()


# -- deaths


@pytest.mark.parametrize(
    ("order", "value", "status"),
    [
        ("exit", 3, "exit status 3"),
        ("exit", 255, "exit status 255"),
        ("exit", 0, "exit status 0"),
        ("signal", signal.SIGKILL, "killed by SIGKILL"),
        ("signal", signal.SIGSEGV, "killed by SIGSEGV"),
        ("signal", 40, "killed by signal 40"),
    ],
)
def test_liv4_a_workers_death_is_told_with_status_and_last_lines(order: str, value: int, status: str) -> None:
    with bare_controller(3) as c:
        c.up()
        c.order(1, "flood", 30)
        c.order(1, "print", "last words")
        c.order(1, order, int(value))
        _, worker, told, output = c.receive_kind(Message.WORKER_DIED)
        assert (worker, told) == (1, status)
        lines = output.splitlines()
        assert len(lines) == 20
        assert lines[-1] == "last words"
        assert lines[0] == f"{11:100}"
        # The others are told, and go on.
        c.order(1, "print", "dropped")
        assert ["PEER_DIED", 1, status] in c.sync(0)
        assert ["PEER_DIED", 1, status] in c.sync(2)


def test_after_a_death_the_other_workers_go_on() -> None:
    """Records for the dead one are dropped, whoever else the message is for; the rest is routine as before."""
    with bare_controller(3) as c:
        c.up()
        c.order(1, "exit", 1)
        c.receive_kind(Message.WORKER_DIED)
        c.records((Record.SEED, 1, 0, 1), (Record.SEED, 2, 0, 1), (Record.SEED, 1, 0, 1), (Record.SYNC, 0, 7))
        assert c.receive_kind(Message.DONE)[1:3] == [7, 0]
        assert c.sync(2)[-2:] == [["SEED", 1], 2]


def test_the_traceback_of_a_failing_worker_is_among_its_last_lines() -> None:
    with bare_controller(1) as c:
        c.up()
        c.order(0, "nonsense")
        _, _, status, output = c.receive_kind(Message.WORKER_DIED)
        assert status == "exit status 1"
        assert output.splitlines()[-1] == "AssertionError: nonsense"


def test_a_transfer_to_a_dead_worker_is_released() -> None:
    with bare_controller(2) as c:
        c.up()
        c.order(1, "exit", 1)
        c.receive_kind(Message.WORKER_DIED)
        c.order(0, "transfer", [1, [0, 17, 0, 4096, 5]])
        assert processes.wait_until(lambda: ["TRANSFER_DONE", 5, 0, 1] in c.sync(0), PATIENCE)


def test_a_transfer_is_released_when_its_worker_dies_before_taking_it() -> None:
    with bare_controller(2) as c:
        c.up()
        c.order(1, "keep")
        c.order(0, "transfer", [1, [0, 17, 0, 4096, 5]])
        assert processes.wait_until(lambda: ["INCOMING", 1, [0, 17, 0, 4096, 5]] in c.sync(1), PATIENCE)
        assert ["TRANSFER_DONE", 5, 0, 1] not in c.sync(0)
        c.order(1, "exit", 1)
        assert processes.wait_until(lambda: ["TRANSFER_DONE", 5, 0, 1] in c.sync(0), PATIENCE)


def test_liv2_the_fork_servers_death_is_every_workers() -> None:
    with bare_controller(2) as c:
        pids = c.up()
        (server,) = {processes.parent_of(pid) for pid in pids.values()}
        assert processes.parent_of(server) == c.process.pid
        os.kill(server, signal.SIGKILL)
        deaths = [c.receive_kind(Message.WORKER_DIED)[1:3] for _ in range(2)]
        assert sorted(deaths) == [[w, "ended with the fork server (killed by SIGKILL)"] for w in range(2)]
        assert processes.wait_gone(set(pids.values()), GONE) == set()
        c.send(Message.SHUTDOWN)
        everything_goes(c)


def test_a_fork_server_that_cannot_import_is_told_with_its_traceback() -> None:
    with bare_controller(2, FAKE_PRELOAD="fail") as c:
        c.hello()
        for worker in range(2):
            _, dead, status, output = c.receive_kind(Message.WORKER_DIED)
            assert (dead, status) == (worker, "ended with the fork server (exit status 1)")
            assert output.splitlines()[-1] == "OSError: libfake.so: cannot open shared object file"


def test_all_workers_are_children_of_one_fork_server() -> None:
    with bare_controller(8) as c:
        pids = c.up()
        assert len({processes.parent_of(pid) for pid in pids.values()}) == 1
        # controller, fork server, the standard library's resource tracker, workers: nothing else
        assert len(processes.of_session(c.process.pid)) == 3 + 8


def test_the_controller_has_no_torch() -> None:
    with bare_controller(1) as c:
        c.up()
        with open(f"/proc/{c.process.pid}/maps") as maps:
            assert "libtorch" not in maps.read()


# -- the end


@pytest.mark.parametrize("how", ["shutdown", "hang up"])
@pytest.mark.parametrize("workers_are", ["idle", "stuck", "starting"])
def test_liv5_the_end_is_quick_whatever_the_workers_do(how: str, workers_are: str) -> None:
    environment = {"FAKE_PRELOAD": "hang"} if workers_are == "starting" else {}
    with bare_controller(2, **environment) as c:
        if workers_are == "starting":
            c.hello()
        else:
            c.up()
        if workers_are == "stuck":
            c.order(1, "hang")
            assert processes.wait_until(lambda: "hanging" in c.output(), PATIENCE)
        if how == "shutdown":
            c.send(Message.SHUTDOWN)
        else:
            c.hang_up()
        everything_goes(c)
        assert c.wait() == 0
        assert not os.path.exists(c.directory)
        assert c.errors() == ""


@pytest.mark.parametrize("workers_are", ["idle", "stuck", "starting"])
def test_liv2_a_killed_controller_takes_all_with_it(workers_are: str) -> None:
    environment = {"FAKE_PRELOAD": "hang"} if workers_are == "starting" else {}
    with bare_controller(2, **environment) as c:
        if workers_are == "starting":
            c.hello()
            # Not before the fork server has bound itself to its parent, which is the first thing it does.
            leader = c.process.pid
            assert processes.wait_until(
                lambda: "fake-preload" in map(processes.name_of, processes.of_session(leader)), PATIENCE
            )
        else:
            c.up()
        if workers_are == "stuck":
            c.order(1, "hang")
            assert processes.wait_until(lambda: "hanging" in c.output(), PATIENCE)
        c.process.kill()
        everything_goes(c)
        assert os.path.exists(c.directory)  # nobody is left who could remove it: the client does
        shutil.rmtree(c.directory)


def test_liv6_ctrl_c_does_not_reach_the_engine() -> None:
    with bare_controller(2) as c:
        pids = c.up()
        os.killpg(c.process.pid, signal.SIGINT)
        assert c.sync(0)
        assert c.sync(1)
        assert all(processes.alive(pid) for pid in pids.values())


def test_liv1_a_client_that_is_not_the_parent_counts_as_gone() -> None:
    with bare_controller(1) as c:
        c.up()
        options = ["--workers=1", "--threads=1", "--device=cpu", "--client-pid=1", "--stderr-fd=2"]
        os.mkdir(f"{c.directory}/other")
        orphan = subprocess.run(
            [sys.executable, "-m", "dtorch.controller", f"--directory={c.directory}/other", *options],
            stdin=subprocess.PIPE,
            env={**os.environ, "DTORCH_ROLE": "controller"},
            timeout=PATIENCE,
        )
        assert orphan.returncode == 0
        assert not os.path.exists(f"{c.directory}/other")


def test_liv3_a_child_made_while_the_others_are_ended_is_ended_too() -> None:
    """The starter's thread may be launching a process when the controller leaves."""
    program = """
import subprocess, sys, threading, time
from dtorch import posix
ended = threading.Event()
real = posix.children
def slow():
    found = real()
    if not found and not ended.is_set():  # a child is born after nobody was found
        ended.set()
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    return found
posix.children = slow
posix.adopt_orphans()
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
posix.end_descendants()
print(len(real()))
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "DTORCH_ROLE": "controller"},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=True,
    )
    assert done.stdout == "0\n", done.stderr

"""The engine's directory: private, locked while in use, swept when left."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from dtorch.client.rundir import RunDirectory, sweep
from dtorch.errors import EngineError


@pytest.fixture
def base(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder to make directories in; pytest's own have paths too long for a socket's."""
    with tempfile.TemporaryDirectory(dir=os.environ["XDG_RUNTIME_DIR"]) as folder:
        monkeypatch.setenv("XDG_RUNTIME_DIR", folder)
        yield Path(folder)


@pytest.fixture
def dead_pid() -> int:
    process = subprocess.Popen([sys.executable, "-S", "-c", ""])
    process.wait()
    return process.pid


def test_is_private_and_named_after_its_owner(base: Path) -> None:
    directory = RunDirectory()
    assert Path(directory.path).parent == base
    assert Path(directory.path).name.startswith(f"dtorch-{os.getuid()}-{os.getpid()}-")
    assert os.stat(directory.path).st_mode & 0o777 == 0o700
    Path(directory.path, "in").touch()
    directory.remove()
    directory.remove()
    assert list(base.iterdir()) == []


def test_sweeps_what_a_dead_client_left(base: Path, dead_pid: int) -> None:
    left = base / f"dtorch-{os.getuid()}-{dead_pid}-0123abcd"
    left.mkdir()
    (left / "workers").touch()
    directory = RunDirectory()
    assert not left.exists()
    directory.remove()


def test_does_not_sweep_what_is_in_use_or_not_ours(base: Path, dead_pid: int) -> None:
    kept = [
        base / f"dtorch-{os.getuid()}-{os.getpid()}-0123abcd",  # the client lives
        base / f"dtorch-{os.getuid() + 1}-{dead_pid}-0123abcd",  # another user's
        base / f"dtorch-{os.getuid()}-{dead_pid}",  # not our name
    ]
    for path in kept:
        path.mkdir()
    link = base / f"dtorch-{os.getuid()}-{dead_pid}-89ab"
    link.symlink_to(kept[0])
    assert sweep(str(base)) == []
    assert all(path.exists() for path in [*kept, link])


def test_a_locked_directory_is_in_use_even_if_its_pid_seems_dead(base: Path, dead_pid: int) -> None:
    """As in another container, which counts its processes apart."""
    directory = RunDirectory()
    moved = base / f"dtorch-{os.getuid()}-{dead_pid}-0123abcd"
    os.rename(directory.path, moved)
    assert sweep(str(base)) == []
    directory.remove()  # gives up the lock
    assert sweep(str(base)) == [str(moved)]


def test_says_what_to_do_when_there_is_no_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", "")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "missing"))
    monkeypatch.setattr("os.access", lambda path, mode: False)
    with pytest.raises(EngineError, match="set TMPDIR to one that is"):
        RunDirectory()

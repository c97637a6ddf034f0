"""native/build.py: what it refuses, and what it does not do twice; dtorch/_buildcheck.py: what it will not load; and
what a wheel holds.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import zipfile
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

import dtorch
from dtorch import _buildcheck

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def build(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    """native/build.py with a root of its own that holds one module of one source and one header."""
    spec = importlib.util.spec_from_file_location("dtorch_native_build", ROOT / "native" / "build.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)  # dataclasses look their module up
    spec.loader.exec_module(module)
    monkeypatch.delenv("DTORCH_SANITIZE", raising=False)
    source = tmp_path / "native" / "thing"
    source.mkdir(parents=True)
    (source / "value.h").write_text("#pragma once\ninline int value() { return 1; }\n")
    (source / "a.cpp").write_text('#include "thing/value.h"\nint a() { return value(); }\n')
    (source / "b.cpp").write_text("int b() { return 2; }\n")
    (tmp_path / "setup.cfg").write_text((ROOT / "setup.cfg").read_text())
    monkeypatch.setattr(module, "ROOT", tmp_path)
    monkeypatch.setattr(module, "MODULES", (module.Module("_thing", "thing", ()),))
    return module


def _torch_of(build: ModuleType, monkeypatch: pytest.MonkeyPatch, folder: Path, version: str) -> None:
    """Makes the build see one torch of that version, and no other."""
    (folder / "lib").mkdir(parents=True)
    (folder / "lib" / "libc10.so").write_bytes(b"basic_string NSt7__cxx1112basic_string")
    (folder / "include" / "ATen").mkdir(parents=True)
    (folder / "include" / "ATen" / "ATen.h").touch()
    (folder / "version.py").write_text(f"from typing import Optional\n__version__ = '{version}'\ndebug = False\n")
    monkeypatch.setattr(build, "_torch_folders", lambda: [folder.parent / "elsewhere" / "torch", folder])


def _edit(file: Path, text: str) -> None:
    """Writes a file so that it is newer than anything built before, whatever the clock's resolution."""
    before = file.stat().st_mtime_ns
    file.write_text(text)
    later = max(before, file.stat().st_mtime_ns) + 10_000_000_000
    os.utime(file, ns=(later, later))


# ------------------------------------------------------------------------------------------------------------ refusals


def test_a_missing_torch_is_named_with_the_command_that_installs_it(
    build: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "_torch_folders", list)
    with pytest.raises(SystemExit, match=r"torch is not installed for .*\n.*pip install torch==2\.13\.0"):
        build.find_torch()


@pytest.mark.parametrize("version", ["2.10.1", "2.15.0", "3.0.0a0+git1", "unknown"])
def test_an_unsupported_torch_is_refused(
    build: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, version: str
) -> None:
    _torch_of(build, monkeypatch, tmp_path / "torch", version)
    with pytest.raises(SystemExit, match=r"is not supported \(from 2\.11 up to, not including, 2\.15\)"):
        build.find_torch()


@pytest.mark.parametrize("version", ["2.11.0", "2.13.0+cpu", "2.14.1+cu130"])
def test_a_supported_torch_is_found_without_importing_it(
    build: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, version: str
) -> None:
    _torch_of(build, monkeypatch, tmp_path / "torch", version)
    found = build.find_torch()
    assert (found.version, found.path, found.cxx11_abi) == (version, tmp_path / "torch", 1)


def test_the_torch_that_set_up_installs_is_a_supported_one(build: ModuleType) -> None:
    low, high = build.torch_range()
    assert low <= tuple(int(part) for part in build.TESTED_TORCH.split(".")[:2]) < high


def test_a_missing_compiler_is_named(build: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SystemExit, match="there is no C\\+\\+ compiler"):
        build.check()


def test_a_compiler_that_cannot_do_cpp20_is_named(build: ModuleType, tmp_path: Path) -> None:
    old = tmp_path / "old-c++"
    old.write_text("#!/bin/sh\necho \"error: unrecognized option '-std=c++20'\" >&2\nexit 1\n")
    old.chmod(0o755)
    with pytest.raises(SystemExit, match=r"old-c\+\+ does not compile C\+\+20 \(error: unrecognized option"):
        build.check_standard([str(old)])


def test_missing_python_headers_are_named(build: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(build.sysconfig, "get_path", lambda name: str(tmp_path))
    with pytest.raises(SystemExit, match=r"the headers of Python 3\.\d+ \(Python\.h\) are missing"):
        build.python_includes()


def test_too_little_disk_is_named(build: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"too little disk space: \d+ MiB are free"):
        build.check_disk(tmp_path / "not" / "yet", needed=1 << 62)


# ----------------------------------------------------------------------------------------------------- nothing twice


@pytest.fixture
def compiled(build: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """Builds once; afterwards holds the names of the sources that a later build compiles."""
    _torch_of(build, monkeypatch, tmp_path / "site" / "torch", "2.13.0")
    build.build()
    seen: list[str] = []
    real = build._compile

    def spy(unit: SimpleNamespace) -> tuple[float, str]:
        seen.append(unit.source.name)
        result: tuple[float, str] = real(unit)
        return result

    monkeypatch.setattr(build, "_compile", spy)
    return seen


def test_a_build_with_nothing_changed_runs_no_compiler(
    build: ModuleType, compiled: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    commands: list[list[str]] = []
    real = subprocess.run
    monkeypatch.setattr(build.subprocess, "run", lambda args, **more: commands.append(args) or real(args, **more))
    build.build()
    assert compiled == []
    assert [command[1:] for command in commands] == [["--version"]]


def test_a_changed_header_compiles_only_what_includes_it(
    build: ModuleType, compiled: list[str], tmp_path: Path
) -> None:
    _edit(tmp_path / "native" / "thing" / "value.h", "#pragma once\ninline int value() { return 3; }\n")
    build.build()
    assert compiled == ["a.cpp"]


def test_a_changed_source_is_compiled_and_linked_anew(build: ModuleType, compiled: list[str], tmp_path: Path) -> None:
    _, before = build.build()
    old = before["_thing"].read_bytes()
    _edit(tmp_path / "native" / "thing" / "b.cpp", "int b() { return 2; }\nint c() { return 3; }\n")
    _, after = build.build()
    assert compiled == ["b.cpp"]
    assert after["_thing"].read_bytes() != old


def test_a_removed_source_leaves_the_library(build: ModuleType, compiled: list[str], tmp_path: Path) -> None:
    _, before = build.build()
    old = before["_thing"].read_bytes()
    (tmp_path / "native" / "thing" / "b.cpp").unlink()
    _, after = build.build()
    assert compiled == []
    assert after["_thing"].read_bytes() != old


def test_a_source_saved_while_it_compiles_counts_as_newer(
    build: ModuleType, compiled: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    source = tmp_path / "native" / "thing" / "b.cpp"
    _edit(source, "int b() { return 4; }\n")
    now = source.stat().st_mtime_ns
    with monkeypatch.context() as patch:
        patch.setattr(build.time, "time_ns", lambda: now + 1)  # compilation starts a moment after the edit ...
        build.build()
    os.utime(source, ns=(now + 2, now + 2))  # ... and the file is saved again before it ends
    build.build()
    assert compiled == ["b.cpp", "b.cpp"]


def test_other_flags_and_other_torches_share_no_objects(
    build: ModuleType, compiled: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    plain = build.Toolchain(build.find_torch()).folder
    monkeypatch.setenv("DTORCH_SANITIZE", "address")
    sanitized = build.Toolchain(build.find_torch()).folder
    monkeypatch.delenv("DTORCH_SANITIZE")
    _torch_of(build, monkeypatch, tmp_path / "other" / "torch", "2.14.0")
    other = build.Toolchain(build.find_torch()).folder
    assert len({plain, sanitized, other}) == 3


def test_a_rejected_source_is_named_with_what_the_compiler_said(
    build: ModuleType, compiled: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    _edit(tmp_path / "native" / "thing" / "a.cpp", "int a() { return nonsense; }\n")
    with pytest.raises(SystemExit, match=r"thing/a\.cpp does not compile"):
        build.build()
    assert "nonsense" in capfd.readouterr().err


def test_placing_replaces_a_library_that_is_loaded_instead_of_writing_over_it(
    build: ModuleType, compiled: list[str], tmp_path: Path
) -> None:
    toolchain, libraries = build.build()
    package = tmp_path / "package"
    package.mkdir()
    target = package / libraries["_thing"].name
    target.write_bytes(b"old")
    held = target.open("rb")
    build.place(toolchain, libraries, package)
    assert held.read() == b"old"
    held.close()
    assert target.read_bytes() == libraries["_thing"].read_bytes()


# ------------------------------------------------------------------------------------------------- the import's check


def _built_for(monkeypatch: pytest.MonkeyPatch, **facts: object) -> None:
    from dtorch import _build

    for name, value in facts.items():
        monkeypatch.setattr(_build, name, value)


def test_the_running_torch_passes_the_check() -> None:
    _buildcheck.check()


def test_another_torch_is_refused_with_the_command_that_mends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    _built_for(monkeypatch, TORCH_VERSION="2.12.0+cpu")
    with pytest.raises(ImportError, match=r"built for torch 2\.12\.0\+cpu, but torch 2\.13.* is installed") as caught:
        _buildcheck.check("2.13.0+cpu")
    assert f"{sys.executable} {ROOT / 'native' / 'build.py'}" in str(caught.value)


def test_another_python_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    _built_for(monkeypatch, PYTHON="cpython-399-x86_64-linux-gnu")
    with pytest.raises(ImportError, match="built for cpython-399-x86_64-linux-gnu, but this Python is cpython-3"):
        _buildcheck.check()


def test_a_package_that_was_not_built_says_how_to_build_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "dtorch._build", None)
    monkeypatch.delattr(dtorch, "_build", raising=False)
    with pytest.raises(ImportError, match="native modules are not built"):
        _buildcheck.check()


# ------------------------------------------------------------------------------------------------------------ the wheel


@pytest.mark.alarm(240)
def test_a_wheel_holds_every_module_and_runs_the_benchmarks(tmp_path: Path) -> None:
    """Unpacked, it is an installed dtorch: nothing of the checkout is on its path."""
    python = [sys.executable, "-P"]
    command = [*python, "-m", "pip", "wheel", "--quiet", "--no-build-isolation", "--no-deps", "--wheel-dir"]
    made = subprocess.run(
        [*command, str(tmp_path), str(ROOT)], capture_output=True, text=True, timeout=230, check=False
    )
    assert made.returncode == 0, made.stdout + made.stderr
    (wheel,) = tmp_path.glob("*.whl")
    place = tmp_path / "site"
    zipfile.ZipFile(wheel).extractall(place)

    folders = {"dtorch": "dtorch", "benchmarks": "dtorch/benchmarks", "examples": "dtorch/examples"}
    for source, target in folders.items():
        for file in ROOT.glob(f"{source}/**/*"):
            if file.suffix in (".py", ".pyi", ".json", ".typed"):
                assert (place / target / file.relative_to(ROOT / source)).is_file(), f"the wheel lacks {file}"
    (entry,) = place.glob("*.dist-info/entry_points.txt")
    assert "dtorch = dtorch.__main__:main" in entry.read_text()

    environment = {**os.environ, "PYTHONPATH": str(place)}
    flags = ["--op", "add", "--size", "4", "--rounds", "1", "--budget", "1", "--records", "0"]
    run = [*python, "-m", "dtorch", "bench", "op_overhead", *flags]
    done = subprocess.run(run, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "out" / "op_overhead.csv").is_file()

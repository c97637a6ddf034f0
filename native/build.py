"""Builds dtorch's three native modules against the torch that is installed.

One build serves ``pip install .``, ``pip install -e .``, ``python setup.py build_ext --inplace`` and, fastest, running
this file. It needs nothing but the standard library, so that it can also say what is missing before anything else is
installed.

Finding torch. pip builds in an isolated environment in which ``import torch`` fails, and torch as a build requirement
would make pip fetch a second, several-gigabyte torch there. So torch is never imported: its folder is looked up among
the interpreter's own site folders and its version is read from ``torch/version.py``.

Doing nothing twice. Objects live in ``build/native/KEY``, where KEY stands for the torch, the Python, the compiler and
the flags; another torch therefore means another folder, never a mixture. Inside it an object is good while it is not
older than its source and every header of ours that the compiler noted for it (``-MMD``; torch's and Python's headers
are system headers and covered by KEY). An object carries the time at which its compilation *started*, so that a file
saved meanwhile counts as newer.

    python native/build.py              build in place (what is out of date)
    python native/build.py _scheduler   only this module
    python native/build.py --check      only say what the build lacks, torch excepted
    python native/build.py --torch      print the requirement that set-up installs
    python native/build.py --installed-torch   print the installed torch as a requirement, or fail
"""

from __future__ import annotations

import argparse
import concurrent.futures
import hashlib
import importlib.machinery
import importlib.util
import os
import re
import shlex
import shutil
import site
import subprocess
import sys
import sysconfig
import time
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

ROOT = Path(__file__).resolve().parent.parent

#: The torch that set-up installs and the tests run with.
TESTED_TORCH = "2.13.0"

STANDARD = "c++20"
#: What compiling and linking may need on the disk, and one unit that includes torch in memory.
DISK_BYTES = 400 << 20
UNIT_BYTES = 3 << 29


@dataclass(frozen=True)
class Module:
    """One native module: every ``*.cpp`` of its folder under ``native/``, and of ``common`` if it links torch."""

    name: str
    folder: str
    libraries: tuple[str, ...]  # of torch; none: the module is compiled without torch's headers too

    def sources(self) -> list[Path]:
        folders = (self.folder, "common") if self.libraries else (self.folder,)
        return sorted(path for folder in folders for path in (ROOT / "native" / folder).glob("*.cpp"))


MODULES = (
    Module("_client", "client", ("torch_python", "torch", "torch_cpu", "c10")),
    Module("_worker", "worker", ("torch", "torch_cpu", "c10")),
    Module("_scheduler", "scheduler", ()),
)


@dataclass(frozen=True)
class Torch:
    """The installed torch, known without importing it."""

    path: Path
    version: str
    cxx11_abi: int

    @property
    def lib(self) -> Path:
        return self.path / "lib"


def refuse(what: str, remedy: str) -> NoReturn:
    """Ends the build, naming the one missing thing and what mends it."""
    raise SystemExit(f"dtorch cannot be built: {what}.\n  {remedy}")


# ---------------------------------------------------------------------------------------------- what the build needs


def compiler() -> list[str]:
    """The C++ compiler's command: ``$CXX``, else the first of the usual names that exists."""
    chosen = os.environ.get("CXX")
    if chosen:
        command = shlex.split(chosen)
        if shutil.which(command[0]) is None:
            refuse(f"there is no C++ compiler {command[0]!r}", "CXX names it; unset CXX or install that compiler.")
        return command
    for name in ("c++", "g++", "clang++"):
        if shutil.which(name):
            return [name]
    refuse("there is no C++ compiler", "Install one, for instance: apt-get install g++")


def python_includes() -> list[str]:
    """The folders of Python's headers."""
    folders = sorted({sysconfig.get_path("include"), sysconfig.get_path("platinclude")})
    if not any(Path(folder, "Python.h").is_file() for folder in folders):
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        refuse(
            f"the headers of Python {version} (Python.h) are missing; looked in {', '.join(folders)}",
            f"Install them, for instance: apt-get install python{version}-dev",
        )
    return folders


def check_disk(folder: Path, needed: int = DISK_BYTES) -> None:
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    if free < needed:
        refuse(
            f"too little disk space: {free >> 20} MiB are free at {folder}, {needed >> 20} MiB are needed",
            "Free some space there.",
        )


def check_standard(command: list[str]) -> None:
    """Compiles a few lines; a compiler that is too old or lacks its library fails here and not in the middle."""
    program = "#include <concepts>\n#include <span>\nstatic_assert(std::integral<int>);\n"
    args = [*command, f"-std={STANDARD}", "-fsyntax-only", "-x", "c++", "-"]
    result = subprocess.run(args, input=program, text=True, capture_output=True)
    if result.returncode:
        said = result.stderr.strip().splitlines()
        refuse(
            f"{shlex.join(command)} does not compile C++20" + (f" ({said[0]})" if said else ""),
            "Install a newer compiler (GCC 11 or Clang 14 are enough), or name one in CXX.",
        )


def torch_range() -> tuple[tuple[int, int], tuple[int, int]]:
    """The supported torch releases [from, to), as setup.cfg's install_requires has them."""
    found = re.search(r"^\s*torch>=(\d+)\.(\d+),<(\d+)\.(\d+)\s*$", (ROOT / "setup.cfg").read_text(), re.MULTILINE)
    assert found, "setup.cfg: install_requires has no line torch>=A.B,<C.D"
    a, b, c, d = (int(part) for part in found.groups())
    return (a, b), (c, d)


def _torch_folders() -> list[Path]:
    """Where an installed torch may be, most likely first."""
    folders = []
    spec = importlib.util.find_spec("torch")  # finds, does not import
    if spec is not None and spec.submodule_search_locations:
        folders += [Path(place) for place in spec.submodule_search_locations]
    places = [sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), *site.getsitepackages()]
    if sys.prefix == sys.base_prefix:
        places.append(site.getusersitepackages())
    return folders + [Path(place, "torch") for place in dict.fromkeys(places)]


def find_torch() -> Torch:
    """The installed torch; refuses when there is none, or one that dtorch does not support."""
    install = f"{sys.executable} -m pip install torch=={TESTED_TORCH}"
    for folder in _torch_folders():
        try:
            text = (folder / "version.py").read_text()
        except OSError:
            continue
        found = re.search(r"^__version__\s*=\s*['\"]([^'\"]+)['\"]", text, re.MULTILINE)
        if not found:
            continue
        version = found.group(1)
        low, high = torch_range()
        numbers = re.match(r"(\d+)\.(\d+)", version)
        if numbers is None or not low <= (int(numbers.group(1)), int(numbers.group(2))) < high:
            refuse(
                f"torch {version} at {folder} is not supported (from {low[0]}.{low[1]} up to, not including, "
                f"{high[0]}.{high[1]})",
                f"Install a supported one: {install}",
            )
        if not (folder / "include" / "ATen" / "ATen.h").is_file():
            refuse(f"torch {version} at {folder} came without its C++ headers", f"Install it anew: {install}")
        # Which ABI of std::string torch was built with shows in its symbols.
        abi = int(b"__cxx11" in (folder / "lib" / "libc10.so").read_bytes())
        return Torch(folder, version, abi)
    refuse(
        f"torch is not installed for {sys.executable}",
        f"Install it first: {install}\n"
        "  (In a build environment apart from torch's, as uv makes it, build with --no-build-isolation.)",
    )


def check(with_torch: bool = True) -> None:
    """Refuses when something that the build needs is missing; the quick look before any long work."""
    check_standard(compiler())
    python_includes()
    check_disk(ROOT)
    if with_torch:
        find_torch()


# --------------------------------------------------------------------------------------------------- compile and link


@dataclass(frozen=True)
class Unit:
    """One source file and the object made of it."""

    source: Path
    object: Path
    command: tuple[str, ...]

    @property
    def depfile(self) -> Path:
        return self.object.with_suffix(".d")


class Toolchain:
    """The compiler, the flags and the folder that belong to one torch, one Python and one kind of build."""

    def __init__(self, torch: Torch) -> None:
        self.torch = torch
        self.cxx = compiler()
        self.sanitize = os.environ.get("DTORCH_SANITIZE", "")
        self.python = str(sysconfig.get_config_var("SOABI"))
        self.compiler_version = _first_line([*self.cxx, "--version"])
        self.flags = [f"-std={STANDARD}", "-fPIC", "-fvisibility=hidden", "-pthread", "-Wall", "-Wextra"]
        self.link_flags = ["-shared", "-pthread"]
        if self.sanitize:
            self.flags += [f"-fsanitize={self.sanitize}", "-fno-omit-frame-pointer", "-O1", "-g"]
            self.link_flags.append(f"-fsanitize={self.sanitize}")
        else:
            self.flags.append("-O2")
        self.flags += [f"-I{ROOT / 'native'}"]
        for folder in python_includes():
            self.flags += ["-isystem", folder]
        self.torch_flags = [f"-D_GLIBCXX_USE_CXX11_ABI={torch.cxx11_abi}"]
        for headers in ("include", "include/torch/csrc/api/include"):
            self.torch_flags += ["-isystem", str(torch.path / headers)]
        # $ORIGIN serves an installed package beside torch, the absolute path one that is built in place.
        self.torch_link_flags = [f"-L{torch.lib}", f"-Wl,-rpath,$ORIGIN/../torch/lib:{torch.lib}"]
        key = repr([self.compiler_version, self.cxx, self.flags, self.link_flags, self.torch_flags, torch.version])
        digest = hashlib.sha256((key + self.python).encode()).hexdigest()[:10]
        kind = f"-{self.sanitize.replace(',', '-')}" if self.sanitize else ""
        self.folder = ROOT / "build" / "native" / f"torch{torch.version}-{sys.implementation.cache_tag}{kind}-{digest}"

    def units(self, module: Module) -> list[Unit]:
        flags = self.flags + (self.torch_flags if module.libraries else [])
        units = []
        for source in module.sources():
            target = self.folder / module.folder / (source.stem + ".o")
            command = [*self.cxx, *flags, "-MMD", "-MF", str(target.with_suffix(".d.new")), "-c", str(source)]
            units.append(Unit(source, target, tuple(command)))
        if not units:
            refuse(f"native/{module.folder} has no *.cpp", "The sources are incomplete; get them again.")
        return units

    def library(self, module: Module) -> Path:
        return self.folder / f"{module.name}{importlib.machinery.EXTENSION_SUFFIXES[0]}"

    def link_command(self, module: Module, units: list[Unit]) -> list[str]:
        command = [*self.cxx, *self.link_flags, *(str(unit.object) for unit in units)]
        if module.libraries:
            command += [*self.torch_link_flags, *(f"-l{name}" for name in module.libraries)]
        return command


class _Times:
    """Modification times in nanoseconds, each file asked once; a file that is gone is newer than everything."""

    def __init__(self) -> None:
        self._known: dict[str, int] = {}

    def of(self, path: str) -> int:
        known = self._known.get(path)
        if known is None:
            try:
                known = os.stat(path).st_mtime_ns
            except OSError:
                known = sys.maxsize
            self._known[path] = known
        return known


def _is_fresh(unit: Unit, times: _Times) -> bool:
    try:
        made = unit.object.stat().st_mtime_ns
        rule = unit.depfile.read_text()
    except OSError:
        return False
    # "object: source header \ header ..."; a space inside a name is written as "\ ".
    names = re.split(r"(?<!\\)\s+", rule.split(":", 1)[1].replace("\\\n", " ").strip())
    return all(times.of(name.replace("\\ ", " ")) <= made for name in names)


def _compile(unit: Unit) -> tuple[float, str]:
    """Makes the object; returns the seconds it took and the compiler's warnings."""
    unit.object.parent.mkdir(parents=True, exist_ok=True)
    started = time.time_ns()
    fresh = unit.object.with_suffix(".o.new")
    result = subprocess.run([*unit.command, "-o", str(fresh)], text=True, capture_output=True)
    if result.returncode:
        raise CompileError(unit.source, result.stderr)
    os.utime(fresh, ns=(started, started))
    unit.object.with_suffix(".d.new").replace(unit.depfile)
    fresh.replace(unit.object)
    return (time.time_ns() - started) / 1e9, result.stderr


class CompileError(Exception):
    """The compiler rejected a source file; holds what it said."""

    def __init__(self, source: Path, said: str) -> None:
        super().__init__(f"{source} does not compile")
        self.source = source
        self.said = said


def _jobs(count: int) -> int:
    """How many compilers run side by side: the cores, as far as memory goes; ``MAX_JOBS`` decides when set."""
    if os.environ.get("MAX_JOBS", "").isdigit():
        return max(1, int(os.environ["MAX_JOBS"]))
    cores = len(os.sched_getaffinity(0))
    found = re.search(r"MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text())
    by_memory = int(found.group(1)) * 1024 // UNIT_BYTES if found else cores
    return max(1, min(count, cores, by_memory))


def compile_units(units: list[Unit], total: int) -> None:
    """Compiles in parallel, the largest source first; the first rejected one ends the build."""
    units = sorted(units, key=lambda unit: -unit.source.stat().st_size)
    jobs = _jobs(len(units))
    say(f"compiling {len(units)} of {total} files, {jobs} at a time")
    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        running = {pool.submit(_compile, unit): unit for unit in units}
        try:
            for done, future in enumerate(concurrent.futures.as_completed(running), 1):
                seconds, warnings = future.result()
                say(f"[{done}/{len(units)}] {running[future].source.relative_to(ROOT)}  {seconds:.1f} s")
                if warnings:
                    sys.stderr.write(warnings)
        except CompileError as error:
            pool.shutdown(cancel_futures=True)
            sys.stderr.write(error.said)
            raise SystemExit(f"dtorch cannot be built: {error}.") from None


def _link(toolchain: Toolchain, module: Module, units: list[Unit]) -> bool:
    """Links unless the library is newer than its objects and was linked by the same command; says whether it did."""
    library = toolchain.library(module)
    command = toolchain.link_command(module, units)
    note = library.with_suffix(".link")
    text = shlex.join(command)
    if library.exists() and note.exists() and note.read_text() == text:
        made = library.stat().st_mtime_ns
        if all(unit.object.stat().st_mtime_ns <= made for unit in units):
            return False
    started = time.time_ns()
    fresh = library.with_suffix(".new")
    result = subprocess.run([*command, "-o", str(fresh)], text=True, capture_output=True)
    if result.returncode:
        sys.stderr.write(result.stderr)
        raise SystemExit(f"dtorch cannot be built: {library.name} does not link.")
    os.utime(fresh, ns=(started, started))
    fresh.replace(library)
    note.write_text(text)
    return True


def build(names: list[str] | None = None) -> tuple[Toolchain, dict[str, Path]]:
    """Brings the modules up to date; returns the toolchain and each module's library in the build folder."""
    toolchain = Toolchain(find_torch())
    modules = [module for module in MODULES if not names or module.name in names]
    units = {module.name: toolchain.units(module) for module in modules}
    times = _Times()
    every = [unit for module in modules for unit in units[module.name]]
    stale = [unit for unit in every if not _is_fresh(unit, times)]
    if stale:
        check_standard(toolchain.cxx)
        check_disk(toolchain.folder)
        compile_units(stale, len(every))
    libraries = {}
    for module in modules:
        if _link(toolchain, module, units[module.name]):
            say(f"linked {toolchain.library(module).name}")
        libraries[module.name] = toolchain.library(module)
    return toolchain, libraries


def build_info(toolchain: Toolchain) -> str:
    """The text of ``dtorch/_build.py``, which ``dtorch/_buildcheck.py`` compares with what it runs on."""
    facts = {
        "TORCH_VERSION": toolchain.torch.version,
        "CXX11_ABI": toolchain.torch.cxx11_abi,
        "PYTHON": toolchain.python,
        "COMPILER": toolchain.compiler_version,
        "SANITIZE": toolchain.sanitize,
    }
    lines = ['"""What the native modules were built for. Written by native/build.py; not in version control."""', ""]
    return "\n".join([*lines, *(f"{name} = {value!r}" for name, value in facts.items()), ""])


def place(toolchain: Toolchain, libraries: dict[str, Path], package: Path) -> None:
    """Copies libraries and build information into a package folder, leaving alone what is there already.

    A library is replaced, never written over: a process that has the old one loaded keeps it.
    """
    package.mkdir(parents=True, exist_ok=True)
    for library in libraries.values():
        target = package / library.name
        if target.exists() and _stamp(target) == _stamp(library):
            continue
        fresh = target.with_suffix(".new")
        shutil.copy2(library, fresh)
        fresh.replace(target)
    info = package / "_build.py"
    text = build_info(toolchain)
    if not info.exists() or info.read_text() != text:
        info.write_text(text)


def _stamp(file: Path) -> tuple[int, int]:
    status = file.stat()
    return status.st_size, status.st_mtime_ns


def say(text: str) -> None:
    print(f"native: {text}", flush=True)


def _first_line(command: list[str]) -> str:
    return subprocess.run(command, text=True, capture_output=True, check=True).stdout.splitlines()[0]


def main() -> None:
    parser = argparse.ArgumentParser(description="Build dtorch's native modules in place.")
    parser.add_argument("modules", nargs="*", metavar="MODULE", help="build only these: _client, _worker, _scheduler")
    parser.add_argument("--check", action="store_true", help="only say what the build lacks, torch excepted")
    parser.add_argument("--torch", action="store_true", help="print the torch requirement that set-up installs")
    parser.add_argument("--installed-torch", action="store_true", help="print the installed torch as a requirement")
    options = parser.parse_args()
    if unknown := set(options.modules) - {module.name for module in MODULES}:
        parser.error(f"there is no native module {', '.join(sorted(unknown))}")
    if options.torch:
        print(f"torch=={TESTED_TORCH}")
    elif options.installed_torch:
        print(f"torch=={find_torch().version}")
    elif options.check:
        check(with_torch=False)
    else:
        started = time.monotonic()
        toolchain, libraries = build(options.modules)
        place(toolchain, libraries, ROOT / "dtorch")
        say(f"up to date with torch {toolchain.torch.version} ({time.monotonic() - started:.1f} s)")


if __name__ == "__main__":
    main()

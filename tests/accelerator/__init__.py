"""A test's device: an accelerator in host memory (``device.cpp``), so that a worker's path for GPUs runs without one.

It stands for no result of dtorch: its kernels are the CPU's, its speed means nothing. What it has of a GPU is that it
works behind, and that a test decides how far. ``engine`` starts workers on it, ``Worker`` is a test's hand on one of
them:

    accelerator[0].hold_compute = 1     # nothing of what was and will be launched is done
    accelerator[0].waits                # how often the worker's thread has waited for the device

``device.cpp`` has what each number means.
"""

from __future__ import annotations

import hashlib
import importlib.util
import mmap
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Final

TESTS: Final = Path(__file__).resolve().parents[1]
#: The path of the file that a test and its workers share, and of the library: variables of the environment.
BOARD: Final = "DTORCH_TEST_ACCELERATOR"
LIBRARY: Final = "DTORCH_TEST_ACCELERATOR_LIBRARY"

#: As ``device.cpp`` numbers them.
SLOTS: Final = [
    "hold_compute",
    "hold_fetch",
    "fail",
    "limit",
    "lends",
    "kernels",
    "waits",
    "fetched",
    "uploaded",
    "pageable",
    "locked",
    "reached",
    "lent",
    "taken",
    "refuse",
]
_PER_WORKER: Final = 32


def build() -> Path:
    """Compile the accelerator as native/build.py would, if that was not done before; returns the library."""
    tool = _native_build()
    toolchain = tool.Toolchain(tool.find_torch())
    here = Path(__file__).parent
    sources = [here / "device.cpp", here / "sparse.cpp", TESTS.parent / "native" / "common" / "sparse_parts.cpp"]
    contents = b"".join(file.read_bytes() for file in [*sources, here / "device.h"])
    command = [*toolchain.cxx, *toolchain.flags, *toolchain.torch_flags, *toolchain.link_flags, *map(str, sources)]
    command += [*toolchain.torch_link_flags, "-ltorch", "-ltorch_cpu", "-lc10"]
    key = hashlib.sha256(contents + repr((command, toolchain.torch.version)).encode()).hexdigest()[:16]
    library: Path = toolchain.folder / f"accelerator-{key}.so"
    if not library.exists():
        library.parent.mkdir(parents=True, exist_ok=True)
        fresh = library.with_suffix(f".{os.getpid()}.new")
        done = subprocess.run([*command, "-o", str(fresh)], text=True, capture_output=True)
        if done.returncode:
            raise RuntimeError(f"the test's accelerator does not compile:\n{done.stderr}")
        fresh.replace(library)
    return library


def _native_build() -> ModuleType:
    name = "dtorch_native_build_of_accelerator"
    spec = importlib.util.spec_from_file_location(name, TESTS.parent / "native" / "build.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


class Worker:
    """The numbers of one worker's accelerator (``SLOTS``), as attributes."""

    def __init__(self, numbers: memoryview) -> None:
        self.__dict__["_numbers"] = numbers

    def __getattr__(self, name: str) -> int:
        try:
            number: int = self._numbers[SLOTS.index(name)]
        except ValueError:
            raise AttributeError(name) from None
        return number

    def __setattr__(self, name: str, value: int) -> None:
        self._numbers[SLOTS.index(name)] = value

    @contextmanager
    def held(self, *streams: str) -> Iterator[None]:
        """Hold streams ("compute", "fetch") inside the block."""
        for stream in streams:
            setattr(self, f"hold_{stream}", 1)
        try:
            yield
        finally:
            for stream in streams:
                setattr(self, f"hold_{stream}", 0)

    def reset(self) -> None:
        """Let go, mend and lift what a test has held, broken and limited; counters stay."""
        for name in ("hold_compute", "hold_fetch", "fail", "limit", "lends", "refuse"):
            setattr(self, name, 0)


class Board:
    """The file that tests and workers share."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.write_bytes(bytes(mmap.PAGESIZE))
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), mmap.PAGESIZE)
        numbers = memoryview(self._map).cast("q")
        self.workers = [Worker(numbers[i * _PER_WORKER : (i + 1) * _PER_WORKER]) for i in range(4)]

    def __getitem__(self, worker: int) -> Worker:
        return self.workers[worker]

    def reset(self) -> None:
        for worker in self.workers:
            worker.reset()

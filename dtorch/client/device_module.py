"""``torch.dtorch``: the device module that PyTorch asks about the dtorch device (as torch.cuda is for CUDA).

Everything here is also reachable as ``dtorch.X``.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from typing import Any

import msgpack
import torch

from dtorch import _client
from dtorch.client import lifecycle

Device = torch.device | str | int | None

device_count = lifecycle.device_count
init = lifecycle.init
is_initialized = lifecycle.is_initialized


def _index(device: Device) -> int:
    if device is None:
        return _client.current_device()
    if isinstance(device, int):
        return device
    d = torch.device(device)
    if d.type != "dtorch":
        raise ValueError(f"expected a dtorch device, not {d}")
    return _client.current_device() if d.index is None else d.index


def is_available() -> bool:
    """Whether the device can be used; always, for CPU workers need nothing."""
    return True


def current_device() -> int:
    """Index of the current device: where tensors on plain "dtorch" are made. Per thread."""
    return _client.current_device()


def set_device(device: Device) -> None:
    """Make a device (index, "dtorch:i" or torch.device) the current one. Raises RuntimeError when there is none."""
    lifecycle.running()
    _client.set_device(_index(device))


@contextlib.contextmanager
def _device(index: Device) -> Iterator[None]:
    before = _client.current_device()
    set_device(index)
    try:
        yield
    finally:
        _client.set_device(before)


class device(contextlib.ContextDecorator):
    """``with dtorch.device(i):`` makes worker i the current device inside (as torch.cuda.device)."""

    def __init__(self, index: Device) -> None:
        self.idx = index
        self._inner: list[Any] = []

    def __enter__(self) -> None:
        inner = _device(self.idx)
        inner.__enter__()
        self._inner.append(inner)

    def __exit__(self, *exc: Any) -> None:
        self._inner.pop().__exit__(*exc)


def synchronize(device: Device = None) -> None:
    """Wait until everything issued so far has been executed: on one device, or on all of them when None.

    Raises RemoteError when an operator failed since the last report, WorkerDied when a worker is gone.
    """
    if not is_initialized():
        return
    for i in range(device_count()) if device is None else (_index(device),):
        _client.synchronize(i)


def manual_seed(seed: int) -> None:
    """Seed the generator of the current device (as torch.cuda.manual_seed). torch.manual_seed seeds all devices."""
    torch.Generator(device="dtorch")  # starts the default engine if none runs
    default_generator().manual_seed(seed)


def manual_seed_all(seed: int) -> None:
    """Seed the default generator of every worker; torch.manual_seed calls it."""
    _client.seed_all(seed & 0xFFFFFFFFFFFFFFFF)


def default_generator(device: Device = None) -> torch.Generator:
    """The default generator of a device."""
    lifecycle.running()
    generator: torch.Generator = _client.default_generator(_index(device))
    return generator


def get_rng_state(device: Device = "dtorch") -> torch.Tensor:
    """State of a device's default generator, a uint8 CPU tensor. Waits for the worker."""
    return default_generator(device).get_state()


def set_rng_state(new_state: torch.Tensor, device: Device = "dtorch") -> None:
    """Set the state of a device's default generator."""
    default_generator(device).set_state(new_state)


def get_amp_supported_dtype() -> list[torch.dtype]:
    """Dtypes that autocast may use on the workers."""
    return [torch.bfloat16, torch.float16]


def is_bf16_supported() -> bool:
    """bfloat16 works on CPU workers."""
    return True


def __getattr__(name: str) -> bool:
    if name == "_initialized":  # torch.utils.checkpoint keeps a device's random state only where this is true
        return is_initialized()
    raise AttributeError(f"module 'torch.dtorch' has no attribute {name!r}")


def _is_in_bad_fork() -> bool:
    return False


def worker_stats(device: Device = None) -> dict[str, int]:
    """Counters of a worker, in bytes and numbers of things, at this point of the program. Waits for the worker.

    ``allocated``, ``peak``: bytes that tensors and operators' workspace hold now, and at most since the last reset;
    ``storages``: storages held; ``executed``, ``received``: records; ``blocks``, ``allocations``: blocks held, ever
    made; ``exported``: segments that a reader has not mapped yet.
    """
    lifecycle.running()
    return dict(_stats(device, "memory"))


def _stats(device: Device, what: str) -> list[Any]:
    rows: list[Any] = msgpack.unpackb(_client.stats(_index(device), what))[3]
    return rows


def memory_allocated(device: Device = None) -> int:
    """Bytes held on a device's worker (as torch.cuda.memory_allocated); waits for it."""
    return worker_stats(device)["allocated"]


def max_memory_allocated(device: Device = None) -> int:
    """The most bytes held since the start or the last reset (as torch.cuda.max_memory_allocated); waits for it."""
    return worker_stats(device)["peak"]


def reset_peak_memory_stats(device: Device = None) -> None:
    """Start the count of max_memory_allocated anew (as torch.cuda.reset_peak_memory_stats)."""
    lifecycle.running()
    _stats(device, "reset_peak")


def empty_cache() -> None:
    """Nothing to do: CPU workers keep freed memory in the C library's heap."""


def stream(_: Any) -> contextlib.AbstractContextManager[None]:
    """A worker has one stream; choosing it changes nothing."""
    return contextlib.nullcontext()


@contextlib.contextmanager
def allocation_log(device: Device = None) -> Iterator[list[tuple[int, int, int]]]:
    """Record what a worker's storages do inside the block: rows (record number, storage id, bytes, or -1 when freed).

    The list is filled when the block ends, after waiting for the worker. For tests and memory reports.
    """
    lifecycle.running()
    index = _index(device)
    rows: list[tuple[int, int, int]] = []
    _client.option(index, "record_allocations", 1)
    try:
        yield rows
    finally:
        _client.synchronize(index)
        rows.extend(itertools.starmap(lambda seq, storage, nbytes: (seq, storage, nbytes), _stats(index, "log")))
        _client.option(index, "record_allocations", 0)

"""``torch.dtorch``: the device module that PyTorch asks about the dtorch device (as torch.cuda is for CUDA).

Everything here is also reachable as ``dtorch.X``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields
from typing import Any

import torch

from dtorch import _client
from dtorch.client import lifecycle, memory
from dtorch.client.lifecycle import Device, index_of

#: As torch.cuda's. A worker runs what it is given in the order in which it was issued, whichever stream is current.
Stream = torch.Stream
Event = torch.Event

device_count = lifecycle.device_count
init = lifecycle.init
is_initialized = lifecycle.is_initialized

empty_cache = memory.empty_cache
get_per_process_memory_fraction = memory.get_per_process_memory_fraction
max_memory_allocated = memory.max_memory_allocated
max_memory_reserved = memory.max_memory_reserved
mem_get_info = memory.mem_get_info
memory_allocated = memory.memory_allocated
memory_reserved = memory.memory_reserved
memory_stats = memory.memory_stats
memory_summary = memory.memory_summary
reset_accumulated_memory_stats = memory.reset_accumulated_memory_stats
reset_peak_memory_stats = memory.reset_peak_memory_stats
set_per_process_memory_fraction = memory.set_per_process_memory_fraction


def is_available() -> bool:
    """Whether the device can be used; always, for CPU workers need nothing."""
    return True


def current_device() -> int:
    """Index of the current device: where tensors on plain "dtorch" are made. Per thread."""
    return _client.current_device()


def set_device(device: Device) -> None:
    """Make a device (index, "dtorch:i" or torch.device) the current one. Raises RuntimeError when there is none."""
    lifecycle.running()
    _client.set_device(index_of(device))


@dataclass(frozen=True)
class DeviceProperties:
    """What a device is. ``total_memory``: bytes its worker may use; ``threads``: of one operator on the CPU.

    The rest is what PyTorch tells of the worker's GPU (as torch.cuda.get_device_properties); 0 and "" on the CPU.
    """

    name: str
    total_memory: int
    threads: int
    major: int = 0
    minor: int = 0
    multi_processor_count: int = 0
    warp_size: int = 0
    L2_cache_size: int = 0
    uuid: str = ""


def get_device_properties(device: Device = None) -> DeviceProperties:
    """What a device is (as torch.cuda.get_device_properties); waits for its worker."""
    engine = lifecycle.running()
    if engine.device == "cpu":
        return DeviceProperties(get_device_name(device), mem_get_info(device)[1], engine.threads_per_worker)
    found = memory.device_properties(device)
    known = {f.name for f in fields(DeviceProperties)}
    return DeviceProperties(**{"threads": engine.threads_per_worker, **{k: v for k, v in found.items() if k in known}})


def get_device_name(device: Device = None) -> str:
    """The name of a device (as torch.cuda.get_device_name); waits for its worker where that has a GPU."""
    if lifecycle.running().device != "cpu":
        return str(memory.device_properties(device)["name"])
    return f"dtorch CPU worker {index_of(device)}"


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
    for i in range(device_count()) if device is None else (index_of(device),):
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
    generator: torch.Generator = _client.default_generator(index_of(device))
    return generator


def seed() -> None:
    """Seed the generator of the current device with a number that nobody can foretell (as torch.cuda.seed)."""
    default_generator().seed()


def seed_all() -> None:
    """Seed the generators of all devices with one such number (as torch.cuda.seed_all)."""
    manual_seed_all(default_generator(0).seed())


def initial_seed() -> int:
    """The seed of the current device's generator (as torch.cuda.initial_seed)."""
    return default_generator().initial_seed()


def get_rng_state(device: Device = "dtorch") -> torch.Tensor:
    """State of a device's default generator, a uint8 CPU tensor. Waits for the worker."""
    return default_generator(device).get_state()


def set_rng_state(new_state: torch.Tensor, device: Device = "dtorch") -> None:
    """Set the state of a device's default generator."""
    default_generator(device).set_state(new_state)


def get_rng_state_all() -> list[torch.Tensor]:
    """States of the default generators of all devices. Waits for the workers."""
    return [get_rng_state(i) for i in range(device_count())]


def set_rng_state_all(new_states: Iterable[torch.Tensor]) -> None:
    """Set the states of the default generators of all devices."""
    for i, state in enumerate(new_states):
        set_rng_state(state, i)


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


# -- streams


def current_stream(device: Device = None) -> torch.Stream:
    """This thread's current stream of a device (as torch.cuda.current_stream)."""
    return torch.accelerator.current_stream(index_of(device))


def default_stream(device: Device = None) -> torch.Stream:
    """The stream that is current where none was chosen (as torch.cuda.default_stream)."""
    current = current_stream(device)
    return torch.Stream(stream_id=0, device_index=current.device_index, device_type=current.device_type)


def set_stream(stream: torch.Stream | None) -> None:
    """Make a stream current, and its device; None changes nothing (as torch.cuda.set_stream)."""
    if stream is not None:
        torch.accelerator.set_stream(stream)


@contextlib.contextmanager
def stream(stream: torch.Stream | None) -> Iterator[None]:
    """Make a stream current, and its device, inside the block; None changes nothing (as torch.cuda.stream)."""
    if stream is None:
        yield
        return
    with device(stream.device.index):
        before = current_stream()
        set_stream(stream)
        try:
            yield
        finally:
            set_stream(before)

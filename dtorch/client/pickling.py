"""Pickling and PyTorch's older file format: a dtorch storage goes as its bytes and the device it was on.

PyTorch pickles a storage by reading its memory at its address, and a dtorch storage has none here. ``copyreg`` is the
standard library's hook for that; ``multiprocessing`` and ``torch.save`` look at their own tables first. What
``torch.save`` writes today needs nothing; its older format reads and writes storages in native code, also by address.
"""

from __future__ import annotations

import copyreg
from collections.abc import Callable
from typing import Any

import torch
from torch.storage import TypedStorage, UntypedStorage

# -- pickle and deepcopy


def _reduce_storage(storage: TypedStorage) -> Any:
    untyped = storage._untyped_storage
    if untyped.device.type != "dtorch":
        return storage.__reduce__()  # type: ignore[no-untyped-call]
    cpu: UntypedStorage = untyped.cpu()  # type: ignore[no-untyped-call]
    return _rebuild, (_typed(cpu, storage.dtype), str(untyped.device))


def _rebuild(cpu: TypedStorage, device: str) -> TypedStorage:
    untyped = cpu._untyped_storage
    bytes_there = torch.empty(untyped.nbytes(), dtype=torch.uint8, device=device)
    bytes_there.copy_(_bytes(untyped))
    return _typed(bytes_there.untyped_storage(), cpu.dtype)


def _typed(untyped: UntypedStorage, dtype: torch.dtype) -> TypedStorage:
    return TypedStorage(wrap_storage=untyped, dtype=dtype, _internal=True)  # type: ignore[no-untyped-call]


def _bytes(storage: UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _reduce_generator(generator: torch.Generator) -> Any:
    """PyTorch's own asks every device but the CPU for an offset, and ours are CPU generators on a worker."""
    if generator.device.type != "dtorch":
        return generator.__reduce__()
    return _rebuild_generator, (str(generator.device), generator.initial_seed(), generator.get_state())


def _rebuild_generator(device: str, seed: int, state: torch.Tensor) -> torch.Generator:
    generator = torch.Generator(device=device)
    generator.manual_seed(seed)
    generator.set_state(state)
    return generator


# -- torch.save(..., _use_new_zipfile_serialization=False) and what it wrote; sending to other processes

_native: Any = torch._C.StorageBase


def _write_file(self: UntypedStorage, *args: Any) -> Any:
    storage = self.cpu() if self.device.type == "dtorch" else self  # type: ignore[no-untyped-call]
    return _native._write_file(storage, *args)


def _set_from_file(self: UntypedStorage, *args: Any) -> Any:
    if self.device.type != "dtorch":
        return _native._set_from_file(self, *args)
    cpu = _native._set_from_file(UntypedStorage(self.nbytes()), *args)  # type: ignore[no-untyped-call]
    _bytes(self).copy_(_bytes(cpu))
    return self


def _only_here(name: str) -> Callable[..., Any]:
    def share(self: UntypedStorage, *args: Any) -> Any:
        if self.device.type == "dtorch":
            raise RuntimeError(
                f"a tensor on {self.device} cannot be sent to another process, which has no connection to the "
                "workers; send tensor.cpu()"
            )
        return getattr(_native, name)(self, *args)

    return share


def install() -> None:
    """Register all of it."""
    copyreg.pickle(TypedStorage, _reduce_storage)
    copyreg.pickle(torch.Generator, _reduce_generator)
    methods: dict[str, Any] = {"_write_file": _write_file, "_set_from_file": _set_from_file}
    methods |= {name: _only_here(name) for name in ("_share_fd_cpu_", "_share_filename_cpu_")}
    for name, method in methods.items():
        setattr(UntypedStorage, name, method)

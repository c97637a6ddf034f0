"""Pickling: a dtorch storage goes as its bytes and the device it was on (torch.save has a way of its own).

PyTorch pickles a storage by reading its memory at its address, and a dtorch storage has none here. ``copyreg`` is the
standard library's hook for that; ``multiprocessing`` and ``torch.save`` look at their own tables first.
"""

from __future__ import annotations

import copyreg
from typing import Any

import torch
from torch.storage import TypedStorage


def _reduce(storage: TypedStorage) -> Any:
    untyped = storage._untyped_storage
    if untyped.device.type != "dtorch":
        return storage.__reduce__()  # type: ignore[no-untyped-call]
    cpu: torch.UntypedStorage = untyped.cpu()  # type: ignore[no-untyped-call]
    return _rebuild, (_typed(cpu, storage.dtype), str(untyped.device))


def _rebuild(cpu: TypedStorage, device: str) -> TypedStorage:
    bytes_there = torch.empty(cpu._untyped_storage.nbytes(), dtype=torch.uint8, device=device)
    bytes_there.copy_(torch.empty(0, dtype=torch.uint8).set_(cpu._untyped_storage))
    return _typed(bytes_there.untyped_storage(), cpu.dtype)


def _typed(untyped: torch.UntypedStorage, dtype: torch.dtype) -> TypedStorage:
    return TypedStorage(wrap_storage=untyped, dtype=dtype, _internal=True)  # type: ignore[no-untyped-call]


def install() -> None:
    """Register it."""
    copyreg.pickle(TypedStorage, _reduce)

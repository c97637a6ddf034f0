"""What ``import dtorch`` offers: the public names, and the device registered with PyTorch.

Any other name of the torch namespace is reachable as ``dtorch.X`` and is ``torch.X``.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import torch
from torch.utils import backend_registration

from dtorch import _buildcheck

_buildcheck.check()

from dtorch import _client  # noqa: E402 (only after the check: a build for another torch must not be loaded)

_client.register(os.path.dirname(torch.__file__) + "/", os.path.dirname(os.path.dirname(__file__)) + "/")
backend_registration.rename_privateuse1_backend("dtorch")

from dtorch.client import device_module, factories, pickling, values  # noqa: E402
from dtorch.client.device_module import (  # noqa: E402
    current_device,
    device,
    get_device_name,
    get_device_properties,
    get_rng_state,
    manual_seed,
    manual_seed_all,
    set_device,
    set_rng_state,
    synchronize,
)
from dtorch.client.futures import TensorFuture  # noqa: E402
from dtorch.client.imports import import_on_workers  # noqa: E402
from dtorch.client.lifecycle import device_count, init, is_initialized, shutdown  # noqa: E402
from dtorch.client.loading import load_file, load_model  # noqa: E402
from dtorch.client.memory import (  # noqa: E402
    allocation_log,
    empty_cache,
    get_per_process_memory_fraction,
    live_tensors,
    max_memory_allocated,
    max_memory_reserved,
    mem_get_info,
    memory_allocated,
    memory_reserved,
    memory_stats,
    memory_summary,
    record_memory_history,
    reset_accumulated_memory_stats,
    reset_peak_memory_stats,
    set_per_process_memory_fraction,
    worker_stats,
)
from dtorch.client.profiling import profile  # noqa: E402
from dtorch.errors import (  # noqa: E402
    ControllerDied,
    DtorchError,
    EngineError,
    InternalError,
    LoadError,
    OutOfMemoryError,
    RemoteError,
    WorkerDied,
)

torch._register_device_module("dtorch", device_module)  # type: ignore[no-untyped-call]
backend_registration.generate_methods_for_privateuse1_backend(for_storage=True)
values.install()
pickling.install()

for _name in factories.NAMES:
    globals()[_name] = factories.make(_name)


def client_stats() -> dict[str, int]:
    """Counters of the client.

    ``records``, ``releases``, ``batches``, ``bytes``: written; ``upload_bytes``: copied for uploads; ``waits``: for
    backpressure; ``geometry_misses``, ``geometry_asks``: calls whose results had to be inferred, and those that the
    worker was asked about; ``geometry_miss_ns``: the time that took; ``geometry_entries``: results known;
    ``items_told``: calls of item() that no worker had to be asked for (integers that follow from what the program
    itself said: ``native/client/contents.h``); ``recycled_uploads``: that took memory of an earlier one;
    ``spare_bytes``: shared memory that waits here, for two seconds, to be used again.
    """
    return _client.counters()


def progress() -> list[tuple[int, int]]:
    """Per worker: (records issued, records executed) as far as the client knows. Does not wait."""
    return _client.progress()


__all__ = [
    "ControllerDied",
    "DtorchError",
    "EngineError",
    "InternalError",
    "LoadError",
    "OutOfMemoryError",
    "RemoteError",
    "TensorFuture",
    "WorkerDied",
    "allocation_log",
    "client_stats",
    "current_device",
    "device",
    "device_count",
    "empty_cache",
    "get_device_name",
    "get_device_properties",
    "get_per_process_memory_fraction",
    "get_rng_state",
    "import_on_workers",
    "init",
    "is_initialized",
    "live_tensors",
    "load_file",
    "load_model",
    "manual_seed",
    "manual_seed_all",
    "max_memory_allocated",
    "max_memory_reserved",
    "mem_get_info",
    "memory_allocated",
    "memory_reserved",
    "memory_stats",
    "memory_summary",
    "profile",
    "progress",
    "record_memory_history",
    "reset_accumulated_memory_stats",
    "reset_peak_memory_stats",
    "set_device",
    "set_per_process_memory_fraction",
    "set_rng_state",
    "shutdown",
    "synchronize",
    "worker_stats",
]
__all__ += list(factories.NAMES)


def fallback(name: str) -> Any:
    """``dtorch.X`` for a name of torch's: torch.X itself."""
    if name.startswith("__"):
        raise AttributeError(f"module 'dtorch' has no attribute {name!r}")
    try:
        return getattr(torch, name)
    except AttributeError:
        raise AttributeError(f"module 'dtorch' has no attribute {name!r}, nor has torch") from None


assert sys.byteorder == "little", "dtorch's records carry element bytes as they are; little-endian machines only"

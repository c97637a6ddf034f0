"""init() and shutdown(): when an engine runs, with which arguments, and what the defaults are."""

from __future__ import annotations

import os
import threading
from typing import Final

import torch

from dtorch import _client, settings
from dtorch.client import engine, imports
from dtorch.errors import EngineError

_lock: Final = threading.RLock()
_arguments: dict[str, object] | None = None  # of the running engine; guarded by _lock

Device = torch.device | str | int | None

#: Why no engine can be started at present; dtorch.profile() sets it.
held_back: str = ""

DEVICES: Final = ("auto", "cpu", "cuda")


def init(
    workers: int = 1,
    device: str = "auto",
    threads_per_worker: int | None = None,
    memory_limit: int | None = None,
) -> None:
    """Start the engine: a controller process and ``workers`` worker processes.

    Returns as soon as the controller answers; the workers come up while the program goes on. Tensors on
    ``torch.device("dtorch:i")`` then live on worker ``i``, for i from 0 to ``workers - 1``.

    Args:
        workers: number of workers, at least 1.
        device: what a worker computes on: "cpu"; "cuda", where worker i takes GPU i modulo the number of GPUs; or
            "auto": "cuda" where PyTorch sees a GPU, else "cpu". This process itself never uses a GPU.
        threads_per_worker: threads that one operator may use (``torch.set_num_threads`` in the worker); by default the
            processors available to this process divided by ``workers``, at least 1.
        memory_limit: bytes that one worker may reserve; by default what the machine (or its control group) has.
            Allocations beyond raise OutOfMemoryError where their value is asked for.

    A second call with the same arguments does nothing. After ``import_on_workers`` it waits for the workers' imports.

    Raises:
        ValueError: an argument is out of range.
        EngineError: an engine with other arguments is running, or the start failed.
        ControllerDied: the controller ended during the start.
        RemoteError: a module given to ``import_on_workers`` cannot be imported on a worker.
    """
    global _arguments
    if device not in DEVICES:
        raise ValueError(f"device={device!r}: one of {', '.join(map(repr, DEVICES))}")
    gpus = 0 if device == "cpu" else _gpus()
    if device == "cuda" and not gpus:
        raise EngineError(f"device='cuda': {_why_no_gpu()}; use device='cpu'")
    device = "cuda" if gpus else "cpu"
    if not _whole(workers, 1, 127):
        raise ValueError(f"workers={workers!r}: the number of workers is a whole number from 1 to 127")
    if threads_per_worker is None:
        threads_per_worker = max(1, len(os.sched_getaffinity(0)) // workers)
    if not _whole(threads_per_worker, 1):
        raise ValueError(f"threads_per_worker={threads_per_worker!r}: a whole number, at least 1")
    if memory_limit is not None and not _whole(memory_limit, 1):
        raise ValueError(f"memory_limit={memory_limit!r}: a whole number of bytes, at least 1, or None")
    wanted: dict[str, object] = {"workers": workers, "device": device, "threads_per_worker": threads_per_worker}
    wanted["memory_limit"] = memory_limit
    with _lock:
        current = engine.current()
        if current is not None and not current.is_over:
            if wanted == _arguments:
                return
            assert _arguments is not None
            raise EngineError(
                f"an engine with {_text(_arguments)} is running, and init was asked for {_text(wanted)}; "
                "call dtorch.shutdown() first"
            )
        if held_back:
            raise EngineError(held_back)
        if current is not None:
            engine.shutdown()
        engine.start(workers, threads_per_worker, device)
        _arguments = wanted
        try:
            if memory_limit is not None:
                for worker in range(workers):
                    _client.option(worker, "memory_limit", min(memory_limit, 1 << 62))
            _client.seed_all(torch.initial_seed())  # what the program seeded before the engine ran counts
            imports.repeat()
        except BaseException:
            shutdown()
            raise


def _gpus() -> int:
    """How many GPUs PyTorch sees; asks the driver's management library, so that no context is made in this process."""
    if torch.version.cuda is None:
        return 0
    before = os.environ.get("PYTORCH_NVML_BASED_CUDA_CHECK")
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    try:
        return torch.cuda.device_count() if torch.cuda.is_available() else 0
    finally:
        if before is None:
            del os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"]
        else:
            os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = before


def _why_no_gpu() -> str:
    if torch.version.cuda is None:
        return f"this torch ({torch.__version__}) was built without CUDA"
    return f"torch {torch.__version__} sees no GPU (nvidia-smi, CUDA_VISIBLE_DEVICES)"


def _whole(n: object, least: int, most: float = float("inf")) -> bool:
    return isinstance(n, int) and not isinstance(n, bool) and least <= n <= most


def _text(arguments: dict[str, object]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in arguments.items() if value is not None)


def start_default() -> None:
    """Start the engine that a program gets when it uses a dtorch tensor before init (called by native code).

    One worker per GPU when there are CUDA workers, else one CPU worker; DTORCH_WORKERS sets another number.
    """
    with _lock:
        current = engine.current()
        if current is not None and current.death is not None:
            raise current.death
        if current is None or current.is_over:
            init(workers=settings.WORKERS.get_int() or _gpus() or 1)


def shutdown() -> None:
    """End the engine: its tensors are lost, what is awaited fails with EngineError, every process is gone.

    Safe to call at any time and more than once; registered with ``atexit``.
    """
    global _arguments
    with _lock:
        engine.shutdown()
        _arguments = None


def is_initialized() -> bool:
    """Whether an engine runs (as torch.cuda.is_initialized)."""
    current = engine.current()
    return current is not None and not current.is_over


def device_count() -> int:
    """Number of workers of the running engine, or of the one that would be started by default."""
    current = engine.current()
    if current is not None and not current.is_over:
        return current.workers
    return settings.WORKERS.get_int() or 1


def index_of(device: Device) -> int:
    """The worker that a device argument means: None and "dtorch" are the current one."""
    if device is None:
        return _client.current_device()
    if isinstance(device, int):
        return device
    d = torch.device(device)
    if d.type != "dtorch":
        raise ValueError(f"expected a dtorch device, not {d}")
    return _client.current_device() if d.index is None else d.index


def running() -> engine.Engine:
    """The running engine; starts the default one when none runs."""
    start_default()
    current = engine.current()
    assert current is not None
    return current

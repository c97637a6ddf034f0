"""What the examples share: the choice of engine, devices by number, and the comparison with eager PyTorch."""

from __future__ import annotations

import argparse
import os
import weakref
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter, tree_map_only

CORES = len(os.sched_getaffinity(0))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags that every example has."""
    parser.add_argument("--engine", choices=("dtorch", "torch"), default="dtorch", help="torch: plain eager PyTorch")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="of workers and of eager PyTorch")
    parser.add_argument("--workers", type=int, default=1, help="dtorch workers, one process each (default 1)")
    parser.add_argument("--threads", type=int, help="threads of each worker, and of eager PyTorch in --check")
    parser.add_argument("--seed", type=int, default=0, help="seed of weights and noise (default 0)")
    parser.add_argument("--check", action="store_true", help="compare with eager PyTorch; exit 1 if unequal")


def start(args: argparse.Namespace) -> None:
    """Start the workers and give eager PyTorch as many threads as one of them has.

    The thread count matters to --check: PyTorch splits a sum by threads, and so its last bits depend on it. On a GPU
    --check asks both sides for the algorithms that give the same bits every time, as far as PyTorch has them.
    """
    if args.workers < 1:
        raise SystemExit(f"--workers must be at least 1, not {args.workers}")
    args.threads = args.threads or max(1, CORES // args.workers)
    _prepare(args)
    if args.engine == "dtorch":
        import dtorch

        dtorch.init(workers=args.workers, device=args.device, threads_per_worker=args.threads)


def _prepare(args: argparse.Namespace) -> None:
    torch.set_num_threads(args.threads)
    if args.check and args.device == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # the workers inherit it
        torch.use_deterministic_algorithms(True, warn_only=True)


def eager(args: argparse.Namespace, function: Callable[..., Any], *arguments: Any) -> Any:
    """What a function of the example returns in eager PyTorch, which has a process of its own for it.

    PyTorch's autograd serves one kind of accelerator in a process. Where dtorch is imported that is dtorch, and the
    gradients of CUDA tensors fail. What goes there and comes back is pickled; the result's tensors come to the CPU.
    """
    with ProcessPoolExecutor(1, get_context("spawn"), _prepare, (args,)) as process:
        return process.submit(_on_cpu, function, *arguments).result()


def _on_cpu(function: Callable[..., Any], *arguments: Any) -> Any:
    return tree_map_only(torch.Tensor, torch.Tensor.cpu, function(*arguments))


def device(args: argparse.Namespace, worker: int) -> torch.device:
    """The device of a worker; where the engine is eager PyTorch, what ``args.device`` says."""
    if args.engine == "dtorch":
        return torch.device("dtorch", worker)
    return torch.device(args.device)


def tolerance(args: argparse.Namespace) -> float:
    """By how much of the largest value --check lets floats differ: not at all on the CPU.

    On a GPU the client's process and a worker may be given other algorithms of the same operator.
    """
    return 0.0 if args.device == "cpu" else 1e-4


def difference(name: str, ours: torch.Tensor, eager: torch.Tensor, tolerance: float = 0.0) -> str | None:
    """Say where two CPU tensors differ; None where they are equal: to the last bit, or within ``tolerance``.

    A tolerance above 0 is meant in parts of eager's largest value.
    """
    if ours.shape != eager.shape or ours.dtype != eager.dtype:
        return f"{name}: {ours.dtype} {tuple(ours.shape)}, but eager PyTorch has {eager.dtype} {tuple(eager.shape)}"
    if torch.equal(ours, eager):
        return None
    if tolerance and (ours.double() - eager.double()).abs().max() <= tolerance * eager.double().abs().max():
        return None
    unequal = (ours != eager).flatten().nonzero().flatten()
    first = int(unequal[0])
    a, b = ours.flatten()[first].item(), eager.flatten()[first].item()
    largest = (ours.double() - eager.double()).abs().max().item()
    return (
        f"{name}: {len(unequal)} of {eager.numel()} values differ, first at flat index {first}: {a!r}, "
        f"but eager PyTorch has {b!r}; the largest difference is {largest:g}"
    )


def verdict(problems: Iterable[str | None], agreed: str) -> int:
    """Print what --check found; returns the exit code."""
    found = [problem for problem in problems if problem]
    for problem in found:
        print(f"check failed: {problem}")
    if not found:
        print(f"check passed: {agreed}")
    return 1 if found else 0


class LiveBytes(TorchDispatchMode):
    """Bytes of the tensors alive in eager PyTorch, and their peak: torch.cuda.max_memory_allocated for a CPU.

    A storage counts from the operator that makes it until it is freed. Scratch memory inside an operator is not
    seen, so the figure flatters eager PyTorch if anything.
    """

    def __init__(self, modules: Iterable[torch.nn.Module]) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._known: weakref.WeakSet[Any] = weakref.WeakSet()
        for module in modules:
            self._count([*module.parameters(), *module.buffers()])

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self._count(leaf for leaf in tree_iter(out) if isinstance(leaf, torch.Tensor))
        return out

    def _count(self, tensors: Iterable[torch.Tensor]) -> None:
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if storage not in self._known:
                self._known.add(storage)
                self.live += storage.nbytes()
                weakref.finalize(storage, self._free, storage.nbytes()).atexit = False
        self.peak = max(self.peak, self.live)

    def _free(self, nbytes: int) -> None:
        self.live -= nbytes

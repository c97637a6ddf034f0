"""Operators by which ``test_gpu.py`` looks into a worker: its switches, its GPU and its process."""

from __future__ import annotations

import os

import torch
from torch import Tensor
from torch.library import custom_op


@custom_op("dtorch_test_gpu::seen", mutates_args=())
def seen(like: Tensor) -> Tensor:
    """What holds on the worker when this runs (see `NAMES`), as whole numbers beside ``like``."""
    values = [
        torch.backends.cuda.matmul.allow_tf32,
        torch.backends.cudnn.allow_tf32,
        torch.backends.cudnn.benchmark,
        torch.backends.cudnn.deterministic,
        torch.are_deterministic_algorithms_enabled(),
        torch.cuda.current_device() if like.is_cuda else -1,
        os.getpid(),
    ]
    return torch.tensor([int(value) for value in values], device=like.device)


@seen.register_fake
def _(like: Tensor) -> Tensor:
    return like.new_empty(len(NAMES), dtype=torch.int64)


NAMES = ("matmul_tf32", "cudnn_tf32", "benchmark", "cudnn_deterministic", "deterministic", "device", "pid")

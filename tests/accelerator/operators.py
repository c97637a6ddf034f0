"""Custom operators for workers on the test's accelerator: a kernel for the CPU alone, and results on the CPU."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.library import custom_op


@custom_op("accelerator_test::doubled", mutates_args=(), device_types="cpu")
def doubled(x: Tensor) -> Tensor:
    return x * 2


@doubled.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


@custom_op("accelerator_test::on_the_host", mutates_args=())
def on_the_host(x: Tensor) -> Tensor:
    """The values in the host's memory, wherever they were."""
    return x.cpu() + 0


@on_the_host.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)

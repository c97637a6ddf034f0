"""Getting values: what dtorch adds to torch.Tensor (to_torch, to_torch_async, await)."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import torch

from dtorch import _client
from dtorch.client.futures import TensorFuture


def to_torch_async(self: torch.Tensor) -> TensorFuture:
    """Ask for this tensor's value and go on; the future gives a CPU tensor without gradient.

    Does not wait. The value is the tensor's at this point of the program: later in-place operators do not change it.
    On a tensor that is not on a dtorch device the future is ready and holds ``self.detach().cpu()``.
    """
    if self.device.type != "dtorch":
        return TensorFuture(None, self.detach().cpu())
    return TensorFuture(_client.fetch(self.detach()))


def to_torch(self: torch.Tensor) -> torch.Tensor:
    """Wait for this tensor's value: a CPU tensor of the same shape, dtype and strides, without gradient.

    Raises what :meth:`TensorFuture.get` raises.
    """
    return to_torch_async(self).get()


def _await(self: torch.Tensor) -> Generator[Any, None, torch.Tensor]:
    return to_torch_async(self).__await__()


def install() -> None:
    """Give torch.Tensor these methods."""
    methods: dict[str, Any] = {"to_torch": to_torch, "to_torch_async": to_torch_async, "__await__": _await}
    for name, function in methods.items():
        setattr(torch.Tensor, name, function)

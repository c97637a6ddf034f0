"""The torch namespace with dtorch as the default device: dtorch.rand, dtorch.zeros, dtorch.tensor and their kin."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Final

import torch

#: Functions of torch that make a tensor from nothing but numbers; dtorch.X puts it on the current dtorch device.
NAMES: Final = (
    "arange",
    "as_tensor",
    "asarray",
    "bartlett_window",
    "blackman_window",
    "empty",
    "empty_permuted",
    "empty_strided",
    "eye",
    "full",
    "hamming_window",
    "hann_window",
    "kaiser_window",
    "linspace",
    "logspace",
    "ones",
    "rand",
    "randint",
    "randn",
    "randperm",
    "range",
    "scalar_tensor",
    "tensor",
    "tril_indices",
    "triu_indices",
    "zeros",
)


def make(name: str) -> Callable[..., torch.Tensor]:
    """``torch.<name>`` with ``device="dtorch"`` where the call gives none."""
    function = getattr(torch, name)

    @functools.wraps(function, assigned=("__name__", "__qualname__"))
    def on_dtorch(*args: Any, **kwargs: Any) -> torch.Tensor:
        kwargs.setdefault("device", "dtorch")
        made: torch.Tensor = function(*args, **kwargs)
        return made

    on_dtorch.__doc__ = (
        f"As ``torch.{name}``, on the current dtorch device unless ``device`` is given.\n\n"
        "Returns a handle at once; the worker computes it."
    )
    on_dtorch.__module__ = "dtorch"
    return on_dtorch

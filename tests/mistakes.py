"""Indices that only a worker knows, so that a wrong one is its to find."""

from __future__ import annotations

from typing import Any

import torch


def computed(values: Any, device: str = "dtorch") -> torch.Tensor:
    """Whole numbers that went through floats: the client cannot tell them (``native/client/contents.h``)."""
    return torch.tensor(values, dtype=torch.float64, device=device).long()

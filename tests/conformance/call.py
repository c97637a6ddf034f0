"""The arguments of one call, and fresh copies of them on a device, laid out in memory exactly as the original."""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_leaves, tree_map


def seed_of(name: str, index: int = 0) -> int:
    """A number that depends on the name and the sample alone, so that each can be run by itself."""
    return zlib.crc32(name.encode()) + index


def seed_all(seed: int) -> None:
    """Seed everything that samples or operators draw from."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)


def _same(result: Any) -> Any:
    return result


@dataclass
class Call:
    """The arguments of one call, on one device."""

    device: str
    input: Any = None
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    output_for_grad: Callable[..., Any] = _same  # picks what of the result is differentiated

    def tensors(self) -> list[torch.Tensor]:
        """Every tensor among the arguments."""
        leaves = tree_leaves((self.input, self.args, self.kwargs))
        return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


class Copier:
    """Copies values to a device; tensors keep strides, offsets, aliases among each other and ``requires_grad``."""

    def __init__(self, device: str) -> None:
        self.device = device
        self._tensors: dict[int, torch.Tensor] = {}
        self._storages: dict[Any, torch.Tensor] = {}

    def tree(self, value: Any) -> Any:
        """A copy of a tree of lists, tuples, dicts and values."""
        return tree_map(self._leaf, value)

    def _leaf(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            if id(value) not in self._tensors:
                self._tensors[id(value)] = self._copy(value)
            return self._tensors[id(value)]
        if isinstance(value, torch.device) and value.type == "cpu":
            return torch.device(self.device)
        if isinstance(value, str) and value == "cpu":
            return self.device
        if isinstance(value, torch.Generator):
            return torch.Generator(device=self.device).manual_seed(value.initial_seed())
        return value

    def _copy(self, t: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            plain = t.detach()
            if plain.is_meta:
                made = plain
            elif plain.layout != torch.strided:
                made = plain.clone().to(self.device)
            elif plain.is_conj():
                made = self._copy(plain.conj()).conj()
            elif plain.is_neg():
                made = self._copy(plain._neg_view())._neg_view()
            elif _owns_its_storage(plain):
                made = torch.empty_strided(plain.size(), plain.stride(), dtype=plain.dtype, device=self.device).copy_(
                    plain
                )
            else:  # a view: copy what it is a view of
                key = (plain.untyped_storage()._cdata, plain.dtype)
                if key not in self._storages:
                    whole = torch.empty(0, dtype=plain.dtype).set_(plain.untyped_storage())
                    self._storages[key] = torch.empty_like(whole, device=self.device).copy_(whole)
                made = self._storages[key].as_strided(plain.size(), plain.stride(), plain.storage_offset())
            # A leaf, as the originals are; a view made without gradient would remember that.
            return made.detach().requires_grad_(t.requires_grad)


def _owns_its_storage(t: torch.Tensor) -> bool:
    whole = t.untyped_storage().nbytes() == t.numel() * t.element_size()
    dense = torch.empty_like(t).stride() == t.stride()  # preserved for dense tensors only
    return whole and dense and t.storage_offset() == 0

"""An operator's samples, and fresh copies of a sample on a device, laid out in memory exactly as the original."""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.opinfo.core import OpInfo, SampleInput
from torch.utils._pytree import tree_leaves, tree_map

#: Arguments that PyTorch wants on the CPU whatever the device: (operator, index of the argument after the input).
STAYS_ON_CPU = {("tensor_split", 0)}


def name_of(op: OpInfo) -> str:
    """The operator's name with its variant: unique in op_db."""
    return f"{op.name}.{op.variant_test_name}" if op.variant_test_name else op.name


def operators(dtype: torch.dtype) -> dict[str, OpInfo]:
    """The operators of op_db that take ``dtype`` on the CPU."""
    return {name_of(op): op for op in op_db if dtype in op.dtypes}


def seed_of(name: str, index: int = 0) -> int:
    """A number that depends on the operator and the sample alone, so that each can be run by itself."""
    return zlib.crc32(name.encode()) + index


def seed_all(seed: int) -> None:
    """Seed everything that samples or operators draw from."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)


def chosen(op: OpInfo, dtype: torch.dtype, most: int) -> list[tuple[int, SampleInput]]:
    """At most ``most`` samples with their numbers, spread over all that the operator has: neighbours are alike."""
    seed_all(seed_of(name_of(op)))
    grad = op.supports_autograd and (dtype.is_floating_point or dtype.is_complex)
    samples = list(enumerate(op.sample_inputs("cpu", dtype, requires_grad=grad)))
    if len(samples) <= most:
        return samples
    if most == 1:
        return [samples[len(samples) // 2]]
    return [samples[i * (len(samples) - 1) // (most - 1)] for i in range(most)]


def errors(op: OpInfo) -> Iterator[SampleInput]:
    """Calls that PyTorch refuses."""
    if op.error_inputs_func is None:
        return
    seed_all(seed_of(name_of(op)))
    for error in op.error_inputs("cpu"):
        yield error.sample_input


@dataclass
class Call:
    """The arguments of one call, on one device."""

    device: str
    input: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output_for_grad: Callable[..., Any]

    def tensors(self) -> list[torch.Tensor]:
        """Every tensor among the arguments."""
        leaves = tree_leaves((self.input, self.args, self.kwargs))
        return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


def copy_to(sample: SampleInput, device: str, op: str = "") -> Call:
    """A copy of a sample on a device, with the same strides, offsets, aliases and ``requires_grad``."""
    tensors: dict[int, torch.Tensor] = {}
    storages: dict[Any, torch.Tensor] = {}

    def place(t: torch.Tensor) -> torch.Tensor:
        if id(t) not in tensors:
            tensors[id(t)] = _copy(t, device, storages)
        return tensors[id(t)]

    def leaf(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return place(value)
        if isinstance(value, torch.device) and value.type == "cpu":
            return torch.device(device)
        if isinstance(value, str) and value == "cpu":
            return device
        if isinstance(value, torch.Generator):
            return torch.Generator(device=device).manual_seed(value.initial_seed())
        return value

    args = [value if (op, i) in STAYS_ON_CPU else tree_map(leaf, value) for i, value in enumerate(sample.args)]
    kwargs = {key: tree_map(leaf, value) for key, value in sample.kwargs.items()}
    return Call(device, tree_map(leaf, sample.input), tuple(args), kwargs, sample.output_process_fn_grad)


def _copy(t: torch.Tensor, device: str, storages: dict[Any, torch.Tensor]) -> torch.Tensor:
    with torch.no_grad():
        plain = t.detach()
        if plain.is_meta:
            made = plain
        elif plain.layout != torch.strided:
            made = plain.clone().to(device)
        elif plain.is_conj():
            made = _copy(plain.conj(), device, storages).conj()
        elif plain.is_neg():
            made = _copy(plain._neg_view(), device, storages)._neg_view()
        elif _owns_its_storage(plain):
            made = torch.empty_strided(plain.size(), plain.stride(), dtype=plain.dtype, device=device).copy_(plain)
        else:  # a view: copy what it is a view of
            key = (plain.untyped_storage()._cdata, plain.dtype)
            if key not in storages:
                whole = torch.empty(0, dtype=plain.dtype).set_(plain.untyped_storage())
                storages[key] = torch.empty_like(whole, device=device).copy_(whole)
            made = storages[key].as_strided(plain.size(), plain.stride(), plain.storage_offset())
        # A leaf, as the originals are; a view made without gradient would remember that.
        return made.detach().requires_grad_(t.requires_grad)


def _owns_its_storage(t: torch.Tensor) -> bool:
    whole = t.untyped_storage().nbytes() == t.numel() * t.element_size()
    dense = torch.empty_like(t).stride() == t.stride()  # preserved for dense tensors only
    return whole and dense and t.storage_offset() == 0

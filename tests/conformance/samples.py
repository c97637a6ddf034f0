"""An operator's samples: which there are, and copies of one on a device."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.opinfo.core import OpInfo, SampleInput
from torch.utils._pytree import tree_leaves

from .call import Call, Copier, seed_all, seed_of

#: Arguments that PyTorch wants on the CPU whatever the device: (operator, index of the argument after the input).
STAYS_ON_CPU = {("tensor_split", 0)}


def name_of(op: OpInfo) -> str:
    """The operator's name with its variant: unique in op_db."""
    return f"{op.name}.{op.variant_test_name}" if op.variant_test_name else op.name


def operators(dtype: torch.dtype) -> dict[str, OpInfo]:
    """The operators of op_db that take ``dtype`` on the CPU."""
    return {name_of(op): op for op in op_db if dtype in op.dtypes}


def all_of(op: OpInfo, dtype: torch.dtype) -> list[SampleInput]:
    """Every sample of the operator."""
    seed_all(seed_of(name_of(op)))
    grad = op.supports_autograd and (dtype.is_floating_point or dtype.is_complex)
    return list(op.sample_inputs("cpu", dtype, requires_grad=grad))


def spread(count: int, most: int | None) -> list[int]:
    """At most ``most`` of the numbers below ``count``, spread over them: neighbours are alike."""
    if most is None or count <= most:
        return list(range(count))
    if most == 1:
        return [count // 2]
    return [i * (count - 1) // (most - 1) for i in range(most)]


def errors(op: OpInfo) -> Iterator[SampleInput]:
    """Calls that PyTorch refuses."""
    if op.error_inputs_func is None:
        return
    seed_all(seed_of(name_of(op)))
    for error in op.error_inputs("cpu"):
        yield error.sample_input


def copy_to(sample: SampleInput, device: str, op: str = "") -> Call:
    """A copy of a sample on a device."""
    copier = Copier(device)
    args = [value if (op, i) in STAYS_ON_CPU else copier.tree(value) for i, value in enumerate(sample.args)]
    kwargs = {key: copier.tree(value) for key, value in sample.kwargs.items()}
    return Call(device, copier.tree(sample.input), tuple(args), kwargs, sample.output_process_fn_grad)


def is_sparse(sample: SampleInput) -> bool:
    """Whether a tensor among the arguments has no strides."""
    leaves = tree_leaves((sample.input, sample.args, sample.kwargs))
    return any(isinstance(leaf, torch.Tensor) and leaf.layout != torch.strided for leaf in leaves)

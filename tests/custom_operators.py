"""Custom operators as a program would define them, in a module of their own; ``test_custom_operators.py`` imports it.

It knows nothing of dtorch: the client and the workers import the very same file.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.library import custom_op

# -- defined by decorators; the kernels stand for every device


@custom_op("dtorch_test::mul_add", mutates_args=())
def mul_add(x: Tensor, y: Tensor, factor: float = 2.0) -> Tensor:
    return x * factor + y


@mul_add.register_fake
def _(x: Tensor, y: Tensor, factor: float = 2.0) -> Tensor:
    return torch.empty_like(x)


def _keep_factor(ctx: Any, inputs: Any, output: Tensor) -> None:
    ctx.factor = inputs[2]


def _mul_add_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
    return mul_add(grad, torch.zeros_like(grad), ctx.factor), grad, None


mul_add.register_autograd(_mul_add_backward, setup_context=_keep_factor)


@mul_add.register_vmap
def _(info: Any, in_dims: Any, x: Tensor, y: Tensor, factor: float = 2.0) -> tuple[Tensor, int]:
    x, y = (t if d is None else t.movedim(d, 0) for t, d in zip((x, y), in_dims, strict=False))
    x, y = torch.broadcast_tensors(x, y)
    return mul_add(x, y, factor), 0


@custom_op("dtorch_test::numpy_sort", mutates_args=())
def numpy_sort(x: Tensor, descending: bool) -> tuple[Tensor, Tensor]:
    """With a library that knows no device but the CPU."""
    order = x.numpy().argsort(axis=-1)
    order = order[..., ::-1].copy() if descending else order
    indices = torch.from_numpy(order)
    return x.gather(-1, indices), indices


@numpy_sort.register_fake
def _(x: Tensor, descending: bool) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(x, dtype=torch.int64)


@custom_op("dtorch_test::clip", mutates_args=("x",))
def clip(x: Tensor, low: float, high: float) -> None:
    x.clamp_(low, high)


@custom_op("dtorch_test::clip_counting", mutates_args=("x", "count"))
def clip_counting(x: Tensor, count: Tensor, high: float) -> Tensor:
    above = x > high
    count.add_(above.sum())
    x.clamp_(max=high)
    return above


@clip_counting.register_fake
def _(x: Tensor, count: Tensor, high: float) -> Tensor:
    return torch.empty_like(x, dtype=torch.bool)


@custom_op("dtorch_test::parts", mutates_args=())
def parts(x: Tensor, sizes: Sequence[int], names: str, other: Tensor | None = None) -> list[Tensor]:
    made = [part.clone() for part in x.split(list(sizes))]
    return made if other is None else [*made, other.clone()]


@parts.register_fake
def _(x: Tensor, sizes: Sequence[int], names: str, other: Tensor | None = None) -> list[Tensor]:
    made = [torch.empty_like(part) for part in x.split(list(sizes))]
    return made if other is None else [*made, torch.empty_like(other)]


@custom_op("dtorch_test::noisy", mutates_args=())
def noisy(x: Tensor) -> Tensor:
    return x + torch.rand_like(x)


@noisy.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


@custom_op("dtorch_test::positive", mutates_args=())
def positive(x: Tensor) -> Tensor:
    """How large the result is depends on the data."""
    return x[x > 0]


@positive.register_fake
def _(x: Tensor) -> Tensor:
    return x.new_empty(torch.library.get_ctx().new_dynamic_size())


@custom_op("dtorch_test::positive_without_fake", mutates_args=())
def positive_without_fake(x: Tensor) -> Tensor:
    return x[x > 0]


@custom_op("dtorch_test::total", mutates_args=())
def total(x: Tensor, factor: int | float | bool = 1) -> float:
    """Gives no tensor but a number."""
    return float(x.sum()) * float(factor)


@custom_op("dtorch_test::process", mutates_args=())
def process(x: Tensor) -> Tensor:
    """The process that computes it."""
    return torch.full_like(x, os.getpid(), dtype=torch.int64)


@process.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x, dtype=torch.int64)


# -- defined piece by piece, for the CPU alone

library = torch.library.Library("dtorch_test", "FRAGMENT")
library.define("half_of(Tensor x, Scalar by=2) -> Tensor")
library.define("accumulate_(Tensor(a!) total, Tensor x) -> Tensor(a!)")
library.define("composed(Tensor x) -> Tensor")


@torch.library.impl(library, "half_of", "CPU")
def _half_of(x: Tensor, by: float = 2) -> Tensor:
    return x / by


@torch.library.register_fake("dtorch_test::half_of", lib=library)
def _(x: Tensor, by: float = 2) -> Tensor:
    return torch.empty_like(x)


@torch.library.impl(library, "accumulate_", "CPU")
def _accumulate(total: Tensor, x: Tensor) -> Tensor:
    return total.add_(x)


@torch.library.impl(library, "composed", "CompositeImplicitAutograd")
def _composed(x: Tensor) -> Tensor:
    return x.sin() * 2


# -- with mistakes in them


@custom_op("dtorch_test::refusing", mutates_args=())
def refusing(x: Tensor) -> Tensor:
    raise LookupError("it does not like its argument")


@refusing.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


@custom_op("dtorch_test::refusing_at_once", mutates_args=())
def refusing_at_once(x: Tensor) -> Tensor:
    raise LookupError("it does not like its argument")


@custom_op("dtorch_test::leaving", mutates_args=())
def leaving(x: Tensor) -> Tensor:
    raise SystemExit(3)


@leaving.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


@custom_op("dtorch_test::mistaken", mutates_args=())
def mistaken(x: Tensor) -> Tensor:
    return torch.cat([x, x])


@mistaken.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


library.define("itself(Tensor x) -> Tensor")
library.define("twisting(Tensor x) -> Tensor")
library.define("nothing(Tensor x) -> Tensor")
library.define("elsewhere(Tensor x) -> Tensor")
library.define("view_of(Tensor(a) x) -> Tensor(a)")
library.impl("itself", lambda x: x, "CPU")
library.impl("twisting", lambda x: x.unsqueeze_(0).t_().clone(), "CPU")
library.impl("nothing", lambda x: None, "CPU")
library.impl("elsewhere", lambda x: x.to("meta"), "CPU")
library.impl("view_of", lambda x: x[1:], "CPU")
for _name in ("itself", "nothing", "elsewhere"):
    library.impl(_name, lambda x: torch.empty_like(x), "Meta")

"""Sums, differences, products and quotients of a few numbers have the bits of PyTorch's own kernels.

SMALL-1 is an invariant of ``native/worker/small.h``. Each program runs twice: the second time nothing has to be asked.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest
import torch
from same import Device, Program, eager_threads, named, same

import dtorch

if TYPE_CHECKING:
    from dtorch.client.engine import Engine

OPERATORS = (operator.add, operator.sub, operator.mul, operator.truediv)
IN_PLACE = (operator.iadd, operator.isub, operator.imul, operator.itruediv)
#: Numbers at which arithmetic is not just arithmetic.
EDGES = (0.0, -0.0, 1.0, -3.5, 1e-45, -1e-40, 3e38, 1e-20, float("inf"), float("-inf"), float("nan"), 0.1)


@pytest.fixture(autouse=True)
def _engine(engine: Engine) -> Iterator[None]:
    with eager_threads(engine.threads_per_worker):
        yield


def _edges(on: Device, dtype: torch.dtype) -> list[torch.Tensor]:
    """Every pair of them, a few at a time and one by one."""
    numbers = torch.tensor(EDGES, dtype=dtype)
    a, b = (on.put(t.reshape(-1)) for t in torch.meshgrid(numbers, numbers, indexing="ij"))
    few = [op(a[i : i + 4], b[i : i + 4]) for op in OPERATORS for i in range(0, len(a), 4)]
    return few + [op(a[i], b[i]) for op in OPERATORS for i in range(len(a))]


def _whole(on: Device) -> list[torch.Tensor]:
    large = on.put([2**63 - 1, -(2**63), 7, -7, 3])
    other = on.put([1, -1, 2, 2, -3])
    return [op(large, other) for op in OPERATORS]


def _written(on: Device, dtype: torch.dtype) -> list[Any]:
    seen = []
    for op in IN_PLACE:
        x, y = on(3, 4, dtype=dtype), on(3, 4, dtype=dtype)
        view = x[1]
        op(x, y)
        op(x, x)
        seen += [x, view, x._version]
    return seen


def _donated(on: Device) -> torch.Tensor:
    x = on(5)
    for _ in range(4):  # each takes the memory of the last
        x = (x + x) * x - x
    return x


@named(
    float_edges=lambda on: _edges(on, torch.float32),
    double_edges=lambda on: _edges(on, torch.float64),
    whole_numbers=_whole,
    sizes=lambda on: [op(on(n), on(n)) for op in OPERATORS for n in (1, 2, 7, 63, 64, 65, 0)],
    shapes=lambda on: [op(on(*s), on(*s)) for op in OPERATORS for s in ((), (1, 1), (2, 1, 3), (4, 0))],
    broadcast=lambda on: [op(on(3, 4), on(4)) for op in OPERATORS] + [op(on(3), on()) for op in OPERATORS],
    dtypes=lambda on: [
        op(on(3, dtype=a), on(3)) for op in OPERATORS for a in (torch.float64, torch.int64, torch.bfloat16)
    ],
    strides=lambda on: [op(on(3, 4).t(), on(3, 4).t()) for op in OPERATORS] + [on(6)[::2] + on(6)[::2]],
    ambiguous=lambda on: [on(5, 4)[:, :1] + on(5, 1), on(1, 4).as_strided((1, 4), (9, 1)) * on(1, 4)],
    channels_last=lambda on: on(2, 3, 2, 2).to(memory_format=torch.channels_last) + on(2, 3, 2, 2),
    alpha=lambda on: (
        [torch.add(on(3), on(3), alpha=a) for a in (1, 1.0, 2, 0.1, -1)]
        + [torch.sub(on(3), on(3), alpha=a) for a in (1, 3)]
    ),
    numbers=lambda on: [op(on(3), 2.5) for op in OPERATORS] + [op(on.put([1, 2]), 3) for op in OPERATORS],
    conjugated=lambda on: on(3, dtype=torch.complex64).conj() * on(3, dtype=torch.complex64),
    negated=lambda on: on(3, dtype=torch.complex64).conj().imag + on(3),
    written=lambda on: _written(on, torch.float32),
    written_doubles=lambda on: _written(on, torch.float64),
    donated=_donated,
)
def test_small1_the_bits_are_pytorchs(program: Program) -> None:
    for _ in range(2):
        same(program)


def small() -> int:
    return dtorch.worker_stats(0)["small_arithmetic"]


def test_what_small_arithmetic_does_and_what_it_leaves_to_pytorch() -> None:
    def done(program: Callable[[], Any]) -> int:
        program()  # by the worker's question, if its shapes are new
        before = small()
        kept = program()
        dtorch.synchronize(0)
        del kept
        return small() - before

    x, y = (torch.arange(1.0, 5.0, device="dtorch:0") for _ in range(2))
    nan = torch.full((4,), float("nan"), device="dtorch:0")
    assert done(lambda: [x + y, x - y, x * y, x / y]) == 4
    assert done(lambda: [x.add_(y), x.mul_(y), x.div_(y)]) == 3
    assert done(lambda: [x + nan, x.half() + y.half(), x + y[0], torch.add(x, y, alpha=2)]) == 0
    assert done(lambda: [torch.ones(65, device="dtorch:0") + torch.ones(65, device="dtorch:0")]) == 0


def test_tensors_that_overlap_in_part_are_refused_as_ever() -> None:
    for dtype in (torch.float32, torch.int64):
        x, y = (torch.arange(6, dtype=dtype, device="dtorch:0") for _ in range(2))
        x[0:3].add_(y[1:4])  # the same geometry, and right
        before = x.tolist()
        with pytest.raises((RuntimeError, dtorch.RemoteError), match="single memory location"):
            x[0:3].add_(x[1:4])
            x.tolist()
        fresh = torch.arange(6, dtype=dtype, device="dtorch:0")
        fresh[0:3].add_(fresh[0:3])
        assert fresh.tolist() == [0, 2, 4, 3, 4, 5]
        assert before == [1, 3, 5, 3, 4, 5]


def test_a_wrong_call_raises_what_eager_raises() -> None:
    x = torch.arange(3, device="dtorch:0")
    with pytest.raises(RuntimeError, match="can't be cast"):
        x.div_(torch.arange(1, 4, device="dtorch:0"))
    assert x.tolist() == [0, 1, 2]

"""Operators that write lists of tensors in place (_foreach_add_), and the order in which gradients are summed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest
import torch
from same import Device, eager_threads, same

import dtorch

if TYPE_CHECKING:
    from dtorch.client.engine import Engine


@pytest.fixture(autouse=True)
def _engine(engine: Engine) -> Iterator[None]:
    with eager_threads(engine.threads_per_worker):
        yield


def test_autograd_notices_that_a_list_was_written() -> None:
    for device in ("cpu", "dtorch"):
        y = torch.ones(3, device=device, requires_grad=True) * 2
        loss = y.pow(2).sum()  # keeps y for its gradient
        with torch.no_grad():
            torch._foreach_add_([y, torch.zeros(2, device=device)], [1.0, 2.0])
        assert y._version == 1
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_versions_are_not_counted_where_eager_counts_none() -> None:
    with torch.inference_mode():
        x = dtorch.ones(3)
        torch._foreach_mul_([x], 2.0)
        assert x.tolist() == [2.0] * 3


WRONG: dict[str, Callable[[Device], Any]] = {
    "lengths": lambda on: torch._foreach_add_([on(3), on(3)], [on(3)]),
    "sizes": lambda on: torch._foreach_mul_([on(3)], [on(4)]),
    "scalars": lambda on: torch._foreach_div_([on(3), on(3)], [1.0]),
    "dtype": lambda on: torch._foreach_add_([on(3, dtype=torch.int64)], [on(3)]),
    "empty": lambda on: torch._foreach_sqrt_([]),
}


@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG)
def test_a_wrong_list_raises_at_the_call_what_eager_raises(wrong: Callable[[Device], Any]) -> None:
    with pytest.raises(Exception) as eager:
        wrong(Device("cpu"))
    with pytest.raises(type(eager.value)) as ours:
        wrong(Device("dtorch"))
    assert str(ours.value).split("\n")[0] == str(eager.value).split("\n")[0]


def test_a_right_list_is_looked_at_once() -> None:
    lists = [[torch.ones(5, 6, device="dtorch") for _ in range(3)] for _ in range(2)]
    torch._foreach_addcmul_(lists[0], lists[1], lists[1], 0.5)
    before = dtorch.client_stats()["geometry_misses"]
    for value in range(5):
        torch._foreach_addcmul_(lists[0], lists[1], lists[1], float(value))
    assert dtorch.client_stats()["geometry_misses"] == before
    assert lists[0][2].unique().tolist() == [11.5]


def _penalty(on: Device) -> list[Any]:
    """A gradient penalty: the graph of the second derivative is made by the script and by the backward pass."""
    x, w = on.parameter(5, 7), on.parameter(7, 7)
    y = ((x @ w).tanh() @ w.t() * x).sigmoid()
    grads = torch.autograd.grad(y.pow(2).sum(), [x, w], create_graph=True)
    (y.sum() + sum(g.pow(2).sum() for g in grads)).backward()
    return [*grads, x.grad, w.grad]


def test_second_derivatives_are_summed_in_eagers_order() -> None:
    for _ in range(3):
        same(_penalty)

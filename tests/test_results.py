"""What of a result is not only its values: where it starts in its storage, what is lazy about it, how often it was
changed, in which order its gradients were added up, and what memory holds that nothing has written.

Every case is a program that runs once on the CPU and once on a worker (see same.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest
import torch
from same import Device, eager_threads, same

if TYPE_CHECKING:
    from dtorch.client.engine import Engine


@pytest.fixture(autouse=True)
def _engine(engine: Engine) -> Iterator[None]:
    with eager_threads(engine.threads_per_worker):
        yield


@pytest.fixture
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def _with_versions(*tensors: torch.Tensor) -> list[Any]:
    return [*tensors, *(t._version for t in tensors)]


# -- where a result starts, and what is lazy about it


@pytest.mark.parametrize("times", [1, 2])  # asked for, and remembered
def test_a_result_keeps_its_offset(times: int) -> None:
    def program(on: Device) -> Any:
        whole = on(4, 6)
        for _ in range(times):
            result = torch.slice_scatter(whole[1:, ::2], on(3, 1), 1, 0, 1)
        return [result, result + 1, result[1:].sum(), result.clone()]

    assert same(program)[0].storage_offset() == 6


@pytest.mark.parametrize("times", [1, 2])
def test_a_lazily_conjugated_result_stays_so(times: int) -> None:
    def program(on: Device) -> Any:
        a, b = on(5, dtype=torch.complex64), on(5, dtype=torch.complex64)
        for _ in range(times):
            result = torch.vdot(a, b.conj())
        return [result, result * 2, result.resolve_conj(), torch.view_as_real(result.resolve_conj())]

    assert same(program)[0].is_conj()


def test_a_result_that_starts_later_can_be_written_and_lent() -> None:
    def program(on: Device) -> Any:
        result = torch.select_scatter(on(300, 400)[1:, ::2], on(299), 1, 3)  # above what a message carries
        read = result.to("cpu", copy=True)
        result.mul_(2)
        return [result, on.put(read.contiguous()), result.T.contiguous()]

    same(program)


def test_pixel_unshuffle_by_one_keeps_its_inputs_strides() -> None:
    """The CPU's kernel does, the composite one does not."""
    x = torch.empty_strided((1, 0, 1, 1), (2, 2, 2, 2))
    ours = torch.empty_strided((1, 0, 1, 1), (2, 2, 2, 2), device="dtorch")
    for op in (torch.pixel_shuffle, torch.pixel_unshuffle):
        assert op(ours, 1).stride() == op(x, 1).stride()
    assert torch.pixel_unshuffle(ours, 1).stride() == (2, 2, 2, 2)


# -- what was changed, and how often


def test_lists_given_as_out_count_their_changes() -> None:
    def program(on: Device) -> Any:
        outs = [on(0), on(7), on(2)]
        torch.unbind_copy(on(3, 2), 0, out=outs[:3])
        parts = [on(0), on(0)]
        torch.split_with_sizes_copy(on(5), [2, 3], out=parts)
        return _with_versions(*outs, *parts)

    same(program)


def test_a_range_into_an_empty_tensor_with_steps_keeps_its_stride() -> None:
    for device in ("cpu", "dtorch"):
        out = torch.zeros(0, device=device)[::2]
        torch.arange(1, 1, 1, out=out)
        assert (out.shape, out.stride()) == ((0,), (2,))


# -- gradients of gradients


@pytest.mark.parametrize(
    "function",
    [
        lambda x, y: torch.dist(x, y, 4),
        lambda x, y: (x @ y).sin() * x + (x * y).exp(),
        lambda x, y: torch.linalg.solve(x, y),
        lambda x, y: x.pow(y.abs() * 0.1) + x.norm(-1.5),
    ],
    ids=["dist", "products", "solve", "powers"],
)
def test_gradients_of_gradients_are_added_up_in_eagers_order(function: Callable[..., torch.Tensor]) -> None:
    def program(on: Device) -> Any:
        x, y = on(5, 5).abs().add(1).requires_grad_(), on(5, 5).requires_grad_()
        result = function(x, y)
        weight = on(*result.shape).requires_grad_()
        first = torch.autograd.grad(result, (x, y), weight, create_graph=True)
        second = torch.autograd.grad(first, (x, y, weight), [on(5, 5), on(5, 5)])
        return _with_versions(*first, *second)

    same(program)


def test_a_gradient_penalty_after_other_backwards_is_eagers() -> None:
    def program(on: Device) -> Any:
        x, w = on(6, 6).requires_grad_(), on(6, 6).requires_grad_()
        results: list[Any] = []
        for _ in range(3):
            value = (x @ w).tanh().square().sum() + (w * x).sum()
            (g,) = torch.autograd.grad(value, x, create_graph=True)
            loss = (g.norm() - 1).square() + value
            results += torch.autograd.grad(loss, (x, w))
        return _with_versions(*results)

    same(program)


# -- tensors that stand for zeros


def test_a_tensor_that_stands_for_zeros_is_zero_wherever_it_is_needed() -> None:
    zeros = torch._efficientzerotensor((2, 3), device="dtorch")
    assert zeros._is_zerotensor()
    ones = torch.ones(2, 3, device="dtorch")
    for value in (zeros.clone(), zeros.mul(2), zeros * ones, zeros[1:], zeros.add(0), zeros.t() @ ones, zeros.sum(0)):
        assert value.cpu().tolist() == torch.zeros(value.shape).tolist()
    assert (zeros + ones).tolist() == torch.ones(2, 3).tolist()
    assert torch.dot(zeros[0], ones[0]).item() == 0


# -- memory that nothing has written


def test_deterministic_mode_fills_memory(deterministic: None) -> None:
    def program(on: Device) -> Any:
        grown = on(2)
        grown.resize_(5)
        made = [torch.empty(3, dtype=dtype, device=on.name) for dtype in (torch.float32, torch.int16, torch.bool)]
        strided = torch.empty_strided((2, 3), (1, 2), dtype=torch.complex64, device=on.name)
        return [grown, *made, strided, torch.empty_like(on(2, 2)), on(4).new_empty(3), *(t._version for t in made)]

    same(program)


def test_memory_is_not_filled_when_pytorch_is_told_not_to(deterministic: None) -> None:
    import dtorch

    torch.utils.deterministic.fill_uninitialized_memory = False
    try:
        dtorch.synchronize(0)
        before = dtorch.client_stats()["records"]
        torch.empty(3, device="dtorch:0")
        assert dtorch.client_stats()["records"] == before
    finally:
        torch.utils.deterministic.fill_uninitialized_memory = True

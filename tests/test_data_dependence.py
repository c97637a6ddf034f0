"""What depends on the data and not on the shapes alone: indices, masks, bags, CTC, values on the CPU, as in eager.

Each program runs on the CPU and, twice, on a worker (see same.py): the second time the client knows the operators. Most
have gradients, for a result whose size the worker tells must still be part of the graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.nn.functional as F
from same import Device, Program, eager_threads, named, same
from torch import nn

import dtorch

if TYPE_CHECKING:
    from dtorch.client.engine import Engine


@pytest.fixture(autouse=True)
def _engine(engine: Engine) -> Iterator[None]:
    with eager_threads(engine.threads_per_worker):
        yield


def _with_gradients(on: Device, use: Callable[..., torch.Tensor], *shapes: tuple[int, ...]) -> list[Any]:
    leaves = [on.parameter(*shape) for shape in shapes]
    out = use(*leaves)
    out.pow(2).sum().backward()
    return [out, [leaf.grad for leaf in leaves]]


@named(
    nonzero=lambda on: _with_gradients(on, lambda x: x[x.nonzero(as_tuple=True)], (4, 3)),
    where_one=lambda on: _with_gradients(on, lambda x: x[torch.where(x > 0)], (4, 3)),
    argwhere=lambda on: [(m := on(3, 4) > 0), torch.argwhere(m), m.nonzero().shape, len(m.nonzero())],
    masked_select=lambda on: _with_gradients(on, lambda x: x.masked_select(x < 0), (4, 3)),
    masked_select_broadcast=lambda on: _with_gradients(on, lambda x: x.masked_select(on(3) > 0), (4, 3)),
    masked_scatter=lambda on: _with_gradients(on, lambda x, y: x.masked_scatter(on(4, 3) > 0, y), (4, 3), (12,)),
    mask=lambda on: _with_gradients(on, lambda x: x[x[:, 0] > 0] * 2, (6, 3)),
    mask_of_nothing=lambda on: _with_gradients(on, lambda x: x[x > 99], (4, 3)),
    mask_written=lambda on: _with_gradients(on, lambda x: _written(x * 1, on(4, 3) > 0, 5.0), (4, 3)),
    unique=lambda on: _with_gradients(on, lambda x: x[torch.unique(on.indices(4, 9))], (4, 3)),
    unique_inverse=lambda on: torch.unique(on.indices(5, 4, 6), return_inverse=True, return_counts=True, dim=1),
    then_shapes=lambda on: on(1).expand((on.indices(2, 30) > 0).nonzero().size(0)),
)
def test_results_whose_size_is_in_the_data(program: Program) -> None:
    for _ in range(2):
        same(program)


def _written(x: torch.Tensor, index: Any, value: Any) -> torch.Tensor:
    x[index] = value
    return x


@named(
    read=lambda on: _with_gradients(on, lambda x: x[torch.tensor([3, 0, 3])], (4, 3)),
    read_beside_a_workers=lambda on: _with_gradients(on, lambda x: x[torch.tensor([3, 0]), on.put([1, 1])], (4, 3)),
    read_mask=lambda on: _with_gradients(on, lambda x: x[torch.tensor([True, False, True, True])], (4, 3)),
    put=lambda on: _with_gradients(on, lambda x, v: x.index_put((torch.tensor([1, 2]),), v), (4, 3), (2, 3)),
    put_accumulates=lambda on: _with_gradients(
        on, lambda x, v: (x * 1).index_put_((torch.tensor([1, 1, 2]),), v, accumulate=True), (4, 3), (3, 3)
    ),
    put_a_number=lambda on: on(4, 3).index_put_((torch.tensor([0]), torch.tensor([2])), torch.tensor(7.0)),
    put_by_mask=lambda on: on(4, 3).index_put_((torch.tensor([True, False, True, False]),), on(3)),
    assign=lambda on: _with_gradients(on, lambda x, v: _written(x * 1, torch.tensor([2, 0]), v), (4, 3), (2, 3)),
    assign_a_list=lambda on: _written(on(4, 3), [1, 3], on(3)),
)
def test_indices_on_the_cpu(program: Program) -> None:
    for _ in range(2):
        same(program)


def test_an_index_out_of_range_is_an_error_and_the_worker_lives() -> None:
    x = dtorch.ones(4, 3)
    for index in (torch.tensor([9]), dtorch.tensor([9])):
        with pytest.raises((IndexError, dtorch.RemoteError), match=r"out of (bounds|range)"):
            x[index].cpu()
    assert x.tolist() == [[1.0] * 3] * 4


def _bag(mode: str, **how: Any) -> Program:
    def program(on: Device) -> list[Any]:
        bag = on.module(lambda: nn.EmbeddingBag(9, 4, mode=mode, **how))
        weights = on.parameter(10) if mode == "sum" else None
        ids, offsets = on.indices(9, 10), on.put([0, 3, 3, 8])  # an empty bag among them
        out = bag(ids, offsets, weights)
        rows = bag(on.indices(9, 3, 5))
        (out.pow(2).sum() + rows.sum()).backward()
        return [out, rows, bag.weight.grad, weights.grad if weights is not None else None]

    return program


@named(
    sum=_bag("sum"),
    mean=_bag("mean"),
    max=_bag("max"),
    sum_padded=_bag("sum", padding_idx=2),
    mean_padded=_bag("mean", padding_idx=2),
    scaled=_bag("mean", scale_grad_by_freq=True),
    last_offset=lambda on: F.embedding_bag(
        on.indices(9, 6), on(9, 4), on.put([0, 2, 6]), mode="sum", include_last_offset=True
    ),
)
def test_embedding_bag(program: Program) -> None:
    for _ in range(2):
        same(program)


def _ctc(on: Device, lengths: Callable[[list[int]], Any], targets: Any, **how: Any) -> list[Any]:
    x = on.parameter(9, 3, 5)
    loss = F.ctc_loss(x.log_softmax(2), targets, lengths([9, 7, 5]), lengths([3, 0, 2]), **how)
    loss.sum().backward()
    return [loss, x.grad]


ROWS = [[1, 2, 1], [3, 3, 3], [4, 1, 2]]


@named(
    lengths_of_ints=lambda on: _ctc(on, tuple, on.put(ROWS)),
    lengths_on_the_worker=lambda on: _ctc(on, on.put, on.put(ROWS)),
    lengths_on_the_cpu=lambda on: _ctc(on, torch.tensor, on.put(ROWS), reduction="sum"),
    targets_in_a_row=lambda on: _ctc(on, tuple, on.put([1, 2, 1, 4, 1]), reduction="none"),
    blank=lambda on: _ctc(on, tuple, on.put([[0, 1, 2]] * 3), blank=4, zero_infinity=True),
)
def test_ctc_loss(program: Program) -> None:
    for _ in range(2):
        same(program)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64], ids=str)
def test_tolist_gives_eagers_numbers(dtype: torch.dtype) -> None:
    def program(on: Device) -> list[Any]:
        x = on(2, 3, dtype=dtype)
        return [x.tolist(), x.t()[1].tolist(), x[0, 0].tolist(), x[:0].tolist(), [v.item() for v in x[1]]]

    same(program)


def test_numpy_of_a_workers_tensor_raises_what_a_gpus_would() -> None:
    with pytest.raises(TypeError, match=r"can't convert dtorch:0 device type tensor to numpy\. Use Tensor\.cpu\(\)"):
        dtorch.ones(3).numpy()
    with pytest.raises(RuntimeError, match=r"Can't call numpy\(\) on Tensor that requires grad"):
        dtorch.ones(3).requires_grad_().cpu().numpy()

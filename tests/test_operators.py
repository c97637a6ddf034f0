"""Operators and idioms on a worker give eager's values, dtypes, shapes, strides and bits.

Every case is a program that runs once on the CPU and once on a worker (see same.py). Where a case has several lines,
it is the order of reading and writing that matters.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.nn.functional as F
from same import Device, Program, assert_same, eager_threads, named, same
from torch import nn
from torch.utils.checkpoint import checkpoint

import dtorch

if TYPE_CHECKING:
    from dtorch.client.engine import Engine


@pytest.fixture(autouse=True)
def _engine(engine: Engine) -> Iterator[None]:
    with eager_threads(engine.threads_per_worker):
        yield


# -- elementwise operators and what they are mixed with


@named(
    add=lambda on: on(3, 4) + on(3, 4),
    add_alpha=lambda on: torch.add(on(3, 4), on(3, 4), alpha=-0.5),
    add_broadcast=lambda on: on(3, 1, 4) + on(5, 1),
    add_zero_dim=lambda on: on(3, 4) + on(),
    add_empty=lambda on: on(0, 4) + on(1, 4),
    rsub=lambda on: 1 - on(3),
    mul_scalar=lambda on: on(3, 4) * 2.5,
    div_floor=lambda on: torch.div(on(3, 4), on(3, 4), rounding_mode="floor"),
    div_trunc_ints=lambda on: torch.div(on(9, dtype=torch.int32), 4, rounding_mode="trunc"),
    remainder=lambda on: on(9, dtype=torch.int64) % 4,
    pow=lambda on: on(3, 4) ** 2,
    pow_tensor=lambda on: on(3, 4).abs() ** on(4),
    pow_of_scalar=lambda on: 2 ** on(3, 4),
    compare=lambda on: [on(3, 4) > 0, on(3, 4) <= on(4), on(5, dtype=torch.int8) == 3, on(3) != on(3)],
    logic=lambda on: [on(9, dtype=torch.bool) & on(9, dtype=torch.bool), ~on(9, dtype=torch.bool)],
    shifts=lambda on: [on.indices(9, 8) << 2, on.indices(99, 8) >> 1, on.indices(9, 8) ^ 5],
    unary=lambda on: [
        getattr(on(7).abs(), name)() for name in ("exp", "log", "sqrt", "rsqrt", "sin", "cos", "tanh", "erf")
    ],
    rounding=lambda on: [getattr(on(7) * 9, name)() for name in ("floor", "ceil", "round", "trunc", "frac", "sign")],
    activations=lambda on: [f(on(3, 4)) for f in (F.relu, F.gelu, F.silu, F.mish, F.elu, F.softplus, F.hardswish)],
    gelu_tanh=lambda on: F.gelu(on(3, 4), approximate="tanh"),
    clamp=lambda on: [on(9).clamp(-0.5, 0.5), on(9).clamp(min=0), on(9).clamp(max=on(9))],
    where=lambda on: [torch.where(on(3, 4) > 0, on(3, 4), on(4)), torch.where(on(3) > 0, 1.0, 0.0)],
    lerp=lambda on: [torch.lerp(on(5), on(5), 0.3), torch.lerp(on(5), on(5), on(5))],
    addcmul=lambda on: torch.addcmul(on(5), on(5), on(5), value=0.5),
    nan_to_num=lambda on: torch.nan_to_num(on.put([float("nan"), float("inf"), -0.0, 1.0])),
    signed_zero=lambda on: [on.put([0.0, -0.0]) * -1, on.put([0.0, -0.0]).reciprocal()],
)
def test_elementwise(program: Program) -> None:
    same(program)


@named(
    int_and_float=lambda on: on(4, dtype=torch.int32) + on(4),
    int_and_float_scalar=lambda on: on(4, dtype=torch.int32) * 0.5,
    bool_and_int=lambda on: on(4, dtype=torch.bool) + on(4, dtype=torch.uint8),
    bool_sum=lambda on: on(4, dtype=torch.bool).sum(),
    int_division=lambda on: on(4, dtype=torch.int64) / 3,
    bf16_and_float=lambda on: on(4, dtype=torch.bfloat16) + on(4),
    bf16_and_zero_dim_float=lambda on: on(4, dtype=torch.bfloat16) + on(),
    half_and_scalar=lambda on: on(4, dtype=torch.float16) * 3,
    float_and_complex=lambda on: on(4) * on(4, dtype=torch.complex64),
    float_and_complex_scalar=lambda on: on(4) * (1 + 2j),
    double_and_float=lambda on: on(4, dtype=torch.float64) - on(4),
    to_and_back=lambda on: on(4, 5).to(torch.float16).to(torch.int32).double().bool(),
    to_type_as=lambda on: on(4).type_as(on(2, dtype=torch.float64)),
    to_channels_last=lambda on: on(2, 3, 4, 5).to(torch.float64, memory_format=torch.channels_last),
    float8=lambda on: on(6).to(torch.float8_e4m3fn).float(),
)
def test_dtypes_are_promoted_and_converted(program: Program) -> None:
    same(program)


@named(
    zero_dim_cpu_right=lambda on: on(3, 4) * torch.tensor(2.5),
    zero_dim_cpu_left=lambda on: torch.tensor(2.5) - on(3, 4),
    zero_dim_cpu_double=lambda on: on(3, 4) + torch.tensor(2.5, dtype=torch.float64),
    zero_dim_cpu_int=lambda on: on(3, 4, dtype=torch.int32) + torch.tensor(7),
    zero_dim_cpu_complex=lambda on: on(3) * torch.tensor(1j),
    zero_dim_cpu_bf16=lambda on: on(3, dtype=torch.bfloat16) * torch.tensor(1.25, dtype=torch.bfloat16),
    in_place=lambda on: on(3, 4).mul_(torch.tensor(2.5)),
    where=lambda on: torch.where(on(3) > 0, on(3), torch.tensor(0.0)),
    masked_fill=lambda on: on(3, 4).masked_fill(on(3, 4) > 0, torch.tensor(-1.0)),
    index_put_value=lambda on: on(3, 4).index_put_((on.put([0, 2]),), torch.tensor(9.0)),
    item_assignment=lambda on: _assign(on(3, 4), (1, slice(None)), torch.tensor(5.0)),
)
def test_a_zero_dim_cpu_tensor_may_stand_beside_a_workers(program: Program) -> None:
    same(program)


# -- writing in place, and into out=


@named(
    chain=lambda on: on(3, 4).add_(1).mul_(2).sub_(on(4)).div_(3).neg_(),
    activations=lambda on: [on(9).relu_(), on(9).sigmoid_(), on(9).clamp_(-1, 1), F.leaky_relu_(on(9))],
    fill=lambda on: [on(3).fill_(2), on(3).zero_(), on(3).fill_(on())],
    copy=lambda on: [on(3, 4).copy_(on(4)), on(3).copy_(on(3, dtype=torch.float64)), on(2).to(torch.int8).copy_(on(2))],
    masked_fill=lambda on: on(3, 4).masked_fill_(on(3, 4) > 0, 7.0),
    masked_scatter=lambda on: on(3, 4).masked_scatter_(on(3, 4) > 0, on(12)),
    index_add=lambda on: on(5, 3).index_add_(0, on.put([0, 4, 2]), on(3, 3), alpha=2),
    index_copy=lambda on: on(5, 3).index_copy_(0, on.put([0, 4, 2]), on(3, 3)),
    index_fill=lambda on: on(5, 3).index_fill_(1, on.put([0, 2]), -1.0),
    scatter=lambda on: on(4, 5).scatter_(1, on.indices(5, 4, 2), on(4, 2)),
    scatter_value=lambda on: on(4, 5).scatter_(1, on.indices(5, 4, 2), 3.0),
    scatter_add=lambda on: on(4, 5).scatter_add_(0, on.indices(4, 3, 5), on(3, 5)),
    scatter_reduce=lambda on: on(4, 5).scatter_reduce_(1, on.indices(5, 4, 5), on(4, 5), "amax", include_self=False),
    addmm=lambda on: on(3, 4).addmm_(on(3, 5), on(5, 4), beta=0.5, alpha=2),
    baddbmm=lambda on: on(2, 3, 4).baddbmm_(on(2, 3, 5), on(2, 5, 4)),
    addcdiv=lambda on: on(3).addcdiv_(on(3), on(3), value=0.1),
    lerp=lambda on: on(3).lerp_(on(3), 0.25),
    tril_triu=lambda on: [on(4, 4).tril_(), on(4, 4).triu_(1)],
    cumsum=lambda on: on(3, 4).cumsum_(1),
    transpose=lambda on: on(3, 4).t_().add_(1),
    unsqueeze=lambda on: on(3, 4).unsqueeze_(1).squeeze_(1),
    fill_diagonal=lambda on: on(4, 4).fill_diagonal_(0.5),
    eq=lambda on: on(4).eq_(1.0),
    logic=lambda on: on(9, dtype=torch.bool).logical_and_(on(9, dtype=torch.bool)),
    itself=lambda on: [(x := on(4)).add_(x), (y := on(4, 4)).copy_(y), (z := on(4, 4)).copy_(z.t().clone())],
    upload=lambda on: on(3, 4).copy_(torch.ones(4)),
    upload_into_a_view=lambda on: _assign(on(3, 4), (slice(None), 1), torch.arange(3.0)),
    augmented=lambda on: _augmented(on(3, 4)),
)
def test_in_place(program: Program) -> None:
    same(program)


def _assign(x: torch.Tensor, index: Any, value: Any) -> torch.Tensor:
    x[index] = value
    return x


def _augmented(x: torch.Tensor) -> torch.Tensor:
    x += 1
    x[1] *= 2
    x[:, 0] -= x[:, 1]
    x /= 3
    return x


def _into(on: Device, shape: tuple[int, ...], function: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
    out = on(*shape)
    result = function(*args, out=out, **kwargs)
    return [out, result is out]


@named(
    add=lambda on: _into(on, (3, 4), torch.add, on(3, 4), on(4)),
    matmul=lambda on: _into(on, (3, 5), torch.matmul, on(3, 4), on(4, 5)),
    mm_transposed=lambda on: [torch.mm(on(3, 4), on(4, 5), out=(out := on(5, 3).t())), out],
    bmm=lambda on: _into(on, (2, 3, 5), torch.bmm, on(2, 3, 4), on(2, 4, 5)),
    sum=lambda on: _into(on, (3,), torch.sum, on(3, 4), 1),
    cat=lambda on: _into(on, (6, 4), torch.cat, [on(2, 4), on(4, 4)]),
    stack=lambda on: _into(on, (2, 4), torch.stack, [on(4), on(4)]),
    index_select=lambda on: _into(on, (2, 4), torch.index_select, on(5, 4), 0, on.put([4, 1])),
    clamp=lambda on: _into(on, (9,), torch.clamp, on(9), -1, 1),
    softmax=lambda on: _into(on, (3, 4), torch.softmax, on(3, 4), 1),
    cumsum=lambda on: _into(on, (3, 4), torch.cumsum, on(3, 4), 1),
    cast=lambda on: torch.add(on(4, dtype=torch.int32), 1, out=torch.empty(4, device=on.name)),
    into_a_view=lambda on: [torch.mul(on(4), 2, out=(base := on(3, 4))[1]), base],
    several=lambda on: torch.max(on(3, 4), 1, out=(on(3), on.indices(1, 3))),
    sort=lambda on: torch.sort(on(3, 4), 1, out=(on(3, 4), on.indices(1, 3, 4))),
    empty=lambda on: torch.add(on(3, 4), 1, out=torch.empty(0, device=on.name)),
    empty_matmul=lambda on: torch.matmul(on(3, 4), on(4, 5), out=torch.empty(0, device=on.name)),
    empty_and_used=lambda on: [torch.sub(on(3, 4), 1, out=(o := torch.empty(0, device=on.name))), o * 2, o.sum(0)],
    arange=lambda on: torch.arange(5, out=torch.empty(5, device=on.name)),
    linspace=lambda on: torch.linspace(0, 1, 5, out=torch.empty(0, device=on.name)),
)
def test_out(program: Program) -> None:
    same(program)


@named(
    smaller=lambda on: _into(on, (2, 2), torch.add, on(3, 4), 1),
    larger=lambda on: _into(on, (9, 9), torch.mm, on(3, 4), on(4, 5)),
    reduced=lambda on: _into(on, (7,), torch.sum, on(3, 4), 1),
    twice=lambda on: [torch.exp(on(n), out=o) for o in [on(2)] for n in (5, 3)],
)
def test_out_of_another_size_is_resized_with_eagers_warning(program: Program) -> None:
    heard: list[list[str]] = []
    results = []
    for name in ("cpu", "dtorch"):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            results.append(program(Device(name)))
        heard.append([str(w.message).partition(" (Triggered")[0] for w in caught])
    assert_same(results[1], results[0])
    assert "was resized" in heard[0][0]
    assert heard[1] == heard[0]


# -- views


@named(
    slices=lambda on: [(x := on(4, 5, 6))[1], x[:, 2:4], x[..., ::2], x[1:, 3], x[-1], x[None, :, None], x[0, 0, 0]],
    shapes=lambda on: [(x := on(4, 6)).view(2, 12), x.reshape(3, 8), x.flatten(), x.unflatten(1, (2, 3)), x.view(-1)],
    permuted=lambda on: [(x := on(2, 3, 4)).mT, x.permute(2, 0, 1), x.movedim(0, 2), x[0].t(), x.adjoint()],
    reshape_copies=lambda on: on(3, 4).t().reshape(2, 6),
    expand=lambda on: [(x := on(3, 1)).expand(3, 4), x.expand(2, -1, 4), x.broadcast_to(3, 5), x.expand(3, 4) * 2],
    expand_sum=lambda on: on(3, 1).expand(3, 4).sum(1),
    expand_contiguous=lambda on: on(3, 1).expand(3, 4).contiguous(),
    squeeze=lambda on: [on(1, 3, 1).squeeze(), on(1, 3, 1).squeeze(0), on(3).unsqueeze(-1)],
    split=lambda on: [*on(7, 3).split(3), *on(6, 3).chunk(4), *torch.tensor_split(on(5), 2), *on(3, 2).unbind(1)],
    diagonal=lambda on: [on(4, 4).diagonal(), on(4, 5).diagonal(1), on(2, 3, 3).diagonal(dim1=1, dim2=2)],
    as_strided=lambda on: torch.as_strided(on(12), (3, 3), (2, 1), 1) + 0,
    unfold=lambda on: on(10).unfold(0, 4, 3),
    narrow=lambda on: [on(5, 4).narrow(0, 1, 3), on(5, 4).select(1, 2)],
    swap=lambda on: on(2, 3, 4).swapaxes(0, 2).contiguous(),
    view_dtype=lambda on: [on(4, 6).view(torch.int32), on(4, 6).view(torch.uint8), on(4, 6).view(torch.float64)],
    view_as=lambda on: on(4, 3).view_as(on(2, 6)),
    ops_on_views=lambda on: [(x := on(4, 5)).t() + 1, x[:, 1:].exp(), x[::2] * x[1::2], x.t() @ x, x[1].sum()],
    strides_follow=lambda on: [(x := on(2, 3, 4, 5)).permute(3, 0, 2, 1) + 1, x.transpose(1, 2) * x.transpose(1, 2)],
    strides_mixed=lambda on: [on(3, 4).t() + on(4, 3), on(4, 3) + on(3, 4).t(), on(3, 4).t() + on(3)],
    flip_roll=lambda on: [on(3, 4).flip(1), on(3, 4).roll(1, 0), on(3, 4).rot90()],
)
def test_views(program: Program) -> None:
    same(program)


@named(
    slice_then_base=lambda on: [(x := on(4, 5))[1:3].mul_(2), x],
    base_then_slice=lambda on: [(x := on(4, 5)), (v := x[:, 2]), x.add_(1) is x, v + 0, v],
    transposed=lambda on: [(x := on(4, 5)).t().add_(on(4)), x],
    setitem=lambda on: _assign(on(4, 5), (slice(1, 3), 2), 9.0),
    setitem_tensor=lambda on: _assign(on(4, 5), slice(None, None, 2), on(2, 5)),
    setitem_broadcast=lambda on: _assign(on(4, 5), ..., on(5)),
    setitem_other_dtype=lambda on: _assign(on(4, 5), 1, on(5, dtype=torch.int64)),
    diagonal=lambda on: [(x := on(4, 4)).diagonal().zero_(), x],
    nested=lambda on: [(x := on(4, 4, 4))[1][:, 2].fill_(3), x],
    reshaped=lambda on: [(x := on(4, 6)).view(24)[5:9].neg_(), x],
    as_strided=lambda on: [(x := on(12)).as_strided((3,), (4,), 1).fill_(0), x],
    copy_between_views=lambda on: [(x := on(4, 5))[0].copy_(x[3]), x],
    overlapping_shift=lambda on: [(x := on(9))[1:].copy_(x[:-1].clone()), x],
    view_dtype=lambda on: [(x := on(4)).view(torch.int32).bitwise_and_(0x7FFFFFFF), x],
    out_into_a_view=lambda on: [torch.add(on(2, 2), 1, out=(x := on(4, 4))[1:3, ::2]), x],
    expanded_source=lambda on: [(x := on(3, 4)).copy_(on(1, 4).expand(3, 4)), x],
    chunks=lambda on: [(x := on(6, 2)), *(c.mul_(7) for c in x.chunk(3))],
)
def test_writing_through_views_reaches_the_base(program: Program) -> None:
    same(program)


def test_a_view_is_a_view() -> None:
    x = dtorch.zeros(4, 5)
    assert x.t()._base is x
    assert x[1].untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
    assert x.data_ptr() != dtorch.zeros(4, 5).data_ptr()
    assert x[1].data_ptr() == x.data_ptr() + 5 * 4
    assert torch.Tensor.is_set_to(x.view(4, 5), x)


# -- indices


@named(
    rows=lambda on: on(5, 4)[on.put([4, 0, 0])],
    rows_negative=lambda on: on(5, 4)[on.put([-1, -5])],
    two=lambda on: on(5, 4)[on.put([4, 0]), on.put([1, 3])],
    broadcast=lambda on: on(5, 4)[on.put([[4], [0]]), on.put([1, 3])],
    apart=lambda on: on(5, 4, 3)[on.put([4, 0]), :, on.put([1, 2])],
    with_slice=lambda on: on(5, 4, 3)[1:, on.put([0, 3])],
    list=lambda on: on(5, 4)[[0, 2]],
    int32=lambda on: on(5, 4)[on.put(torch.tensor([1, 2], dtype=torch.int32))],
    two_dim=lambda on: on(5, 4)[on.indices(5, 2, 3)],
    zero_dim=lambda on: on(5, 4)[on.put(2)],
    mask_assign=lambda on: _assign(x := on(5, 4), x > 0, 0.0),
    mask_assign_tensor=lambda on: _assign(x := on(5, 4), x[:, 0] > 0, on(4)),
    assign=lambda on: _assign(on(5, 4), on.put([0, 3]), on(2, 4)),
    assign_two=lambda on: _assign(on(5, 4), (on.put([0, 3]), on.put([1, 1])), 7.0),
    put=lambda on: on(5, 4).index_put_((on.put([1, 1, 2]),), on(3, 4), accumulate=True),
    put_new=lambda on: on(5, 4).index_put((on.put([1, 2]), on.put([0, 0])), on(2)),
    gather=lambda on: torch.gather(on(4, 5), 1, on.indices(5, 4, 3)),
    take=lambda on: [torch.take(on(4, 5), on.indices(20, 3)), torch.take_along_dim(on(4, 5), on.indices(5, 4, 1), 1)],
    index_select=lambda on: on(4, 5).index_select(1, on.put([4, 4, 0])),
    index_fill=lambda on: on(4, 5).index_fill(0, on.put([1]), 2),
    scatter=lambda on: torch.scatter(on(4, 5), 1, on.indices(5, 4, 2), on(4, 2)),
    embedding=lambda on: F.embedding(on.indices(7, 2, 3), on(7, 4)),
    one_hot=lambda on: F.one_hot(on.indices(5, 6), 5),
    searchsorted=lambda on: torch.searchsorted(on(9).sort()[0], on(4)),
    bucketize=lambda on: torch.bucketize(on(9), on.put([-1.0, 0.0, 1.0])),
)
def test_indexing(program: Program) -> None:
    same(program)


@named(
    read=lambda on: on(5, 4)[torch.tensor([4, 0])],
    read_two=lambda on: on(5, 4)[torch.tensor([4, 0]), torch.tensor([1, 2])],
    read_mixed=lambda on: on(5, 4)[torch.tensor([4, 0]), on.put([1, 2])],
    read_slice=lambda on: on(5, 4)[:, torch.tensor([1, 1])],
    read_mask=lambda on: on(5, 4)[torch.tensor([True, False, True, True, False])],
    write=lambda on: _assign(on(5, 4), torch.tensor([4, 0]), on(2, 4)),
    write_number=lambda on: _assign(on(5, 4), (slice(None), torch.tensor([0, 2])), 3.0),
    write_mask=lambda on: _assign(on(4), torch.tensor([True, False, False, True]), 3.0),
    put=lambda on: on(5, 4).index_put_((torch.tensor([1, 2]),), on(4)),
    numpy=lambda on: on(5, 4)[torch.arange(3).numpy()],
)
def test_indices_may_be_cpu_tensors(program: Program) -> None:
    same(program)


@named(
    mask=lambda on: (x := on(5, 4))[x > 0],
    mask_rows=lambda on: (x := on(5, 4))[x[:, 0] > 0],
    mask_none=lambda on: (x := on(5, 4))[x > 99],
    mask_and_index=lambda on: (x := on(5, 4))[x[:, 0] > 0, 1],
    nonzero=lambda on: [(on(5, 4) > 0).nonzero(), *torch.nonzero(on(5) > 0, as_tuple=True)],
    where_one=lambda on: torch.where(on(5, 4) > 0),
    argwhere=lambda on: torch.argwhere(on(5, 4) > 0),
    masked_select=lambda on: on(5, 4).masked_select(on(4) > 0),
    unique=lambda on: on(20, dtype=torch.int64).unique(),
    unique_all=lambda on: torch.unique(on(20, dtype=torch.int64), return_inverse=True, return_counts=True),
    unique_dim=lambda on: torch.unique(on.indices(2, 6, 2), dim=0),
    unique_consecutive=lambda on: torch.unique_consecutive(on.indices(3, 20), return_counts=True),
    bincount=lambda on: torch.bincount(on.indices(6, 20)),
    repeat_interleave=lambda on: [torch.repeat_interleave(on(3), on.put([1, 0, 2])), on(3).repeat_interleave(2)],
    then_more=lambda on: ((x := on(5, 4))[x > 0] * 2).sum(),
    equal=lambda on: [torch.equal(x := on(5), x.clone()), torch.equal(on(5), on(5)), torch.allclose(x, x + 1e-9)],
    is_nonzero=lambda on: [bool(on() > 99), on(1).item(), (on(5) > 0).any().item(), on(2, 2).tolist()],
    histc=lambda on: torch.histc(on(50), 5, -1, 1),
    combinations=lambda on: torch.combinations(on(4)),
)
def test_shapes_and_values_that_depend_on_the_data(program: Program) -> None:
    same(program)
    same(program)  # and the second time, when the geometry cache knows the operators


# -- reductions, several results, linear algebra, making tensors


@named(
    sums=lambda on: [(x := on(3, 4, 5)).sum(), x.sum(1), x.sum((0, 2), keepdim=True), x.mean(), x.mean(-1)],
    sum_dtype=lambda on: [on(4, dtype=torch.bfloat16).sum(dtype=torch.float32), on(4, dtype=torch.int8).sum()],
    products=lambda on: [on(3, 4).prod(), on(3, 4).prod(1), on(3, 4).cumprod(0), on(3, 4).cumsum(1)],
    extremes=lambda on: [(x := on(3, 4)).max(), x.min(), x.amax(1), x.amin(0, keepdim=True), x.aminmax()],
    extremes_dim=lambda on: [(x := on(3, 5)).max(1), x.min(0), x.argmax(), x.argmin(1), x.median(1)],
    spread=lambda on: [(x := on(3, 4)).std(), x.var(1), x.std(0, correction=0), *torch.var_mean(x, 1)],
    norms=lambda on: [(x := on(3, 4)).norm(), x.norm(1), x.norm(dim=1), torch.linalg.vector_norm(x, 3, 0)],
    truth=lambda on: [(x := on(3, 4) > 0).any(), x.all(), x.any(1), x.all(0), x.count_nonzero()],
    logsumexp=lambda on: [on(3, 4).logsumexp(1), on(3, 4).softmax(0), on(3, 4).log_softmax(1)],
    sorts=lambda on: [on(3, 9).sort(1), on(9).argsort(descending=True), on(3, 9).topk(3), on(9).kthvalue(2)],
    cummax=lambda on: on(3, 9).cummax(1),
    mode=lambda on: on.indices(3, 4, 9).mode(1),
    transposed_sum=lambda on: on(37, 53).t().sum(0),
    large_sum=lambda on: on(300, 301).sum(),
)
def test_reductions(program: Program) -> None:
    same(program)


@named(
    matmul=lambda on: [on(3, 4) @ on(4, 5), on(4) @ on(4), on(3, 4) @ on(4), on(2, 3, 4) @ on(4, 5), on(4) @ on(4, 5)],
    matmul_batched=lambda on: [on(2, 3, 4) @ on(2, 4, 5), on(2, 1, 3, 4) @ on(3, 4, 5)],
    matmul_transposed=lambda on: [on(4, 3).t() @ on(5, 4).t(), on(2, 4, 3).mT @ on(2, 4, 5)],
    matmul_types=lambda on: [on(7, 8, dtype=d) @ on(8, 9, dtype=d) for d in (torch.bfloat16, torch.half, torch.int64)],
    matmul_empty=lambda on: [on(0, 4) @ on(4, 5), on(3, 0) @ on(0, 5)],
    addmm=lambda on: [torch.addmm(on(5), on(3, 4), on(4, 5)), torch.addmv(on(3), on(3, 4), on(4))],
    bmm=lambda on: [torch.bmm(on(2, 3, 4), on(2, 4, 5)), torch.baddbmm(on(2, 3, 5), on(2, 3, 4), on(2, 4, 5))],
    einsum=lambda on: [torch.einsum("bij,bkj->bik", on(2, 3, 4), on(2, 5, 4)), torch.einsum("ii->", on(3, 3))],
    outer=lambda on: [torch.outer(on(3), on(4)), torch.dot(on(5), on(5)), torch.kron(on(2, 2), on(2, 2))],
    tensordot=lambda on: torch.tensordot(on(3, 4, 5), on(4, 5, 2), 2),
    solve=lambda on: [torch.linalg.solve(x := on(4, 4) + 5 * torch.eye(4, device=on.name), on(4)), torch.linalg.inv(x)],
    decompose=lambda on: [torch.linalg.qr(on(4, 4)), torch.linalg.svdvals(on(4, 3)), torch.linalg.det(on(3, 3))],
    cholesky=lambda on: torch.linalg.cholesky((x := on(4, 4)) @ x.mT + 4 * torch.eye(4, device=on.name)),
    eigh=lambda on: torch.linalg.eigvalsh((x := on(4, 4)) + x.mT),
    cdist=lambda on: torch.cdist(on(3, 4), on(5, 4)),
    cross=lambda on: torch.linalg.cross(on(2, 3), on(2, 3)),
    large=lambda on: on(130, 140) @ on(140, 150),
)
def test_linear_algebra(program: Program) -> None:
    same(program)


@named(
    cat=lambda on: [torch.cat([on(2, 3), on(4, 3)]), torch.cat([on(2, 3), on(2, 1)], 1), torch.cat([on(0), on(2, 3)])],
    cat_types=lambda on: torch.cat([on(2), on(3, dtype=torch.int64)]),
    cat_channels_last=lambda on: torch.cat([on(2, 3, 4, 4).to(memory_format=torch.channels_last)] * 2, 1),
    stack=lambda on: [torch.stack([on(3), on(3)]), torch.stack([on(3), on(3)], -1), torch.hstack([on(3), on(2)])],
    pad=lambda on: [F.pad(on(3, 4), (1, 2)), F.pad(on(1, 3, 4), (1, 1), mode="reflect"), F.pad(on(3), (0, 2), value=9)],
    tile=lambda on: [on(2, 3).repeat(2, 1), on(2, 3).tile(3), torch.block_diag(on(2, 2), on(3, 3))],
    meshgrid=lambda on: torch.meshgrid(on(3), on(4), indexing="ij"),
    tri=lambda on: [on(4, 4).tril(), on(4, 4).triu(1), on(3).diag(), torch.diag_embed(on(2, 3)), on(3, 3).trace()],
    like=lambda on: [torch.zeros_like(x := on(3, 4).t()), torch.ones_like(x), torch.full_like(x, 2), x.new_zeros(2, 2)],
    like_types=lambda on: [torch.zeros_like(on(3), dtype=torch.int8), on(3).new_full((2,), 7, dtype=torch.float64)],
    clones=lambda on: [(x := on(3, 4).t()).clone(), x.contiguous(), x.clone(memory_format=torch.contiguous_format)],
    interpolate=lambda on: [F.interpolate(on(1, 2, 4, 4), scale_factor=2, mode=m) for m in ("nearest", "bilinear")],
    pools=lambda on: [F.max_pool2d(x := on(1, 2, 6, 6), 2), F.avg_pool2d(x, 3), F.adaptive_avg_pool2d(x, 4)],
    max_pool_indices=lambda on: F.max_pool2d(on(1, 2, 6, 6), 2, return_indices=True),
    grid_sample=lambda on: F.grid_sample(on(1, 2, 4, 4), on(1, 3, 3, 2).tanh(), align_corners=False),
    pixel_shuffle=lambda on: [F.pixel_shuffle(on(1, 4, 3, 3), 2), F.unfold(on(1, 2, 4, 4), 2)],
    fold=lambda on: F.fold(on(1, 8, 9), 4, 2),
    fft=lambda on: [torch.fft.fft(on(8)), torch.fft.rfft(on(3, 8)), torch.fft.irfft(torch.fft.rfft(on(8)))],
    stft=lambda on: torch.stft(on(64), 16, window=torch.hann_window(16, device=on.name), return_complex=True),
    cosine=lambda on: [F.cosine_similarity(x := on(3, 4), on(3, 4)), F.normalize(x), F.pairwise_distance(x, on(4))],
    losses=lambda on: [F.mse_loss(on(3), on(3)), F.cross_entropy(on(3, 5), on.indices(5, 3)), F.l1_loss(on(3), on(3))],
    more_losses=lambda on: [
        F.binary_cross_entropy_with_logits(on(3), on(3).sigmoid()),
        F.kl_div(on(3, 4).log_softmax(1), on(3, 4).softmax(1), reduction="batchmean"),
        F.smooth_l1_loss(on(3), on(3)),
        F.nll_loss(on(3, 5).log_softmax(1), on.indices(5, 3), weight=on(5).abs(), ignore_index=2),
    ],
    ctc_loss=lambda on: F.ctc_loss(
        on(9, 2, 5).log_softmax(2), on.put([[1, 2], [3, 4]]), on.put([9, 9]), on.put([2, 2]), reduction="none"
    ),
    rms_norm=lambda on: [F.rms_norm(on(3, 8), (8,), on(8)), F.layer_norm(on(3, 8), (8,)), F.group_norm(on(2, 4, 3), 2)],
    special=lambda on: [torch.frexp(x := on(4)), torch.logaddexp(x, on(4)), torch.special.expm1(x), torch.erfinv(x)],
    bits=lambda on: [torch.bitwise_not(on(4, dtype=torch.int16)), on.indices(9, 4).bitwise_left_shift(1)],
    vander=lambda on: [torch.vander(on(3)), torch.cov(on(3, 8)), torch.corrcoef(on(3, 8)), torch.trapezoid(on(8))],
)
def test_more_of_the_library(program: Program) -> None:
    same(program)


# -- complex numbers, conjugate and negative views


@named(
    arithmetic=lambda on: [(x := on(3, dtype=torch.complex64)) * x, x + 1j, x.abs(), x.angle(), x / 2],
    conj_view=lambda on: [(x := on(3, 4, dtype=torch.complex64)).conj(), x.conj() + 1, x.conj() @ x.mT, x.mH],
    conj_resolved=lambda on: [(x := on(3, dtype=torch.complex128)).conj().resolve_conj(), x.conj().clone()],
    neg_view=lambda on: [(x := on(3, dtype=torch.complex64).conj().imag), x + 1, x.resolve_neg(), x.clone()],
    parts=lambda on: [(x := on(3, 2, dtype=torch.complex64)).real, x.imag, x.real.mul_(2), x],
    as_real=lambda on: [torch.view_as_real(on(3, dtype=torch.complex64)), torch.view_as_complex(on(3, 2))],
    polar=lambda on: [torch.polar(on(3).abs(), on(3)), torch.complex(on(3), on(3))],
    in_place=lambda on: [(x := on(3, dtype=torch.complex64)).conj().add_(1j), x],
    copy_conj=lambda on: on(3, dtype=torch.complex64).copy_(on(3, dtype=torch.complex64).conj()),
    rope=lambda on: torch.view_as_real(
        torch.view_as_complex(on(2, 5, 4, 2)) * torch.polar(torch.ones(5, 4, device=on.name), on(5, 4))
    ).flatten(2),
    sum=lambda on: on(3, 4, dtype=torch.complex64).conj().sum(1),
    vdot=lambda on: torch.vdot(on(4, dtype=torch.complex64), on(4, dtype=torch.complex64)),
    item=lambda on: on(1, dtype=torch.complex64).conj().item(),
)
def test_complex(program: Program) -> None:
    same(program)


# -- layouts and storages


@named(
    channels_last=lambda on: [(x := on(2, 3, 4, 5).to(memory_format=torch.channels_last)), x + 1, x.relu(), x.clone()],
    channels_last_mixed=lambda on: on(2, 3, 4, 5).to(memory_format=torch.channels_last) + on(2, 3, 4, 5),
    channels_last_back=lambda on: on(2, 3, 4, 5).to(memory_format=torch.channels_last).contiguous(),
    channels_last_is=lambda on: (
        on(2, 3, 4, 5).contiguous(memory_format=torch.channels_last).is_contiguous(memory_format=torch.channels_last)
    ),
    channels_last_empty=lambda on: torch.empty(2, 3, 4, 5, device=on.name, memory_format=torch.channels_last).zero_(),
    channels_last_3d=lambda on: on(1, 2, 3, 4, 5).to(memory_format=torch.channels_last_3d) * 2,
    channels_last_upload=lambda on: on.put(torch.arange(120.0).view(2, 3, 4, 5).to(memory_format=torch.channels_last)),
    transposed_upload=lambda on: on.put(torch.arange(12.0).view(3, 4).t()),
    gap_upload=lambda on: on.put(torch.arange(12.0).view(3, 4)[:, ::2]).clone(),
    expanded_upload=lambda on: on.put(torch.arange(3.0).expand(4, 3)).clone(),
    strided_empty=lambda on: torch.empty_strided((3, 4), (1, 3), device=on.name).fill_(1) + 1,
    permuted_empty=lambda on: torch.empty_permuted((3, 4, 5), (2, 0, 1), device=on.name).zero_(),
)
def test_layouts(program: Program) -> None:
    same(program)


def _resized(x: torch.Tensor, *shape: int) -> torch.Tensor:
    """Eager leaves what it adds to a storage as it was; this fills it."""
    old = x.numel()
    x.resize_(shape)
    if x.numel() > old:
        x.view(-1)[old:] = 0
    return x


def _storage_resized(on: Device) -> list[Any]:
    x = on(6)
    storage = x.untyped_storage()
    before = storage.size()
    storage.resize_(0)
    emptied = storage.size()
    storage.resize_(before)
    x.copy_(on(6))
    return [before, emptied, x, x.untyped_storage().size()]


def _shared_storage(on: Device) -> list[Any]:
    x, y = on(2, 3), on(4)
    y.set_(x.untyped_storage(), 1, (2, 2), (2, 1))
    y.add_(10)
    return [y, x]


@named(
    resize_smaller=lambda on: on(4, 5).resize_(2, 3),
    resize_larger=lambda on: _resized(on(2, 3), 4, 5),
    resize_and_back=lambda on: _resized(on(4, 5).resize_(2), 4, 5),
    resize_an_empty=lambda on: _resized(torch.empty(0, device=on.name), 3, 4),
    resize_channels_last=lambda on: on(2, 3, 4, 5).resize_(1, 2, 2, 2, memory_format=torch.channels_last),
    resize_as=lambda on: on(4, 5).resize_as_(on(2, 2)),
    resize_view=lambda on: [(x := on(4, 5)), x[1].resize_(2, 2), x],
    storage=_storage_resized,
    set_tensor=lambda on: [(x := on(2, 3)).set_(y := on(4, 4)), x.is_set_to(y), x.add_(1), y],
    set_storage=_shared_storage,
    set_nothing=lambda on: on(2, 3).set_(),
    data=lambda on: _assign_data(on(2, 3), on(4)),
    data_in_place=lambda on: [(x := on.parameter(3)).data.add_(1), x],
    untyped_size=lambda on: [on(2, 3).untyped_storage().nbytes(), on(2, 3)[1].untyped_storage().nbytes(), on(5).nbytes],
)
def test_storages_are_resized_and_set(program: Program) -> None:
    same(program)


def _assign_data(x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    x.data = other
    return x + 1


# -- modes


def _inference(on: Device) -> list[Any]:
    w = on.parameter(3, 4)
    with torch.inference_mode():
        y = on(2, 3) @ w
        z = y[0].add_(1)
    return [y, z, y.is_inference(), y * 2, (on(2, 3) @ w).requires_grad]


def _no_grad(on: Device) -> list[Any]:
    w = on.parameter(3, 4)
    with torch.no_grad():
        w.mul_(2)
        y = w + 1
        with torch.enable_grad():
            z = w * 3
    return [w, y, z, y.requires_grad, z.requires_grad, w.detach(), w._version]


def _default_device(on: Device) -> list[Any]:
    with torch.device(on.name):
        return [torch.zeros(3), torch.arange(4) + 1, torch.eye(2), torch.full((2,), 3.0), torch.tensor([1, 2])]


def _deterministic(on: Device) -> Any:
    torch.use_deterministic_algorithms(True)
    try:
        return on(5, 4).index_add_(0, on.indices(5, 9), on(9, 4))
    finally:
        torch.use_deterministic_algorithms(False)


@named(inference=_inference, no_grad=_no_grad, default_device=_default_device, deterministic=_deterministic)
def test_modes(program: Program) -> None:
    same(program)


# -- autograd


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return grad * 3 * x**2


def _grads(on: Device, loss: Callable[..., torch.Tensor], *shapes: tuple[int, ...]) -> list[Any]:
    leaves = [on.parameter(*shape) for shape in shapes]
    out = loss(*leaves)
    out.backward()
    return [out, [leaf.grad for leaf in leaves]]


def _double_backward(on: Device) -> list[Any]:
    x = on.parameter(4)
    (g,) = torch.autograd.grad((x.exp() * x).sum(), x, create_graph=True)
    (gg,) = torch.autograd.grad(g.pow(2).sum(), x, create_graph=True)
    gg.sum().backward()
    return [g, gg, x.grad]


def _retained(on: Device) -> list[Any]:
    x = on.parameter(4)
    y = (x * 2).tanh()
    y.retain_grad()
    loss = y.pow(2).sum()
    loss.backward(retain_graph=True)
    first = x.grad.clone()
    loss.backward()
    return [first, x.grad, y.grad]


def _hooked(on: Device) -> list[Any]:
    seen: list[Any] = []
    x = on.parameter(3, 4)
    y = x.sin()
    y.register_hook(lambda g: g * 10)
    x.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
    y.sum().backward()
    layer = on.module(lambda: nn.Linear(4, 2))
    layer.register_full_backward_hook(lambda _, gi, go: seen.append([gi[0], go[0]]))
    layer.register_forward_hook(lambda _, args, out: out * 2)
    layer(x).sum().backward()
    return [seen, x.grad, layer.weight.grad]


def _checkpointed(on: Device) -> list[Any]:
    layer = on.module(lambda: nn.Sequential(nn.Linear(6, 6), nn.GELU(), nn.Linear(6, 6)))
    x = on.parameter(3, 6)
    checkpoint(layer, x, use_reentrant=False).pow(2).sum().backward()
    first = x.grad.clone()
    checkpoint(layer, x, use_reentrant=True).pow(2).sum().backward()
    return [first, x.grad, [p.grad for p in layer.parameters()]]


def _accumulated(on: Device) -> list[Any]:
    layer = on.module(lambda: nn.Linear(4, 3))
    for _ in range(3):
        layer(on(2, 4)).sum().backward()
    norm = nn.utils.clip_grad_norm_(layer.parameters(), 0.5)
    return [norm, layer.weight.grad, layer.bias.grad]


def _functional(on: Device) -> list[Any]:
    x = on(3)
    jacobian = torch.autograd.functional.jacobian(lambda v: v**2 * v.sum(), x)
    vmapped = torch.func.vmap(lambda a, b: a @ b)(on(4, 3), on(4, 3))
    grad = torch.func.grad(lambda v: (v.sin() * v).sum())(x)
    return [jacobian, vmapped, grad]


def _forward_mode(on: Device) -> Any:
    return torch.func.jvp(lambda v: v.sin() * v, (on(3),), (on(3),))


def _anomaly(on: Device) -> Any:
    with torch.autograd.detect_anomaly(check_nan=True), warnings.catch_warnings():
        return _grads(on, lambda x: x.exp().sum(), (3,))


@named(
    chain=lambda on: _grads(on, lambda x, y: ((x * y).exp() + x / y).sum(), (3, 4), (4,)),
    matmul=lambda on: _grads(on, lambda x, y: (x @ y).pow(2).mean(), (2, 3, 4), (4, 5)),
    views=lambda on: _grads(on, lambda x: (x[1:].t()[::2] * x[:-1].t()[1::2].sum()).sum(), (5, 4)),
    in_place=lambda on: _grads(on, lambda x: (x * 2).sin_().mul_(3).sum(), (5,)),
    in_place_view=lambda on: _grads(on, lambda x: ((y := x * 1)[1].mul_(5), y.sum())[1], (3, 4)),
    index=lambda on: _grads(on, lambda x: x[on.put([0, 0, 2])].pow(2).sum(), (4, 3)),
    index_cpu=lambda on: _grads(on, lambda x: x[torch.tensor([0, 0, 2])].pow(2).sum(), (4, 3)),
    index_put=lambda on: _grads(on, lambda x, v: (x * 1).index_put_((on.put([1, 2]),), v).exp().sum(), (4, 3), (2, 3)),
    mask=lambda on: _grads(on, lambda x: x[x > 0].sum(), (4, 3)),
    where=lambda on: _grads(on, lambda x, y: torch.where(x > 0, x * y, y).sum(), (9,), (9,)),
    reductions=lambda on: _grads(on, lambda x: x.std(1).sum() + x.amax() + x.logsumexp(0).sum() + x.norm(), (4, 5)),
    sort=lambda on: _grads(on, lambda x: (x.sort(1)[0] * x.topk(5, 1)[0]).sum() + x.median(), (4, 5)),
    cat=lambda on: _grads(on, lambda x, y: (torch.cat([x, y], 1) * torch.stack([x, x], 1).sum()).sum(), (2, 3), (2, 3)),
    softmax=lambda on: _grads(on, lambda x: (x.softmax(1) * x.log_softmax(0)).sum(), (4, 5)),
    cumulative=lambda on: _grads(on, lambda x: x.cumsum(0).cumprod(1).sum(), (4, 5)),
    expand=lambda on: _grads(on, lambda x: (x.expand(4, 5) * x.sum()).sum(), (1, 5)),
    complex=lambda on: _grads(on, lambda x: torch.view_as_complex(x).pow(2).abs().sum(), (4, 2)),
    losses=lambda on: _grads(on, lambda x: F.cross_entropy(x, on.indices(5, 4), label_smoothing=0.1), (4, 5)),
    embedding=lambda on: _grads(on, lambda w: F.embedding(on.indices(7, 9), w, padding_idx=0).pow(2).sum(), (7, 4)),
    solve=lambda on: _grads(on, lambda x: torch.linalg.solve(x + 9 * torch.eye(3, device=on.name), x).sum(), (3, 3)),
    interpolate=lambda on: _grads(on, lambda x: F.interpolate(x, size=7, mode="bilinear").exp().sum(), (1, 2, 4, 4)),
    pool=lambda on: _grads(on, lambda x: (F.max_pool2d(x, 2) * F.avg_pool2d(x, 2)).sum(), (1, 2, 4, 4)),
    custom=lambda on: _grads(on, lambda x: Cube.apply(x).sum(), (4,)),
    custom_chained=lambda on: _grads(on, lambda x: Cube.apply(Cube.apply(x) * 0.1).sum(), (4,)),
    multi_use=lambda on: _grads(on, lambda x: sum((x * i).tanh().sum() for i in range(5)), (4,)),
    to_cpu=lambda on: _grads(on, lambda x: (x * 2).cpu().pow(2).sum(), (4,))[1:],
    from_cpu=lambda on: _grads(on, lambda x: (x.cpu().exp().to(on.name) * x).sum(), (4,)),
    cast=lambda on: _grads(on, lambda x: (x.double() * 2).float().bfloat16().sum(), (4,)),
    double_backward=_double_backward,
    retain_graph=_retained,
    hooks=_hooked,
    checkpoint=_checkpointed,
    accumulate_and_clip=_accumulated,
    functional=_functional,
    forward_mode=_forward_mode,
    anomaly=_anomaly,
)
def test_autograd(program: Program) -> None:
    same(program)


def test_autograd_between_workers(engine: Engine) -> None:
    def program(on: Device, other: str) -> list[Any]:
        x = on.parameter(4, 3)
        y = (x.tanh().to(other) * 2).exp().to(on.name)
        y.sum().backward()
        return [y, x.grad]

    assert_same(program(Device("dtorch:0"), "dtorch:1"), program(Device("cpu"), "cpu"))


# -- optimizers


def _trained(on: Device, make: Callable[[Any], torch.optim.Optimizer]) -> list[Any]:
    model = on.module(lambda: nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 3)))
    optimizer = make(model.parameters())
    x, target = on(5, 6), on.indices(3, 5)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), target)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    states = [{k: v for k, v in s.items() if k != "step"} for s in optimizer.state.values()]
    return [losses, [p.grad for p in model.parameters()], list(model.parameters()), states]


@named(
    sgd=lambda on: _trained(on, lambda p: torch.optim.SGD(p, 0.1)),
    sgd_momentum=lambda on: _trained(on, lambda p: torch.optim.SGD(p, 0.1, 0.9, nesterov=True, weight_decay=0.01)),
    sgd_foreach=lambda on: _trained(on, lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, foreach=True)),
    sgd_fused=lambda on: _trained(on, lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, fused=True)),
    adamw=lambda on: _trained(on, lambda p: torch.optim.AdamW(p, 1e-2)),
    adamw_single=lambda on: _trained(on, lambda p: torch.optim.AdamW(p, 1e-2, foreach=False)),
    adamw_foreach=lambda on: _trained(on, lambda p: torch.optim.AdamW(p, 1e-2, foreach=True)),
    adamw_fused=lambda on: _trained(on, lambda p: torch.optim.AdamW(p, 1e-2, fused=True)),
    adamw_amsgrad=lambda on: _trained(on, lambda p: torch.optim.AdamW(p, 1e-2, amsgrad=True)),
    adam=lambda on: _trained(on, lambda p: torch.optim.Adam(p, 1e-2)),
    adagrad=lambda on: _trained(on, lambda p: torch.optim.Adagrad(p, 1e-2)),
    rmsprop=lambda on: _trained(on, lambda p: torch.optim.RMSprop(p, 1e-2, momentum=0.5)),
)
def test_three_steps_of_an_optimizer(program: Program) -> None:
    same(program)


# -- nn layers, forward and backward


def _layer(
    make: Callable[[], nn.Module],
    *shapes: tuple[int, ...],
    change: Callable[[torch.Tensor], torch.Tensor] = lambda x: x,
) -> Program:
    """A program that gives the layer's result and every gradient; ``change`` is applied to the input."""

    def program(on: Device) -> list[Any]:
        layer = on.module(make)
        leaves = [on.parameter(*shape) for shape in shapes]
        out = layer(*(change(x) for x in leaves))
        first = out[0] if isinstance(out, tuple) else out
        (first * on(*first.shape)).sum().backward()
        return [out, [x.grad for x in leaves], [p.grad for p in layer.parameters()], list(layer.buffers())]

    return program


def channels_last(x: torch.Tensor) -> torch.Tensor:
    return x.to(memory_format=torch.channels_last)


def _conv_channels_last(on: Device) -> list[Any]:
    conv = on.module(lambda: nn.Conv2d(3, 8, 3, padding=1)).to(memory_format=torch.channels_last)
    return [conv.weight, conv(channels_last(on(2, 3, 6, 6))), conv(on(2, 3, 6, 6))]


@named(
    linear_1d=_layer(lambda: nn.Linear(8, 4), (8,)),
    linear=_layer(lambda: nn.Linear(8, 4), (5, 8)),
    linear_3d=_layer(lambda: nn.Linear(8, 4), (2, 5, 8)),
    linear_4d=_layer(lambda: nn.Linear(8, 4), (2, 3, 5, 8)),
    linear_no_bias=_layer(lambda: nn.Linear(8, 4, bias=False), (5, 8)),
    linear_no_bias_3d=_layer(lambda: nn.Linear(8, 4, bias=False), (2, 5, 8)),
    linear_no_bias_4d=_layer(lambda: nn.Linear(8, 4, bias=False), (2, 3, 5, 8)),
    linear_transposed=_layer(lambda: nn.Linear(8, 4), (8, 5), change=lambda x: x.t()),
    linear_transposed_3d=_layer(lambda: nn.Linear(8, 4), (5, 2, 8), change=lambda x: x.transpose(0, 1)),
    linear_inner_transposed=_layer(lambda: nn.Linear(8, 4), (2, 8, 5), change=lambda x: x.mT),
    linear_sliced_3d=_layer(lambda: nn.Linear(8, 4), (2, 5, 16), change=lambda x: x[..., ::2]),
    linear_permuted_4d=_layer(lambda: nn.Linear(8, 4), (2, 8, 3, 5), change=lambda x: x.permute(0, 2, 3, 1)),
    linear_expanded=_layer(lambda: nn.Linear(8, 4, bias=False), (1, 8), change=lambda x: x.expand(3, 5, 8)),
    linear_one_row=_layer(lambda: nn.Linear(64, 32), (1, 1, 64)),
    linear_empty=_layer(lambda: nn.Linear(8, 4), (0, 8)),
    bilinear=_layer(lambda: nn.Bilinear(4, 5, 3), (6, 4), (6, 5)),
    conv1d=_layer(lambda: nn.Conv1d(3, 4, 3, stride=2), (2, 3, 9)),
    conv2d=_layer(lambda: nn.Conv2d(3, 4, 3, padding=1), (2, 3, 6, 6)),
    conv2d_no_bias=_layer(lambda: nn.Conv2d(3, 4, 3, bias=False, stride=2), (2, 3, 7, 7)),
    conv2d_patch=_layer(lambda: nn.Conv2d(3, 8, 2, stride=2), (2, 3, 6, 6)),
    conv2d_1x1=_layer(lambda: nn.Conv2d(4, 8, 1), (2, 4, 5, 5)),
    conv2d_groups=_layer(lambda: nn.Conv2d(4, 8, 3, groups=2, dilation=2), (2, 4, 8, 8)),
    conv2d_same=_layer(lambda: nn.Conv2d(3, 4, 3, padding="same"), (2, 3, 6, 6)),
    conv2d_channels_last=_layer(lambda: nn.Conv2d(3, 4, 3, padding=1), (2, 3, 6, 6), change=channels_last),
    conv2d_all_channels_last=_conv_channels_last,
    conv2d_sliced=_layer(lambda: nn.Conv2d(3, 4, 3), (2, 6, 6, 6), change=lambda x: x[:, ::2]),
    conv2d_unbatched=_layer(lambda: nn.Conv2d(3, 4, 3), (3, 6, 6)),
    conv3d=_layer(lambda: nn.Conv3d(2, 3, 2), (1, 2, 4, 4, 4)),
    conv_transpose2d=_layer(lambda: nn.ConvTranspose2d(3, 4, 2, stride=2), (2, 3, 4, 4)),
    layer_norm=_layer(lambda: nn.LayerNorm(8), (2, 5, 8)),
    layer_norm_plain=_layer(lambda: nn.LayerNorm(8, elementwise_affine=False), (2, 5, 8)),
    layer_norm_no_bias=_layer(lambda: nn.LayerNorm(8, bias=False), (2, 5, 8)),
    layer_norm_transposed=_layer(lambda: nn.LayerNorm(8), (2, 8, 5), change=lambda x: x.mT),
    rms_norm=_layer(lambda: nn.RMSNorm(8), (2, 5, 8)),
    group_norm=_layer(lambda: nn.GroupNorm(2, 4), (2, 4, 5, 5)),
    group_norm_channels_last=_layer(lambda: nn.GroupNorm(2, 4), (2, 4, 5, 5), change=channels_last),
    batch_norm=_layer(lambda: nn.BatchNorm2d(3), (4, 3, 5, 5)),
    batch_norm_channels_last=_layer(lambda: nn.BatchNorm2d(3), (4, 3, 5, 5), change=channels_last),
    batch_norm_eval=_layer(lambda: nn.BatchNorm2d(3).eval(), (4, 3, 5, 5)),
    batch_norm_1d=_layer(lambda: nn.BatchNorm1d(3), (4, 3)),
    instance_norm=_layer(lambda: nn.InstanceNorm2d(3, affine=True), (2, 3, 5, 5)),
    local_response_norm=_layer(lambda: nn.LocalResponseNorm(2), (2, 4, 3, 3)),
    activations=_layer(lambda: nn.Sequential(nn.SELU(), nn.PReLU(), nn.GLU(), nn.Softmax(1), nn.Hardtanh()), (3, 8)),
    dropout_eval=_layer(lambda: nn.Dropout(0.5).eval(), (3, 8)),
    upsample=_layer(lambda: nn.Upsample(scale_factor=2), (1, 2, 3, 3)),
    rnn=_layer(lambda: nn.RNN(4, 5), (3, 2, 4)),
    lstm=_layer(lambda: nn.LSTM(4, 5, num_layers=2, batch_first=True), (2, 3, 4)),
    lstm_bidirectional=_layer(lambda: nn.LSTM(4, 5, bidirectional=True, proj_size=3), (3, 2, 4)),
    gru=_layer(lambda: nn.GRU(4, 5, bias=False), (3, 2, 4)),
    lstm_no_bias=_layer(lambda: nn.LSTM(4, 5, bias=False, bidirectional=True), (3, 2, 4)),
    lstm_double=_layer(lambda: nn.LSTM(4, 5, dtype=torch.float64), (3, 2, 4), change=lambda x: x.double()),
    lstm_unbatched=_layer(lambda: nn.LSTM(4, 5), (3, 4)),
    rnn_relu=_layer(lambda: nn.RNN(4, 5, 2, "relu", bidirectional=True, batch_first=True), (2, 3, 4)),
    gru_bidirectional=_layer(lambda: nn.GRU(4, 5, 2, bidirectional=True, batch_first=True), (2, 3, 4)),
    lstm_cell=_layer(lambda: nn.LSTMCell(4, 5), (2, 4)),
    gru_cell=_layer(lambda: nn.GRUCell(4, 5), (2, 4)),
    attention=_layer(lambda: nn.MultiheadAttention(8, 2, batch_first=True), (2, 5, 8), (2, 6, 8), (2, 6, 8)),
    encoder_layer=_layer(lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True), (2, 5, 8)),
    encoder_layer_norm_first=_layer(
        lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, activation="gelu", norm_first=True), (5, 2, 8)
    ),
    decoder_layer=_layer(lambda: nn.TransformerDecoderLayer(8, 2, 16, dropout=0.0), (5, 2, 8), (6, 2, 8)),
)
def test_layers(program: Program) -> None:
    same(program)


def _eval_encoder(on: Device) -> Any:
    layer = on.module(lambda: nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)).eval()
    mask = nn.Transformer.generate_square_subsequent_mask(5, device=on.name)
    with torch.no_grad():
        return [layer(on(2, 5, 8)), layer(on(2, 5, 8), src_mask=mask, is_causal=True)]


def _padded_encoder(on: Device) -> Any:
    """Evaluation packs what is not padding into a nested tensor, if it stands on the left."""
    encoder = on.module(lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2)).eval()
    left = torch.arange(5) >= torch.tensor([[5], [3], [1]])
    results = []
    with torch.no_grad():
        for padding in (left, left.flip(1), left[1:2], left[:1]):
            x = on(padding.shape[0], 5, 8)
            results += [encoder(x, src_key_padding_mask=on.put(padding)), x]
        nested = torch._nested_tensor_from_mask(on(3, 5, 8), on.put(~left))
        results += [nested.to_padded_tensor(2.0), nested.to_padded_tensor(-1.0, (4, 6, 9)), nested.is_nested]
    return results


def _group_norm_channels_last(on: Device) -> Any:
    """Its gradient, with a graph of its own and without weights too."""
    layer = on.module(lambda: nn.GroupNorm(2, 4))
    x = on(2, 4, 5, 5).to(memory_format=torch.channels_last).requires_grad_()
    (g,) = torch.autograd.grad(layer(x).exp().sum(), x, create_graph=True)
    plain = on.module(lambda: nn.GroupNorm(2, 4, affine=False))  # once: its second gradient ends eager itself
    (first,) = torch.autograd.grad(plain(x).exp().sum(), x)
    return [g, layer(x.detach()), first]


def _histc(on: Device) -> Any:
    """Of floats as on the CPU; whole numbers are for accelerators."""
    x = on.indices(8, 50)
    kinds = [torch.float32] if on.name == "cpu" else [torch.float32, torch.int32, torch.int64, torch.uint8]
    counts = [torch.histc(x.to(kind), 8, 0, 7) for kind in kinds]
    outs = [torch.histc(x.to(kind), 4, 0, 8, out=torch.empty(0, dtype=kind, device=on.name)) for kind in kinds]
    assert [count.dtype for count in counts + outs] == kinds * 2
    assert all((count == counts[0]).all() for count in counts)
    assert all((count == outs[0]).all() for count in outs)
    return [counts[0], outs[0]]


def _attention_weights(on: Device) -> Any:
    layer = on.module(lambda: nn.MultiheadAttention(8, 2, batch_first=True))
    x = on(2, 5, 8)
    padding = on.put([[False] * 5, [False, False, False, True, True]])
    return [layer(x, x, x, key_padding_mask=padding), layer(x, x, x, need_weights=False)]


def _embeddings(on: Device) -> Any:
    table = on.module(lambda: nn.Embedding(9, 4, padding_idx=0))
    bag = on.module(lambda: nn.EmbeddingBag(9, 4, mode="sum"))
    ids = on.indices(9, 3, 5)
    out = table(ids)
    bagged = bag(ids)
    (out.sum() + bagged.pow(2).sum()).backward()
    return [out, bagged, table.weight.grad, bag.weight.grad]


def _packed(on: Device) -> Any:
    """Packed sequences of every kind of layer, both directions; then without gradients, where oneDNN's LSTM differs."""
    results: list[Any] = []
    for kind in (nn.LSTM, nn.GRU, nn.RNN):
        layer = on.module(lambda kind=kind: kind(4, 5, 2, batch_first=True, bidirectional=True))
        x = on.parameter(3, 6, 4)
        packed = nn.utils.rnn.pack_padded_sequence(x, torch.tensor([6, 4, 1]), batch_first=True)
        out, state = layer(packed)
        padded = nn.utils.rnn.pad_packed_sequence(out, batch_first=True)[0]
        padded.pow(2).sum().backward()
        results += [out.data, padded, state, x.grad, [p.grad for p in layer.parameters()]]
        for _ in range(2):
            with torch.no_grad():
                results.append(layer(x))
            results.append(layer(x))
        results.append(layer.eval()(x))
    return results


def _spectral(on: Device) -> Any:
    return on.module(lambda: nn.utils.parametrizations.weight_norm(nn.Linear(4, 3)))(on(2, 4))


def _running_statistics(on: Device) -> Any:
    norm = on.module(lambda: nn.BatchNorm1d(4, momentum=None))
    outs = [norm(on(6, 4)) for _ in range(3)]
    return [outs, norm.running_mean, norm.running_var, norm.num_batches_tracked, norm.eval()(on(2, 4))]


@named(
    eval_encoder=_eval_encoder,
    padded_encoder=_padded_encoder,
    group_norm_channels_last_graph=_group_norm_channels_last,
    histc=_histc,
    attention_weights=_attention_weights,
    embeddings=_embeddings,
    packed_sequence=_packed,
    weight_norm=_spectral,
    running_statistics=_running_statistics,
)
def test_layers_as_programs_use_them(program: Program) -> None:
    same(program)


def test_the_gradient_of_a_channels_last_group_norms_gradient() -> None:
    """Not bit by bit: the first gradient's graph comes from another formula, summed in another order."""

    def second(device: str) -> list[torch.Tensor]:
        layer = nn.GroupNorm(2, 4)
        x = torch.randn(2, 4, 5, 5, generator=torch.Generator().manual_seed(3))
        layer, x = layer.to(device), x.to(device, memory_format=torch.channels_last).requires_grad_()
        (g,) = torch.autograd.grad(layer(x).exp().sum(), x, create_graph=True)
        g.square().sum().backward()
        return [t.cpu() for t in (x.grad, *(p.grad for p in layer.parameters())) if t is not None]

    for got, want in zip(second("dtorch:0"), second("cpu"), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


# -- scaled dot product attention


def _attention(
    q: tuple[int, ...] = (2, 4, 5, 8),
    kv: tuple[int, ...] | None = None,
    mask: Callable[[Device], torch.Tensor] | None = None,
    change: Callable[[torch.Tensor], torch.Tensor] = lambda x: x,
    dtype: torch.dtype = torch.float32,
    backward: bool = True,
    **kwargs: Any,
) -> Program:
    def program(on: Device) -> list[Any]:
        leaves = [on(*shape, dtype=dtype).requires_grad_(backward) for shape in (q, kv or q, kv or q)]
        attn_mask = mask(on) if mask else None
        out = F.scaled_dot_product_attention(*(change(x) for x in leaves), attn_mask=attn_mask, **kwargs)
        if backward:
            (out * on(*out.shape, dtype=dtype)).sum().backward()
        return [out, [x.grad for x in leaves]]

    return program


@named(
    plain=_attention(),
    forward_only=_attention(backward=False),
    causal=_attention(is_causal=True),
    scaled=_attention(scale=0.3),
    cross=_attention(kv=(2, 4, 7, 8)),
    one_query=_attention(q=(2, 4, 1, 8), kv=(2, 4, 7, 8)),
    one_query_forward=_attention(q=(2, 4, 1, 8), kv=(2, 4, 7, 8), backward=False),
    one_of_everything=_attention(q=(1, 1, 1, 8), backward=False),
    float_mask=_attention(mask=lambda on: on(5, 5)),
    float_mask_4d=_attention(mask=lambda on: on(2, 1, 5, 5)),
    bool_mask=_attention(mask=lambda on: torch.ones(5, 5, dtype=torch.bool, device=on.name).tril()),
    gqa=_attention(q=(2, 4, 5, 8), kv=(2, 2, 5, 8), enable_gqa=True),
    gqa_causal=_attention(q=(2, 4, 5, 8), kv=(2, 1, 5, 8), enable_gqa=True, is_causal=True, backward=False),
    heads_inside=_attention(q=(2, 5, 4, 8), change=lambda x: x.transpose(1, 2)),
    bf16=_attention(dtype=torch.bfloat16),
    bf16_forward=_attention(dtype=torch.bfloat16, backward=False),
    float64=_attention(dtype=torch.float64),
    half=_attention(dtype=torch.float16, backward=False),
    three_dims=_attention(q=(4, 5, 8)),
    other_value_size=lambda on: F.scaled_dot_product_attention(on(2, 4, 5, 8), on(2, 4, 5, 8), on(2, 4, 5, 6)),
    longer=_attention(q=(1, 2, 70, 16), is_causal=True),
)
def test_attention(program: Program) -> None:
    same(program)


# -- autocast


def _autocast(on: Device) -> list[Any]:
    layer = on.module(lambda: nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 4)))
    x = on.parameter(3, 8)
    with torch.autocast(on.name, dtype=torch.bfloat16):
        y = layer(x)
        z = (x @ x.t()).softmax(1)
    y.float().sum().backward()
    return [y, z, x.grad, [p.grad for p in layer.parameters()]]


def test_autocast_bf16() -> None:
    same(_autocast)


# -- data and programs around tensors


def _state_dict(on: Device) -> list[Any]:
    source, target = (on.module(lambda: nn.Linear(3, 4)) for _ in range(2))
    with torch.no_grad():
        source.weight.mul_(2)
    target.load_state_dict(source.state_dict())
    return [target.weight, target.state_dict()]


def _threads(on: Device) -> list[Any]:
    import threading

    results: list[Any] = [None] * 4
    inputs = [on(20) for _ in results]

    def work(i: int) -> None:
        x = inputs[i]
        for _ in range(50):
            x = (x * 1.01 + i).sin()
        results[i] = x

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def _large(on: Device) -> Any:
    x = on(200, 300)  # an upload and a value of more than 64 KiB
    return [x * 2, x.t().contiguous(), x.sum(0)]


@named(state_dict=_state_dict, threads=_threads, large=_large)
def test_programs_around_tensors(program: Program) -> None:
    same(program)

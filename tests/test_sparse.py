"""Sparse tensors: PyTorch's own over dense dtorch tensors, put together on the worker for the time of a call.

PyTorch's own material for them is in tests/conformance (to_sparse, sparse.mm, SparseAdam, nn.Embedding(sparse=True)).
"""

from __future__ import annotations

import copy
import gc
import inspect
import io
import os
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import processes
import pytest
import torch
from mistakes import computed
from same import Device, Program, assert_same, eager_threads, named, same, sparse_parts
from torch import nn

import dtorch

if TYPE_CHECKING:
    from dtorch.client.engine import Engine

pytestmark = pytest.mark.filterwarnings("ignore:.*(Sparse CSR|Sparse invariant|beta state)")

COMPRESSED = (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)


@pytest.fixture(autouse=True)
def _engine(engine: Engine) -> Iterator[None]:
    with eager_threads(engine.threads_per_worker):
        yield


def some(device: Device, *shape: int) -> torch.Tensor:
    """About a third of it not zero."""
    t = device(*shape)
    return torch.where(t > 0.4, t, torch.zeros_like(t))


def coo(device: Device) -> torch.Tensor:
    """Not coalesced: an index occurs twice."""
    return torch.sparse_coo_tensor(device.put([[0, 2, 0], [1, 0, 1]]), device(3), (3, 4))


def compressed(device: Device, layout: torch.layout) -> torch.Tensor:
    block = (2, 2) if layout in (torch.sparse_bsr, torch.sparse_bsc) else None
    return some(device, 4, 6).to_sparse(layout=layout, blocksize=block)


# -- eager's results


@named(
    made=coo,
    size_inferred=lambda d: torch.sparse_coo_tensor(d.put([[0, 2], [1, 0]]), d(2)),
    dense_dimensions=lambda d: torch.sparse_coo_tensor(d.put([[0, 2]]), d(2, 5), (3, 5)).coalesce(),
    no_elements=lambda d: torch.sparse_coo_tensor(size=(3, 4), device=d.name) + coo(d),
    zeros=lambda d: torch.zeros(3, 4, device=d.name, layout=torch.sparse_coo),
    zeros_like=lambda d: torch.zeros_like(coo(d)),
    to_sparse=lambda d: some(d, 4, 5).to_sparse(),
    to_sparse_dim=lambda d: some(d, 4, 5, 2).to_sparse(1),
    to_dense=lambda d: coo(d).to_dense(),
    coalesce=lambda d: coo(d).coalesce(),
    facts=lambda d: (coo(d)._nnz(), coo(d).is_coalesced(), coo(d).sparse_dim(), coo(d).dense_dim(), coo(d).shape),
    parts=lambda d: (coo(d).coalesce().indices(), coo(d).coalesce().values(), coo(d)._indices(), coo(d)._values()),
    clone=lambda d: coo(d).clone(),
    detach=lambda d: coo(d).requires_grad_().detach(),
    dtype=lambda d: coo(d).to(torch.float64),
    transpose=lambda d: coo(d).t(),
    arithmetic=lambda d: [coo(d) + coo(d), coo(d) - coo(d), coo(d) * 2, coo(d) / 2, -coo(d), coo(d) * coo(d)],
    with_dense=lambda d: [d(3, 4) + coo(d), coo(d) * d(3, 4)],
    pointwise=lambda d: [coo(d).abs(), coo(d).sin(), coo(d).coalesce().sqrt(), coo(d).isnan()],
    reductions=lambda d: [coo(d).sum(), torch.sparse.sum(coo(d), 0), torch.sparse.sum(coo(d), (0, 1))],
    softmax=lambda d: torch.sparse.softmax(coo(d), 1),
    products=lambda d: [coo(d) @ d(4, 2), torch.sparse.mm(coo(d), d(4, 2)), coo(d) @ coo(d).t(), coo(d).mv(d(4))],
    addmm=lambda d: [torch.sparse.addmm(d(3, 2), coo(d), d(4, 2), beta=0.5), torch.hspmm(coo(d), d(4, 2))],
    select=lambda d: [coo(d)[0], coo(d).index_select(0, d.put([2, 0])), torch.cat([coo(d), coo(d)])],
    masked=lambda d: d(3, 4).sparse_mask(coo(d).coalesce()),
    norms=lambda d: [coo(d).norm(), torch.sparse.sum(coo(d).pow(2))],
)
def test_coo(program: Program) -> None:
    same(program)


def in_place(change: Callable[[torch.Tensor, Device], object]) -> Program:
    """What a change of a sparse tensor makes of it, and of another name for it."""

    def program(d: Device) -> list[torch.Tensor]:
        t = coo(d).coalesce()
        t.sum()  # the worker has seen it as it was
        change(t, d)
        return [t, t.to_dense()]

    return program


@named(
    mul_=in_place(lambda t, d: t.mul_(3)),
    div_=in_place(lambda t, d: t.div_(3)),
    add_=in_place(lambda t, d: t.add_(coo(d))),
    add_self=in_place(lambda t, d: t.add_(t)),
    mul_sparse=in_place(lambda t, d: t.mul_(coo(d).coalesce())),
    zero_=in_place(lambda t, d: t.zero_()),
    neg_=in_place(lambda t, d: t.neg_()),
    copy_=in_place(lambda t, d: t.copy_(torch.sparse_coo_tensor(d.put([[1], [1]]), d(1), (3, 4)))),
    values_written=in_place(lambda t, d: t._values().add_(1)),
    resized=in_place(lambda t, d: t.sparse_resize_((5, 4), 2, 0)),
    out=in_place(lambda t, d: torch.mul(coo(d).coalesce(), coo(d).coalesce(), out=t)),
    out_itself=in_place(lambda t, d: torch.mul(t, 2, out=t)),
    out_of_a_function=in_place(lambda t, d: torch.sin(coo(d).coalesce(), out=t)),
    out_of_more_elements=in_place(lambda t, d: torch.sin(some(d, 3, 4).to_sparse(), out=t)),
    list_of_itself=in_place(lambda t, d: torch._foreach_mul_([t], 2.0)),
    held_parts=in_place(lambda t, d: (t._values(), t.mul_(3))[0].add_(1)),
)
def test_coo_in_place(program: Program) -> None:
    same(program)


@pytest.mark.parametrize("layout", COMPRESSED, ids=str)
def test_compressed_layouts(layout: torch.layout) -> None:
    def program(d: Device) -> list[object]:
        t = compressed(d, layout)
        return [t, t.to_dense(), t.clone(), t._nnz(), t.to_sparse_coo(), t.to(torch.float64), t.values()]

    same(program)


@pytest.mark.parametrize("layout", COMPRESSED, ids=str)
def test_compressed_layouts_twice_in_a_call_and_resized(layout: torch.layout) -> None:
    def program(d: Device) -> list[object]:
        t, u = compressed(d, layout), compressed(d, layout)
        twice = [t + t, t.add_(t), torch.add(t, t, alpha=2)]
        u.resize_(8, 6)
        return [*twice, t, u, list(sparse_parts(u).values())]

    same(program)


def alias_of(make: Callable[[Device], torch.Tensor], part: Callable[[torch.Tensor], torch.Tensor]) -> Program:
    """A tensor, and what is made of it, after what is made was written."""

    def program(d: Device) -> list[object]:
        source = make(d)
        made = part(source)
        (made if made.layout == torch.strided else made._values() if made.is_sparse else made.values()).add_(1)
        return [source, made]

    return program


@named(
    select=alias_of(lambda d: compressed(d, torch.sparse_csr), lambda t: t.to_sparse_coo()),
    to_csr=alias_of(lambda d: some(d, 4, 5).to_sparse(), lambda t: t.to_sparse_csr()),
    masked=alias_of(lambda d: compressed(d, torch.sparse_csr), lambda t: t.sparse_mask(t)),
    of_batch=alias_of(lambda d: torch.stack([d(3, 4), d(3, 4)]).to_sparse_csr(), lambda t: t[1]),
)
def test_results_stand_on_the_arguments_memory_where_eagers_do(program: Program) -> None:
    same(program)


@named(
    linear=lambda d: nn.functional.linear(d(2, 6), compressed(d, torch.sparse_csr)),
    linear_bias=lambda d: nn.functional.linear(d(2, 6), compressed(d, torch.sparse_csr), d(4)),
    smm=lambda d: torch.smm(coo(d), d(4, 2)),
)
def test_dense_operators_with_a_sparse_argument(program: Program) -> None:
    with torch.no_grad():
        same(program)


@named(
    made=lambda d: torch.sparse_csr_tensor(d.put([0, 1, 1, 3]), d.put([3, 0, 2]), d(3), (3, 4)),
    products=lambda d: [compressed(d, torch.sparse_csr) @ d(6, 2), compressed(d, torch.sparse_csr).mv(d(6))],
    arithmetic=lambda d: [compressed(d, torch.sparse_csr) * 2, compressed(d, torch.sparse_csr).sin()],
    sampled=lambda d: torch.sparse.sampled_addmm(compressed(d, torch.sparse_csr), d(4, 2), d(2, 6)),
    largest=lambda d: torch.sparse.mm(compressed(d, torch.sparse_csr), d(6, 2), "amax"),
    in_place=lambda d: compressed(d, torch.sparse_csr).mul_(2).zero_(),
)
def test_csr(program: Program) -> None:
    same(program)


# -- gradients


def embedding(d: Device) -> list[object]:
    table = d.module(lambda: nn.Embedding(10, 3, sparse=True))
    table(d.indices(10, 6)).pow(2).sum().backward()
    table(d.indices(10, 2)).sum().backward()  # accumulates
    return [table.weight.grad, table.weight.grad.coalesce()]


def embedding_bag(d: Device) -> object:
    bag = d.module(lambda: nn.EmbeddingBag(10, 3, sparse=True, mode="sum"))
    bag(d.indices(10, 6), d.put([0, 4])).pow(2).sum().backward()
    return bag.weight.grad


def through_values(d: Device) -> list[object]:
    values, dense = d.parameter(3), d.parameter(4, 2)
    t = torch.sparse_coo_tensor(d.put([[0, 2, 0], [1, 0, 1]]), values, (3, 4))
    torch.sparse.mm(t, dense).square().sum().backward()
    return [values.grad, dense.grad]


def through_to_sparse(d: Device) -> list[object]:
    dense = some(d, 4, 5).requires_grad_()
    (dense.to_sparse() * 3).to_dense().square().sum().backward()
    return [dense.grad]


@named(
    embedding=embedding,
    embedding_bag=embedding_bag,
    through_values=through_values,
    through_to_sparse=through_to_sparse,
)
def test_gradients(program: Program) -> None:
    same(program)


@pytest.mark.parametrize(
    "optimizer", [torch.optim.SparseAdam, torch.optim.SGD, torch.optim.Adagrad], ids=lambda o: o.__name__
)
def test_training_with_sparse_gradients(optimizer: Callable[..., torch.optim.Optimizer]) -> None:
    def program(d: Device) -> list[object]:
        table = d.module(lambda: nn.Embedding(20, 3, sparse=True))
        steps = optimizer(table.parameters(), lr=0.1)
        for _ in range(4):
            steps.zero_grad()
            table(d.indices(20, 6)).square().sum().backward()
            steps.step()
        state = steps.state_dict()["state"][0] if steps.state else {}
        return [table.weight, {key: value for key, value in state.items() if key != "step"}]

    same(program)


# -- moving, saving


def test_moving_between_the_cpu_and_workers() -> None:
    here = coo(Device("cpu"))
    there = here.to("dtorch:0")
    assert_same(there, here)
    beside = there.to("dtorch:1")
    assert beside.device == beside._values().device == torch.device("dtorch:1")
    assert_same(beside, here)
    back = beside.cpu()
    assert back.layout == torch.sparse_coo and torch.equal(back._values(), here._values())
    assert torch.equal((beside * 2).to_dense().cpu(), (here * 2).to_dense())
    with pytest.raises(RuntimeError, match="same device"):
        there + beside
    with pytest.raises(RuntimeError, match="same device"):
        beside @ dtorch.ones(4, 2)


@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr], ids=str)
def test_saving_and_copying(layout: torch.layout, tmp_path: Path) -> None:
    here = some(Device("cpu"), 4, 6).to_sparse(layout=layout)
    there = here.to("dtorch:1")
    torch.save({"t": there}, tmp_path / "saved")
    buffer = io.BytesIO()
    torch.save(here, buffer)
    buffer.seek(0)
    for kept, device in (
        (torch.load(tmp_path / "saved")["t"], "dtorch:1"),
        (torch.load(tmp_path / "saved", map_location="dtorch:0")["t"], "dtorch:0"),
        (torch.load(buffer, map_location="dtorch"), "dtorch:0"),
        (pickle.loads(pickle.dumps(there)), "dtorch:1"),
        (copy.deepcopy(there), "dtorch:1"),
    ):
        assert str(kept.device) == device and kept.layout == layout
        for part, wanted in zip(sparse_parts(kept).values(), sparse_parts(here).values(), strict=True):
            assert torch.equal(part.cpu(), wanted)


def test_printing() -> None:
    assert "indices=tensor([[0, 2, 0]" in repr(coo(Device("dtorch")))
    assert "layout=torch.sparse_csr" in repr(compressed(Device("dtorch"), torch.sparse_csr))


# -- mistakes, memory


@named(
    sizes=lambda d: coo(d) + torch.sparse_coo_tensor(size=(2, 2), device=d.name),
    dense_sizes=lambda d: d(5, 5).add_(coo(d)),
    product=lambda d: torch.sparse.mm(coo(d), d(3, 3)),
    no_such_operator=lambda d: coo(d).cumsum(0),
    uncoalesced=lambda d: coo(d).indices(),
    outside=lambda d: torch.sparse_coo_tensor(d.put([[7], [0]]), d(1), (3, 4), check_invariants=True),
)
def test_mistakes_are_eagers_at_the_call(program: Program) -> None:
    with pytest.raises((RuntimeError, NotImplementedError)) as eager:
        program(Device("cpu"))
    with pytest.raises(eager.type):
        program(Device("dtorch"))
    assert dtorch.ones(2).tolist() == [1.0, 1.0]


def test_a_failure_goes_through_sparse_tensors_and_names_its_line() -> None:
    line = inspect.currentframe().f_lineno  # type: ignore[union-attr]
    d = Device("dtorch")
    t = d(3, 4)
    t.add_(coo(d))
    values = nn.functional.embedding(computed([7, 1]), dtorch.rand(3, 1)).reshape(2)
    t.add_(torch.sparse_coo_tensor(d.put([[0, 1], [1, 1]]), values, (3, 4)))  # not waited for
    with pytest.raises(dtorch.RemoteError, match="index out of range") as failure:
        t.cpu()
    assert failure.value.lineno == line + 4
    with pytest.raises(dtorch.RemoteError, match="index out of range"):
        torch.sparse_coo_tensor(d.put([[0, 1], [1, 1]]), values, (3, 4)).coalesce()


def test_an_index_outside_writes_into_no_other_tensor() -> None:
    table = nn.Embedding(1000, 16, sparse=True).to("dtorch")
    steps = torch.optim.SGD(table.parameters(), lr=1.0)
    others = [torch.zeros(1000, 16, device="dtorch") for _ in range(4)]
    for k in (3, 4, 1500, 3000, 5000):
        steps.zero_grad()
        table(computed([k])).sum().backward()
        steps.step()
    assert all(t.abs().sum().item() == 0 for t in others)
    with pytest.raises(dtorch.RemoteError, match=r"out of (range|bounds)"):
        table.weight.sum().item()


def test_a_module_with_a_compressed_parameter_moves() -> None:
    module = nn.Linear(6, 4)
    module.weight = nn.Parameter(torch.eye(4, 6).to_sparse_csr(), requires_grad=False)
    x = torch.rand(2, 6)
    want = module(x)
    module.to("dtorch")
    assert torch.equal(module(x.to("dtorch")).cpu(), want)


def test_in_a_forked_child_nothing_waits() -> None:
    t = coo(Device("dtorch"))
    child = os.fork()
    if child == 0:
        try:
            t.sum()
        except dtorch.EngineError:
            os._exit(7)
        os._exit(1)
    assert processes.wait_until(lambda: os.waitpid(child, os.WNOHANG) == (child, 7 << 8), 20)


def test_a_tensor_of_an_engine_that_ended_starts_none(no_engine: None) -> None:
    dtorch.init(workers=1, device="cpu")
    t = coo(Device("dtorch"))
    dtorch.shutdown()
    for use in (lambda: t.clone(), lambda: t.coalesce(), lambda: t + t):
        with pytest.raises(dtorch.EngineError):
            use()
    assert not dtorch.is_initialized()


def test_the_step_of_a_sparse_optimizer_waits_only_to_coalesce() -> None:
    d = Device("dtorch")
    dense, sparse = d(3, 4), coo(d)
    dense.add_(sparse)
    asked = dtorch.client_stats()["geometry_asks"]
    for _ in range(5):
        dense.add_(sparse, alpha=2)
    assert dtorch.client_stats()["geometry_asks"] == asked


def test_nothing_is_left_on_the_worker() -> None:
    d = Device("dtorch")
    gc.collect()
    dtorch.synchronize()
    before = dtorch.worker_stats(0)["storages"]
    t = coo(d).coalesce()
    t.mul_(2).add_(t)
    compressed(d, torch.sparse_csr).to_dense()
    del t
    gc.collect()
    dtorch.synchronize()
    assert dtorch.worker_stats(0)["storages"] == before

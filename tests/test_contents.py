"""item() of what follows from the program's own numbers asks no worker, and gives what the worker would have given.

CON-1 to CON-4 are invariants of ``native/client/contents.h``.
"""

from __future__ import annotations

import os
import random
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from holding import held
from same import Device, Program, eager_threads, named, same

import dtorch

if TYPE_CHECKING:
    from dtorch.client.engine import Engine


@pytest.fixture(autouse=True)
def _engine(engine: Engine) -> Iterator[None]:
    with eager_threads(engine.threads_per_worker):
        yield


def told() -> int:
    return dtorch.client_stats()["items_told"]


def _positions(on: Device) -> torch.Tensor:
    return torch.arange(9, device=on.name).unsqueeze(0)


def _packed(on: Device) -> torch.Tensor:
    """How transformers looks for several sequences in one row."""
    at = _positions(on)
    steps = torch.diff(at, prepend=at[:, :1] - 1, dim=-1)
    return ((steps != 1).cumsum(-1)[:, -1] == 0).all()


def _written(on: Device, write: Callable[[torch.Tensor], Any]) -> torch.Tensor:
    x = torch.arange(6, device=on.name).view(2, 3)
    write(x)
    return (x * torch.tensor([[1, 10, 100]], device=on.name)).sum()


@named(
    arange=lambda on: torch.arange(3, 20, 2, device=on.name)[4],
    upload=lambda on: on.put([[1, 2], [3, 4]])[1, 0],
    mask=lambda on: on.put([True, True, False]).all(),
    full=lambda on: torch.full((3,), 7, device=on.name).sum(),
    ones=lambda on: torch.ones(4, dtype=torch.bool, device=on.name).any(),
    packed=_packed,
    lengths=lambda on: on.put([[1, 1, 0], [1, 1, 1]]).sum(-1).max(),
    indexed=lambda on: torch.arange(10, device=on.name)[on.put([3, 9])].max(),
    many_results=lambda on: on.put([3, 1, 2]).sort().indices[0],
    lists=lambda on: torch.stack([on.put(2), on.put(5)]).argmax(),
    strides=lambda on: on.put([[1, 2, 3], [4, 5, 6]]).t()[1:, 1].contiguous()[1],
    bits_of_another_type=lambda on: on.put([1, 2]).view(torch.int32)[2],
    fill=lambda on: _written(on, lambda x: x.fill_(4)),
    add=lambda on: _written(on, lambda x: x.add_(4)),
    view=lambda on: _written(on, lambda x: x[:, 1].mul_(5)),
    item_assigned=lambda on: _written(on, lambda x: x.__setitem__((1, 2), 40)),
    copied=lambda on: _written(on, lambda x: x.copy_(on.put([7, 8, 9]))),
    where_true=lambda on: _written(on, lambda x: x.masked_fill_(on.put([True, False, True]), 3)),
    out=lambda on: torch.add(on.put([1, 2]), 3, out=torch.empty(2, dtype=torch.int64, device=on.name)).sum(),
    out_resized=lambda on: torch.add(on.put([1, 2]), 3, out=torch.empty(0, dtype=torch.int64, device=on.name)).sum(),
    cast=lambda on: on.put([1, 0, 2]).bool().to(torch.uint8).sum(),
)
def test_nobody_is_asked(engine: Engine, program: Program) -> None:
    want = program(Device("cpu")).item()
    program(Device("dtorch"))  # its geometries may have to be asked for
    before = told()
    with held(engine):  # a worker that does not move answers nothing
        assert program(Device("dtorch")).item() == want
    assert told() == before + 1
    assert program(Device("dtorch")).tolist() == want  # by the worker


def _grown(x: torch.Tensor, grow: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    return grow(x).fill_(7)[-1]


def _float_view(on: Device) -> torch.Tensor:
    x = torch.zeros(64, dtype=torch.uint8, device=on.name)
    x.view(torch.float32).add_(0.3)
    return x


@named(
    computed=lambda on: (on(4) > 0).sum(),
    floats=lambda on: torch.arange(4, device=on.name).float().sum(),
    random=lambda on: (torch.randint(5, (3,), device=on.name) >= 0).all(),
    random_in_place=lambda on: torch.zeros(3, dtype=torch.int64, device=on.name).random_(5).ge(0).all(),
    permutation=lambda on: torch.randperm(5, device=on.name).sum(),
    of_data=lambda on: (on(5) > 9).nonzero().numel() + on.put([1, 2])[(on(2) > -99)].sum(),
    written_by_data=lambda on: _written(on, lambda x: x.copy_((on(2, 3) > 0).long())),
    written_in_part=lambda on: torch.empty(3, dtype=torch.int64, device=on.name).index_fill_(0, on.put([0]), 5)[0],
    grown=lambda on: _grown(on.put([1, 2, 3, 4])[1:3], lambda x: x.resize_(20)),
    grown_before_it_was_written=lambda on: _grown(
        torch.empty(4, dtype=torch.int64, device=on.name)[1:3], lambda x: x.resize_(20)
    ),
    grown_below=lambda on: _grown(
        torch.empty(4, dtype=torch.int64, device=on.name),
        lambda x: (x.untyped_storage().resize_(32000), x.as_strided((4000,), (1,)))[1],
    ),
    set_to_more=lambda on: _grown(
        torch.empty(4, dtype=torch.int64, device=on.name),
        lambda x: torch.empty(0, dtype=x.dtype, device=x.device).set_(x.untyped_storage(), 0, (4000,), (1,)),
    ),
    float_view=lambda on: _float_view(on)[3],
    large=lambda on: on.put(torch.arange(20_000)).sum(),
    resized=lambda on: on.put([1, 2, 3]).resize_(2).resize_(40)[1],
    large_after_all=lambda on: torch.arange(20_000, device=on.name).sum(),
)
def test_what_the_data_decide_is_asked_for(program: Program) -> None:
    want = program(Device("cpu"))
    before = told()
    assert program(Device("dtorch")).item() == want.item()
    assert told() == before


def test_a_recipe_is_bounded_and_begins_anew_where_it_was_followed(engine: Engine) -> None:
    count = torch.zeros((), dtype=torch.int64, device="dtorch:0")
    before = told()
    for _ in range(1000):
        count += 1
    assert count.item() == 1000
    assert told() == before  # a thousand calls are too many
    fresh = torch.zeros((), dtype=torch.int64, device="dtorch:0")
    before = told()
    with held(engine):
        for i in range(1000):
            fresh += 1
            if i % 100 == 99:
                assert fresh.item() == i + 1
    assert told() == before + 10


def test_switches_of_pytorch_are_those_of_the_call() -> None:
    x = torch.tensor([16777217], device="dtorch:0")
    torch.set_default_dtype(torch.float64)
    try:
        y = x.eq(16777216.0)
    finally:
        torch.set_default_dtype(torch.float32)
    assert y.item() is False and y.tolist() == [False]


def test_con3_all_together_are_bounded() -> None:
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE") >> 20

    def upload(i: int) -> torch.Tensor:  # of 64 KiB
        if i % 50 == 0:
            dtorch.synchronize(0)  # what is under way is memory too
        return torch.zeros(8192, dtype=torch.int64).to("dtorch:0")

    kept = [upload(i) for i in range(100)]
    before = resident()
    kept += [upload(i).sum() for i in range(2000)]
    kept += [upload(i) for i in range(1000)]
    assert resident() - before < 60  # of 190 that were uploaded
    assert kept[150].item() == kept[-1][5].item() == 0
    assert (torch.arange(4, device="dtorch:0") + 1).sum().item() == 10


def test_what_nothing_has_written_is_the_workers_to_tell() -> None:
    source = torch.empty(1, dtype=torch.int64, device="dtorch:0")
    torch.empty_like(source).copy_(source)  # the source is read as it is
    before = told()
    assert source.item() == source.tolist()[0]
    assert told() == before


def test_a_diamond_of_calls_is_followed_once_each() -> None:
    x = torch.ones((), dtype=torch.int64, device="dtorch:0")
    for _ in range(50):  # followed naively, 2 to the 50
        x = x + x
    assert x.item() == 2**50


def test_a_mistake_in_the_data_is_the_workers_to_tell() -> None:
    rows = torch.arange(5, device="dtorch:0")
    assert rows[torch.tensor([4], device="dtorch:0")].item() == 4
    with pytest.raises(dtorch.RemoteError, match="out of bounds"):
        rows[torch.tensor([7], device="dtorch:0")].item()


@named(
    gather=lambda on: torch.zeros(2, 3, device=on.name).gather(1, on.put([[0, 3], [1, 2]])),
    scatter=lambda on: torch.zeros(2, 3, device=on.name).scatter(1, on.put([[-1, 3], [1, 2]]), 2.0),
    scatter_in_place=lambda on: torch.zeros(3, 5, device=on.name).scatter_add_(0, on.put([[9]]), on(1, 1)),
    index_select=lambda on: torch.zeros(2, 4, device=on.name).index_select(1, on.put([4])),
    embedding=lambda on: torch.nn.functional.embedding(on.put([0, 11]), torch.zeros(11, 2, device=on.name)),
    nll=lambda on: torch.nn.functional.cross_entropy(torch.zeros(5, 7, device=on.name), on.put([0, 1, 7, -100, 2])),
    indexed=lambda on: torch.zeros(4, 6, device=on.name)[on.put([1, 2]), on.put([0, 6])],
    indexed_after_a_mask=lambda on: torch.zeros(2, 13, device=on.name)[on.put([True, True]), on.put([0, 13])],
    assigned=lambda on: torch.zeros(4, 17, device=on.name).__setitem__((slice(None), on.put([17])), 1.0),
)
def test_a_wrong_index_raises_eagers_own_exception_at_the_call_while_shapes_are_new(program: Program) -> None:
    with pytest.raises(Exception) as eager:
        program(Device("cpu"))
    with pytest.raises(type(eager.value)) as ours:
        program(Device("dtorch"))
    assert type(ours.value) is type(eager.value)
    assert str(ours.value).split("\n")[0] == str(eager.value).split("\n")[0]


@named(
    ends=lambda on: torch.arange(8.0, device=on.name)[on.put([-8, 7, 0])],
    ignored=lambda on: torch.nn.functional.cross_entropy(on(3, 19), on.put([18, -100, 0])),
    filled=lambda on: torch.zeros(5, 3, device=on.name).index_fill(1, on.put([-1, 0]), 2.0),
    number=lambda on: torch.ones((), device=on.name).index_select(0, on.put([0])),
)
def test_a_right_index_gives_what_eager_gives(program: Program) -> None:
    same(program)


def test_a_resized_out_warns_once() -> None:
    def resize() -> int:
        out = torch.empty(3, dtype=torch.int64, device="dtorch:0")
        torch.add(torch.arange(2, device="dtorch:0"), 1, out=out)
        return int(out.sum().item())

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert resize() == 3
    assert sum("resized" in str(w.message) for w in caught) == 1


def test_modes_and_profilers_of_the_program_do_not_see_it() -> None:
    from torch.utils._python_dispatch import TorchDispatchMode

    seen = []

    class Names(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func.name())
            return func(*args, **(kwargs or {}))

    x = torch.arange(5, device="dtorch:0").add(1).mul(2)
    before = told()
    with Names():
        assert x.sum().item() == 30
    assert told() == before + 1
    assert seen.count("aten::sum") == 1 and "aten::mul.Tensor" not in seen


def test_an_ended_engine_tells_nothing(no_engine: None) -> None:
    dtorch.init(workers=1)
    x = torch.arange(5, device="dtorch:0")
    dtorch.shutdown()
    with pytest.raises(dtorch.EngineError):
        x.sum().item()


@pytest.mark.parametrize("seed", range(6))
def test_random_programs(seed: int) -> None:
    """Integers and booleans, written and read in any order: what is told equals eager, and what the worker holds."""

    def program(device: str, choices: random.Random) -> Iterator[torch.Tensor]:
        live = [torch.arange(6, device=device), torch.tensor([3, 1, 4, 1, 5, 9], device=device)]
        live.append(torch.ones(6, dtype=torch.int32, device=device))
        for _ in range(60):
            a, b = choices.choice(live), choices.choice(live)
            match choices.randrange(10):
                case 0:
                    made = a + b
                case 1:
                    made = (a > b).to(a.dtype)
                case 2:
                    a.add_(choices.randrange(3))
                    made = a
                case 3:
                    a[choices.randrange(6)] = choices.randrange(9)
                    made = a
                case 4:
                    a[1:4].copy_(b[2:5].clone())
                    made = a
                case 5:
                    made = a.flip(0).cumsum(0)[:6] % 97
                    made = made.to(torch.int64)
                case 6:
                    made = torch.where(a > 3, a, b)
                case 7:
                    torch.maximum(a.long(), b.long(), out=live[0])
                    made = live[0]
                case 8:
                    made = a.clone().zero_() + 5
                case _:
                    made = a.view(2, 3).t().contiguous().view(6) % 31
            a.remainder_(1000)
            live = [*live[-5:], made] if made.numel() == 6 else live
            if choices.random() < 0.3:
                yield choices.choice(live)

    for _ in program("dtorch:0", random.Random(seed)):
        pass  # what shapes are new is asked for, and then not told
    asked, before = 0, told()
    for ours, want in zip(program("dtorch:0", random.Random(seed)), program("cpu", random.Random(seed)), strict=True):
        asked += 6
        assert [ours[i].item() for i in range(6)] == want.tolist()
        assert ours.tolist() == want.tolist()
    assert told() - before > asked / 2

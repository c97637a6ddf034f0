"""What a program says to dtorch: starting and ending, devices, making tensors, moving them, looking at them.

STO-1 is an invariant of ``native/client/storage.h``, ENG-2 of ``dtorch/client/engine.py``.
"""

from __future__ import annotations

import copy
import io
import itertools
import os
import pickle
import re
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest
import torch
from same import Device, assert_same, bits
from torch import nn

import dtorch
from dtorch.client import api, factories
from dtorch.client import engine as engine_module
from dtorch.protocol import INLINE_BYTES

if TYPE_CHECKING:
    from dtorch.client.engine import Engine


# -- init and shutdown


def test_init_again_with_the_same_arguments_does_nothing(no_engine: None) -> None:
    dtorch.init(workers=2, device="cpu", threads_per_worker=1)
    first = engine_module.current()
    x = dtorch.ones(3)
    dtorch.init(workers=2, device="cpu", threads_per_worker=1)
    dtorch.init(2, "auto", 1)  # "auto" is "cpu" as long as there are no others
    assert engine_module.current() is first
    assert x.sum().item() == 3.0


def test_init_again_with_other_arguments_names_both(no_engine: None) -> None:
    dtorch.init(workers=1, device="cpu", threads_per_worker=1)
    with pytest.raises(dtorch.EngineError) as caught:
        dtorch.init(workers=3, device="cpu", threads_per_worker=2)
    message = str(caught.value)
    assert "workers=1, device='cpu', threads_per_worker=1 is running" in message
    assert "asked for workers=3, device='cpu', threads_per_worker=2" in message
    assert "dtorch.shutdown()" in message
    assert dtorch.device_count() == 1
    assert dtorch.ones(2).sum().item() == 2.0


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        ({"workers": 0}, "workers=0"),
        ({"workers": -1}, "workers=-1"),
        ({"workers": 128}, "workers=128"),
        ({"workers": 2.0}, r"workers=2\.0"),
        ({"workers": True}, "workers=True"),
        ({"workers": "2"}, "workers='2'"),
        ({"device": "gpu"}, "device='gpu'.*'auto', 'cpu', 'cuda'"),
        ({"device": None}, "device=None"),
        ({"threads_per_worker": 0}, "threads_per_worker=0"),
        ({"threads_per_worker": 1.5}, r"threads_per_worker=1\.5"),
    ],
)
def test_init_refuses_what_makes_no_sense(no_engine: None, arguments: dict[str, Any], names: str) -> None:
    with pytest.raises(ValueError, match=names):
        dtorch.init(**arguments)
    assert not dtorch.is_initialized()


def test_init_refuses_cuda_workers(no_engine: None) -> None:
    with pytest.raises(dtorch.EngineError, match="use device='cpu'"):
        dtorch.init(workers=1, device="cuda")


def test_the_threads_of_a_worker_are_its_share_of_the_processors(no_engine: None) -> None:
    processors = len(os.sched_getaffinity(0))
    dtorch.init(workers=3, device="cpu")
    current = engine_module.current()
    assert current is not None
    assert current.threads_per_worker == max(1, processors // 3)
    dtorch.init(workers=3, device="cpu", threads_per_worker=max(1, processors // 3))


def test_using_a_tensor_starts_the_default_engine(no_engine: None) -> None:
    assert not dtorch.is_initialized()
    assert dtorch.device_count() == 1
    x = torch.ones(3, device="dtorch")
    assert dtorch.is_initialized()
    assert dtorch.device_count() == 1
    assert x.sum().item() == 3.0
    dtorch.init(workers=1, device="cpu")  # what it was started with


@pytest.mark.parametrize(
    "use",
    [
        lambda: torch.ones(3).to("dtorch:1"),
        lambda: dtorch.set_device(1),
        lambda: dtorch.manual_seed(3),
        lambda: nn.Linear(2, 2).to("dtorch:1"),
        lambda: torch.Generator(device="dtorch").manual_seed(1),
        lambda: dtorch.worker_stats(1),
    ],
    ids=["to", "set_device", "manual_seed", "module", "generator", "stats"],
)
def test_the_default_engine_has_as_many_workers_as_the_setting_says(
    no_engine: None, monkeypatch: pytest.MonkeyPatch, use: Callable[[], object]
) -> None:
    monkeypatch.setenv("DTORCH_WORKERS", "2")
    assert dtorch.device_count() == 2
    use()
    assert dtorch.is_initialized()
    assert dtorch.device_count() == 2
    dtorch.set_device(0)


def test_a_setting_that_is_no_number_is_told(no_engine: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DTORCH_WORKERS", "many")
    with pytest.raises(ValueError, match="DTORCH_WORKERS='many' is not a whole number"):
        torch.ones(3, device="dtorch")


def test_asking_starts_nothing(no_engine: None) -> None:
    dtorch.synchronize()
    dtorch.empty_cache()
    dtorch.shutdown()
    assert dtorch.device_count() == 1
    assert dtorch.current_device() == 0
    assert torch.dtorch.is_available()
    assert not dtorch.is_initialized()


def _uses(old: torch.Tensor, lazy: torch.Tensor, new: torch.Tensor) -> dict[str, Callable[[], object]]:
    """Everything one may try with a tensor whose engine is over; ``lazy`` no operator has named yet.

    What makes a new tensor first (``deepcopy``, ``zeros_like``) is not here: a new tensor starts the default engine.
    """
    return {
        "operator": lambda: old + 1,
        "in place": lambda: old.add_(1),
        "matmul": lambda: old.t() @ old,
        "cpu": lambda: old.cpu(),
        "item": lambda: old.sum().item(),
        "future": lambda: old.to_torch_async(),
        "repr": lambda: repr(old),
        "fill an empty one": lambda: lazy.fill_(1),
        "fetch an empty one": lambda: lazy.cpu(),
        "mask": lambda: old[old > 0],
        "upload into": lambda: old.copy_(torch.ones(2, 3)),
        "copy from": lambda: new.copy_(old),
        "copy to": lambda: old.copy_(new),
        "write into": lambda: torch.add(old, 1, out=old),
        "resize": lambda: old.untyped_storage().resize_(100),
    }


@pytest.mark.parametrize("again", [False, True], ids=["none_runs", "another_runs"])
def test_tensors_of_an_engine_that_was_shut_down_say_so(no_engine: None, again: bool) -> None:
    dtorch.init(workers=1, device="cpu")
    old, lazy = dtorch.arange(6.0).view(2, 3), dtorch.empty(2, 3)
    dtorch.shutdown()
    assert old.shape == (2, 3)
    assert old[0].stride() == (1,)
    new = torch.ones(2, 3)
    if again:
        dtorch.init(workers=2, device="cpu")
        new = dtorch.ones(2, 3)
    silent = []
    for name, use in _uses(old, lazy, new).items():
        try:
            use()
            silent.append(name)
        except dtorch.EngineError as e:
            assert "shut down" in str(e), name
    assert silent == []
    assert dtorch.is_initialized() == again
    if again:
        with pytest.raises(dtorch.EngineError, match="shut down"):
            new + old
        with pytest.raises(dtorch.EngineError, match="shut down"):
            torch.add(new, 1, out=old)
        with pytest.raises(dtorch.EngineError, match="shut down"):
            old.to("dtorch:1")
    del old, lazy, use  # their release must not reach the new engine's storages
    assert new.tolist() == [[1.0] * 3] * 2
    dtorch.synchronize()


def test_engines_one_after_the_other(no_engine: None) -> None:
    for workers in (1, 2, 1):
        dtorch.init(workers=workers, device="cpu")
        assert dtorch.device_count() == workers
        assert dtorch.current_device() == 0
        layer = nn.Linear(3, 2).to(f"dtorch:{workers - 1}")
        assert layer(torch.ones(1, 3, device=f"dtorch:{workers - 1}")).shape == (1, 2)
        dtorch.set_device(workers - 1)
        dtorch.shutdown()
        assert not dtorch.is_initialized()
        dtorch.shutdown()


# -- devices


def test_the_current_device(engine: Engine) -> None:
    assert (dtorch.device_count(), dtorch.current_device()) == (2, 0)
    try:
        dtorch.set_device(1)
        assert dtorch.current_device() == 1
        assert dtorch.ones(2).device == torch.device("dtorch:1")
        assert torch.ones(2, device="dtorch").device.index == 1
        assert torch.ones(2).dtorch().device.index == 1
        assert torch.ones(2).to("dtorch:0").device.index == 0
        for device in ("dtorch:0", torch.device("dtorch", 0), 0):
            dtorch.set_device(1)
            dtorch.set_device(device)
            assert dtorch.current_device() == 0
    finally:
        dtorch.set_device(0)


def test_device_makes_one_current_for_a_while(engine: Engine) -> None:
    with dtorch.device(1):
        assert dtorch.rand(2).device.index == 1
        with dtorch.device("dtorch:0"):
            assert dtorch.rand(2).device.index == 0
        assert dtorch.current_device() == 1
    assert dtorch.current_device() == 0
    with pytest.raises(KeyError), dtorch.device(1):
        raise KeyError
    assert dtorch.current_device() == 0

    @dtorch.device(1)
    def made() -> torch.Tensor:
        return dtorch.zeros(1)

    assert made().device.index == 1
    assert made().device.index == 1
    assert dtorch.current_device() == 0


def test_operators_follow_their_tensors_not_the_current_device(engine: Engine) -> None:
    x = torch.ones(3, device="dtorch:1")
    for result in (x + 1, torch.zeros_like(x), x.new_ones(2), x.clone(), x.nonzero(), x.to(torch.float64)):
        assert result.device.index == 1
    assert x.to("dtorch").device.index == 0  # as "cuda" does, "dtorch" means the current one


def test_each_thread_has_its_own_current_device(engine: Engine) -> None:
    seen: list[int] = []

    def work() -> None:
        seen.append(dtorch.current_device())
        dtorch.set_device(1)
        seen.append(dtorch.ones(1).device.index)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [0, 1]
    assert dtorch.current_device() == 0


@pytest.mark.parametrize("device", ["cpu", "cuda:0", torch.device("cpu")])
def test_another_kind_of_device_is_refused(engine: Engine, device: Any) -> None:
    with pytest.raises(ValueError, match="expected a dtorch device"):
        dtorch.set_device(device)


def test_pytorch_knows_the_device(engine: Engine) -> None:
    assert torch._C._get_privateuse1_backend_name() == "dtorch"
    assert torch.get_device_module("dtorch") is torch.dtorch
    assert torch.dtorch.current_device is dtorch.current_device
    assert torch.accelerator.current_accelerator() == torch.device("dtorch")
    assert torch.accelerator.device_count() == 2
    assert torch.accelerator.is_available()
    assert torch.accelerator.current_device_index() == 0
    torch.accelerator.set_device_index(1)
    try:
        assert dtorch.current_device() == 1
    finally:
        torch.accelerator.set_device_index(0)
    torch.accelerator.synchronize()


def test_it_can_be_the_default_device(engine: Engine) -> None:
    torch.set_default_device("dtorch:1")
    try:
        assert torch.ones(2).device == torch.device("dtorch:1")
        assert nn.Linear(2, 2).weight.device == torch.device("dtorch:1")
    finally:
        torch.set_default_device(None)
    assert torch.ones(2).device.type == "cpu"


# -- names


def test_every_other_name_of_torch_is_torchs() -> None:
    own = {*api.__all__, "settings", "client", "errors", "protocol", "posix", "zmq_api", "worker", "controller"}
    names = [name for name in dir(torch) if not name.startswith("_") and name not in own]
    assert len(names) > 800
    different = [name for name in names if getattr(dtorch, name) is not getattr(torch, name)]
    assert different == []
    assert dtorch.nn.functional is torch.nn.functional
    assert dtorch.Tensor is torch.Tensor


def test_a_star_import_gives_dtorchs_own_names() -> None:
    assert set(dtorch.__all__) == set(api.__all__)
    assert all(not hasattr(dtorch, name) for name in ("__wrapped__", "__signature__"))


def test_a_name_that_neither_has_is_told() -> None:
    with pytest.raises(AttributeError, match="module 'dtorch' has no attribute 'no_such_name', nor has torch"):
        _ = dtorch.no_such_name


FACTORY_CALLS: dict[str, list[tuple[tuple[Any, ...], dict[str, Any]]]] = {
    "arange": [((5,), {}), ((1, 2, 0.25), {}), ((0, 10, 3), {"dtype": torch.float16})],
    "as_tensor": [(([1, 2, 3],), {}), ((2.5,), {"dtype": torch.float64})],
    "asarray": [(([[1.0], [2.0]],), {})],
    "bartlett_window": [((9,), {})],
    "blackman_window": [((9,), {"periodic": False})],
    "empty": [((0, 3), {}), ((0,), {"dtype": torch.int8})],
    "empty_permuted": [(((0, 3), (1, 0)), {})],
    "empty_strided": [(((0, 3), (3, 1)), {})],
    "eye": [((3,), {}), ((2, 4), {"dtype": torch.int64})],
    "full": [(((2, 3), 7), {}), (((2,), 1.5), {"dtype": torch.bfloat16}), (((), True), {})],
    "hamming_window": [((9,), {}), ((9, True, 0.6, 0.4), {})],
    "hann_window": [((9,), {})],
    "kaiser_window": [((9,), {}), ((9, True, 6.0), {})],
    "linspace": [((0, 1, 7), {}), ((3, -3, 4), {"dtype": torch.float64})],
    "logspace": [((0, 2, 5), {}), ((0, 3, 4, 2.0), {})],
    "ones": [((2, 3), {}), (((2, 3),), {"dtype": torch.bool}), ((), {"size": (2,)})],
    "rand": [((3, 4), {}), ((5,), {"dtype": torch.float64})],
    "randint": [((10, (3, 4)), {}), ((-5, 5, (6,)), {"dtype": torch.int32})],
    "randn": [((3, 4), {}), ((40,), {"dtype": torch.bfloat16})],
    "randperm": [((9,), {}), ((9,), {"dtype": torch.int32})],
    "range": [((1, 4), {})],
    "scalar_tensor": [((3.5,), {}), ((3,), {"dtype": torch.int64})],
    "tensor": [(([1, 2, 3],), {}), ((True,), {}), (([[1.0, 2.0]],), {"dtype": torch.float16}), (([],), {})],
    "tril_indices": [((3, 4), {}), ((4, 4, -1), {"dtype": torch.int32})],
    "triu_indices": [((3, 4, 1), {})],
    "zeros": [((2, 3), {}), ((2,), {"dtype": torch.complex64})],
}


@pytest.mark.filterwarnings("ignore:torch.range is deprecated")
@pytest.mark.parametrize("name", factories.NAMES)
def test_a_factory_gives_eagers_values_on_the_current_device(engine: Engine, name: str) -> None:
    for args, kwargs in FACTORY_CALLS[name]:
        torch.manual_seed(11)
        want = getattr(torch, name)(*args, **kwargs)
        torch.manual_seed(11)
        got = getattr(dtorch, name)(*args, **kwargs)
        assert got.device == torch.device("dtorch:0")
        assert_same(got, want, f"{name}{args}{kwargs}")
        torch.manual_seed(11)
        assert_same(getattr(torch, name)(*args, **kwargs, device="dtorch:1"), want, f"{name}{args} on worker 1")


def test_a_factory_takes_the_device_that_is_given(engine: Engine) -> None:
    assert dtorch.ones(2, device="cpu").device.type == "cpu"
    assert dtorch.ones(2, device="dtorch:1").device.index == 1
    assert dtorch.rand(2, requires_grad=True).requires_grad
    assert dtorch.empty(2, 3).shape == (2, 3)
    assert dtorch.tensor(torch.ones(2).numpy()).tolist() == [1.0, 1.0]
    assert dtorch.as_tensor(torch.ones(2)).device.type == "dtorch"
    assert dtorch.rand.__name__ == "rand"
    assert "torch.rand" in (dtorch.rand.__doc__ or "")


# -- moving


def test_to_the_device_and_back(engine: Engine) -> None:
    x = torch.arange(6.0).view(2, 3)
    for moved in (x.dtorch(), x.to("dtorch"), x.to("dtorch:0"), x.to(torch.device("dtorch")), x.dtorch(0)):
        assert moved.is_dtorch
        assert moved.device == torch.device("dtorch:0")
        assert torch.equal(moved.cpu(), x)
    assert x.dtorch(1).device.index == 1
    assert not x.is_dtorch
    assert not x.dtorch().is_cpu
    assert x.untyped_storage().is_dtorch is False
    assert x.dtorch().untyped_storage().is_dtorch is True
    there = x.dtorch()
    assert there.to("dtorch") is there
    assert there.to("dtorch:0") is there
    assert there.dtorch() is there
    assert there.to("dtorch:0", copy=True) is not there
    assert x.to("dtorch", torch.float64).dtype == torch.float64
    assert x.to("dtorch", non_blocking=True).cpu(memory_format=torch.contiguous_format).stride() == (3, 1)
    assert there.to(torch.zeros(1, dtype=torch.int32, device="dtorch:1")).device.index == 1


MOVED: dict[str, Callable[[Device], torch.Tensor]] = {
    "scalar": lambda on: on(),
    "small": lambda on: on(3, 4),
    "empty": lambda on: on(0, 4),
    "as_many_bytes_as_go_inline": lambda on: on(INLINE_BYTES // 4),
    "one_more": lambda on: on(INLINE_BYTES // 4 + 1),
    "large": lambda on: on(300, 400),
    "bool": lambda on: on(5, dtype=torch.bool),
    "bf16": lambda on: on(5, dtype=torch.bfloat16),
    "complex": lambda on: on(5, dtype=torch.complex64),
    "transposed": lambda on: on(3, 4).t(),
    "large_transposed": lambda on: on(300, 400).t(),
    "channels_last": lambda on: on(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "conj": lambda on: on(3, dtype=torch.complex64).conj() * 1,
}


@pytest.mark.parametrize("name", MOVED)
@pytest.mark.parametrize("dtype", [None, torch.float64, torch.bfloat16], ids=["same", "double", "bf16"])
def test_between_workers(engine: Engine, name: str, dtype: torch.dtype | None) -> None:
    if dtype is not None and name in ("complex", "conj"):
        dtype = torch.complex128
    want = MOVED[name](Device("cpu"))
    x = MOVED[name](Device("dtorch:0"))
    y = x.to("dtorch:1", dtype) if dtype else x.to("dtorch:1")
    assert y.device == torch.device("dtorch:1")
    assert_same(y, want.to(dtype) if dtype else want)
    assert_same(y + 1, (want.to(dtype) if dtype else want) + 1)
    back = y.to("dtorch:0")
    y.zero_()
    assert_same(back, want.to(dtype) if dtype else want)
    assert_same(x, want)


@pytest.mark.parametrize(
    "change",
    [
        lambda x: x[1:3],
        lambda x: x[:, ::2],
        lambda x: x[0],
        lambda x: x.t()[1:],
        lambda x: x.expand(3, *x.shape),
        lambda x: x[:, 1, None],
        lambda x: x.diagonal(),
    ],
    ids=["rows", "columns", "row", "transposed", "expanded", "column", "diagonal"],
)
@pytest.mark.parametrize("size", [6, 300])
def test_views_between_workers(engine: Engine, change: Callable[[torch.Tensor], torch.Tensor], size: int) -> None:
    want = Device("cpu")(size, size)
    moved = change(want.to("dtorch:0")).to("dtorch:1")
    assert torch.equal(bits(moved.cpu()), bits(change(want)))
    assert moved.stride() == change(want).clone().stride()
    assert_same(moved * 2, change(want).clone() * 2)


def test_between_workers_the_value_is_the_one_at_that_point(engine: Engine) -> None:
    for n in (4, INLINE_BYTES):
        x = torch.zeros(n, device="dtorch:0")
        y = x.to("dtorch:1")
        x.add_(1)
        y.add_(10)
        z = x.to("dtorch:1")
        assert [t.unique().tolist() for t in (x, y, z)] == [[1.0], [10.0], [1.0]]


def test_copy_between_workers(engine: Engine) -> None:
    x = Device("dtorch:0")(40, 50)
    target = torch.zeros(50, 40, dtype=torch.float64, device="dtorch:1")
    target.t().copy_(x)
    assert torch.equal(target.cpu(), x.cpu().double().t())
    target[3].copy_(x[:, 0])
    assert torch.equal(target[3].cpu(), x[:, 0].cpu().double())
    row = torch.zeros(40, 50, device="dtorch:1").copy_(x[0])
    assert torch.equal(row.cpu(), x[0].cpu().expand(40, 50))


def test_a_gradient_goes_back_between_workers(engine: Engine) -> None:
    x = dtorch.ones(3).requires_grad_()
    y = (x * 2).to("dtorch:1").pow(2).sum()
    y.backward()
    assert x.grad is not None
    assert x.grad.device.index == 0
    assert x.grad.tolist() == [8.0] * 3


# -- looking at a tensor


def test_repr_shows_the_values_and_the_device(engine: Engine) -> None:
    for make in (
        lambda on: on(3, 4),
        lambda on: on(2, dtype=torch.bool),
        lambda on: on(0),
        lambda on: on(),
        lambda on: on(200, 100),
        lambda on: on(3, dtype=torch.complex64).conj(),
        lambda on: on(3, dtype=torch.bfloat16),
        lambda on: on.parameter(3),
        lambda on: nn.Parameter(on(2)),
    ):
        want, got = repr(make(Device("cpu"))), repr(make(Device("dtorch")))
        assert "device='dtorch:0'" in got
        assert re.sub(r",?\s*device='dtorch:0'", "", got) == want
    assert "grad_fn=<MulBackward0>" in repr(dtorch.ones(2).requires_grad_() * 2)
    assert f"{dtorch.tensor(1.23456):.2f}" == "1.23"


def test_numbers(engine: Engine) -> None:
    x = dtorch.tensor([[1.5, -2.0], [0.0, 4.0]])
    assert x[0, 0].item() == 1.5
    assert float(x[0, 1]) == -2.0
    assert int(x[1, 1]) == 4
    assert complex(x[1, 1]) == 4 + 0j
    assert bool(x[1, 1])
    assert not bool(x[1, 0])
    assert x.tolist() == [[1.5, -2.0], [0.0, 4.0]]
    assert dtorch.tensor(3).tolist() == 3
    assert [10, 20, 30][dtorch.tensor(2)] == 30
    assert list(range(dtorch.tensor(2))) == [0, 1]
    assert isinstance(dtorch.tensor(True).item(), bool)
    assert dtorch.tensor(2**62 + 1).item() == 2**62 + 1
    assert [row.tolist() for row in x] == x.tolist()
    assert len(x) == 2
    assert 4.0 in x
    assert 5.0 not in x
    assert x[0, 0] < 2 and not x[0, 1] > 0
    assert dtorch.tensor(float("nan")).isnan().item()
    assert len({x, x, x[0]}) == 2


def test_numpy_says_what_to_do(engine: Engine) -> None:
    import numpy as np

    x = dtorch.ones(3)
    for use in (x.numpy, lambda: np.asarray(x)):
        with pytest.raises(
            TypeError, match=r"can't convert dtorch:0 device type tensor to numpy\. Use Tensor\.cpu\(\)"
        ):
            use()
    assert x.cpu().numpy().tolist() == [1.0] * 3
    assert x.numpy(force=True).tolist() == [1.0] * 3


def test_sto1_addresses_tell_tensors_apart(engine: Engine) -> None:
    tensors = [dtorch.empty(n) for n in (0, 1, 100, 100000, 1, 7)]
    spans = sorted((t.data_ptr(), t.data_ptr() + max(1, t.nbytes)) for t in tensors if t.numel())
    assert all(a[1] <= b[0] for a, b in itertools.pairwise(spans))
    assert all(t.untyped_storage().data_ptr() for t in tensors)
    x = dtorch.ones(4, 4)
    assert x[1:].untyped_storage().data_ptr() == x.untyped_storage().data_ptr()


# -- modules, copies, files


def test_a_module_keeps_its_parameters_and_ties(engine: Engine) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(5, 3)
            self.head = nn.Linear(3, 5, bias=False)
            self.head.weight = self.embed.weight
            self.register_buffer("scale", torch.ones(2))

    model = Tied()
    before, buffer = model.embed.weight, model.scale
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    assert model.to("dtorch") is model
    assert model.embed.weight is before
    assert model.head.weight is before
    assert isinstance(before, nn.Parameter)
    assert before.is_dtorch
    assert before.requires_grad
    assert before.is_leaf
    assert optimizer.param_groups[0]["params"] == [before]
    assert model.scale.is_dtorch
    assert model.scale is not buffer
    model.head(model.embed(dtorch.tensor([1]))).sum().backward()
    assert before.grad is not None
    assert before.grad.is_dtorch
    model.dtorch(1)
    assert model.head.weight is model.embed.weight
    assert model.embed.weight.device.index == 1
    model.cpu()
    assert model.head.weight is model.embed.weight
    assert model.embed.weight.device.type == "cpu"
    half = nn.Linear(2, 2).to("dtorch", torch.bfloat16)
    assert (half.weight.dtype, half.weight.device.type) == (torch.bfloat16, "dtorch")


def test_a_module_can_be_made_on_the_device_or_on_meta(engine: Engine) -> None:
    torch.manual_seed(5)
    want = nn.Linear(3, 2)
    torch.manual_seed(5)
    assert_same(nn.Linear(3, 2, device="dtorch").weight, want.weight)
    empty = nn.Linear(3, 2, device="meta").to_empty(device="dtorch")
    empty.load_state_dict(want.state_dict())
    assert_same(empty.weight, want.weight)
    assigned = nn.Linear(3, 2, device="meta")
    assigned.load_state_dict({k: v.to("dtorch") for k, v in want.state_dict().items()}, assign=True)
    assert_same(assigned.weight, want.weight)


def test_deepcopy_copies(engine: Engine) -> None:
    x = dtorch.arange(6.0).view(2, 3)
    y = copy.deepcopy(x)
    x.add_(1)
    assert y.device == x.device
    assert y.tolist() == [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]
    a, b = copy.deepcopy([x, x[0]])
    b.zero_()
    assert a[0].tolist() == [0.0] * 3
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)).to("dtorch")
    twin = copy.deepcopy(model)
    assert_same(list(twin.state_dict().values()), [v.cpu() for v in model.state_dict().values()])
    assert twin[0].weight.requires_grad
    assert isinstance(twin[0].weight, nn.Parameter)
    assert copy.copy(x).data_ptr() == x.data_ptr()


def _saved(value: Any, **kwargs: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, **kwargs)


@pytest.mark.parametrize("weights_only", [True, False])
def test_save_and_load(engine: Engine, weights_only: bool) -> None:
    x = Device("dtorch")(3, 4)
    large = Device("dtorch:1")(200, 300)
    saved = {"x": x, "view": x.t()[1:], "large": large, "half": x.bfloat16(), "parameter": nn.Parameter(x * 2), "n": 3}
    loaded = _saved(saved, weights_only=weights_only)
    for name in ("x", "view", "large", "half", "parameter"):
        assert loaded[name].device == saved[name].device
        assert loaded[name].stride() == saved[name].stride()
        assert torch.equal(bits(loaded[name].cpu()), bits(saved[name].cpu()))
    assert isinstance(loaded["parameter"], nn.Parameter)
    loaded["x"].zero_()
    on_cpu = _saved(saved, weights_only=weights_only, map_location="cpu")
    assert on_cpu["x"].device.type == "cpu"
    assert torch.equal(on_cpu["x"], x.cpu())
    moved = _saved(saved, weights_only=weights_only, map_location="dtorch:1")
    assert moved["x"].device.index == 1
    assert_same(moved["x"], x.cpu())
    assert_same(_saved({"x": x.cpu()}, map_location="dtorch")["x"], x.cpu())


def test_saving_keeps_views_together(engine: Engine) -> None:
    x = dtorch.zeros(4, 5)
    a, b = _saved([x, x[1]])
    b.fill_(7)
    assert a[1].tolist() == [7.0] * 5


def test_a_training_state_is_saved_and_loaded(engine: Engine) -> None:
    model = nn.Linear(3, 2).to("dtorch")
    optimizer = torch.optim.AdamW(model.parameters(), 0.1)
    model(dtorch.ones(1, 3)).sum().backward()
    optimizer.step()
    state = _saved({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    twin = nn.Linear(3, 2).to("dtorch")
    other = torch.optim.AdamW(twin.parameters(), 0.1)
    twin.load_state_dict(state["model"])
    other.load_state_dict(state["optimizer"])
    for m, o in ((model, optimizer), (twin, other)):
        o.zero_grad()
        m(dtorch.ones(1, 3)).pow(2).sum().backward()
        o.step()
    assert_same(twin.weight, model.weight.cpu())


@pytest.mark.parametrize("n", [4, INLINE_BYTES])
def test_pickle_works_as_for_other_devices(engine: Engine, n: int) -> None:
    def program(on: Device) -> list[torch.Tensor]:
        layer = on.module(lambda: nn.Linear(3, 2))
        x = on(3, n)
        return [x, x.t(), x[1:, ::2], on(2, n, dtype=torch.bfloat16), on.parameter(n), layer.weight]

    for ours, eager in zip(program(Device("dtorch:1")), program(Device("cpu")), strict=True):
        again = pickle.loads(pickle.dumps(ours))
        assert (again.device, type(again), again.requires_grad) == (ours.device, type(eager), eager.requires_grad)
        assert_same(again.detach(), pickle.loads(pickle.dumps(eager)).detach())
    both = [x := dtorch.ones(3), x[1:]]
    copies = pickle.loads(pickle.dumps(both))
    assert [t.tolist() for t in copies] == [[1.0] * 3, [1.0] * 2]


def test_a_storage_can_be_made_and_viewed(engine: Engine) -> None:
    storage = torch.UntypedStorage(48, device="dtorch")
    assert (storage.nbytes(), storage.device.type) == (48, "dtorch")
    x = torch.empty(0, device="dtorch").set_(storage, 0, (3, 4), (4, 1))
    x.fill_(2)
    assert x.tolist() == [[2.0] * 4] * 3
    assert storage.cpu().nbytes() == 48
    assert storage.clone().nbytes() == 48

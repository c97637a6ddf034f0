"""torch.save and torch.load in all their ways, pickle and deepcopy: what is shared stays shared, wherever it goes.

test_api.py has the plain cases; files of safetensors are in test_loading.py.
"""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import safetensors.torch
import torch
from same import Device, eager_threads, same
from torch import nn

import dtorch

if TYPE_CHECKING:
    from dtorch.client.engine import Engine


def through_torch(value: Any, save: dict[str, Any] | None = None, **load: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file, **(save or {}))
    file.seek(0)
    return torch.load(file, **load)


#: Ways for a value to be written and read again.
WAYS: dict[str, Callable[[Any], Any]] = {
    "weights_only": lambda v: through_torch(v, weights_only=True),
    "all": lambda v: through_torch(v, weights_only=False),
    "old format": lambda v: through_torch(v, {"_use_new_zipfile_serialization": False}),
    "old format, all": lambda v: through_torch(v, {"_use_new_zipfile_serialization": False}, weights_only=False),
    "pickle": lambda v: pickle.loads(pickle.dumps(v)),
    "deepcopy": copy.deepcopy,
}


def _shared(on: Device) -> list[torch.Tensor]:
    x = on(3, 4)
    tied = nn.Parameter(x[2])
    return [x, x.t(), x[1], x[:, 1:3], x.flatten()[5:7], tied, tied, on(2, 3).to(torch.bfloat16), on(0, 3)]


@pytest.mark.parametrize("way", WAYS)
def test_what_shares_memory_with_eager_does_so_here(engine: Engine, way: str) -> None:
    def program(on: Device) -> list[Any]:
        value = _shared(on)
        again = WAYS[way](value)
        assert all(new.device == old.device for old, new in zip(value, again, strict=True))
        came = [t.detach().clone() for t in again]
        again[0].zero_()
        again[-2].add_(1)
        return [came, again, again[5] is again[6], value]

    same(program, "dtorch:1")


@pytest.mark.parametrize("weights_only", [True, False])
@pytest.mark.parametrize(
    ("where", "device"),
    [
        (None, "dtorch:0"),
        ("dtorch:1", "dtorch:1"),
        (torch.device("dtorch:1"), "dtorch:1"),
        ("dtorch", "dtorch:0"),
        ({"dtorch:0": "dtorch:1"}, "dtorch:1"),
        ({"dtorch:1": "dtorch:0"}, "dtorch:0"),
        (lambda storage, _: storage.to(device="dtorch:1"), "dtorch:1"),
        ("cpu", "cpu"),
        (lambda storage, _: storage, "cpu"),
        ("meta", "meta"),
    ],
)
def test_where_things_are_loaded(engine: Engine, where: Any, device: str, weights_only: bool) -> None:
    x = torch.arange(6.0, device="dtorch:0")
    whole, part = through_torch([x, x[2:]], map_location=where, weights_only=weights_only)
    assert (whole.device, part.device) == (torch.device(device), torch.device(device))
    if device != "meta":
        assert torch.equal(whole.cpu(), x.cpu())
        whole.add_(1)
        assert part.sum().item() == 18


def test_a_device_that_is_not_there_is_told(engine: Engine) -> None:
    with pytest.raises(RuntimeError, match=r"DTORCH device 5 but torch.dtorch.device_count\(\) is 2"):
        through_torch(torch.ones(3, device="dtorch"), map_location="dtorch:5")


@pytest.mark.parametrize("device", ["cpu", "dtorch:0"])
@pytest.mark.parametrize("where", [None, "cpu", "dtorch:1"])
def test_a_file_that_is_mapped(engine: Engine, tmp_path: Path, where: str | None, device: str) -> None:
    x = torch.randn(100, 300).to(device)
    torch.save({"x": x, "row": x[3], "other": torch.ones(3)}, tmp_path / "x.pt")
    loaded = torch.load(tmp_path / "x.pt", mmap=True, map_location=where)
    assert str(loaded["x"].device) == str(loaded["row"].device) == (where or device)
    assert str(loaded["other"].device) == (where or "cpu")
    assert torch.equal(loaded["x"].cpu(), x.cpu())
    loaded["x"].zero_()
    assert loaded["row"].abs().sum().item() == 0
    assert torch.equal(torch.load(tmp_path / "x.pt", map_location="cpu")["x"], x.cpu())  # the file is as it was


def test_a_mapped_file_that_is_uploaded_may_go(engine: Engine, tmp_path: Path) -> None:
    x = torch.randn(1 << 18)
    torch.save({"x": x}, tmp_path / "x.pt")
    loaded = torch.load(tmp_path / "x.pt", mmap=True, map_location="dtorch")["x"]
    (tmp_path / "x.pt").write_bytes(b"")
    assert torch.equal(loaded.cpu(), x)


def test_loading_inside_a_device_context(engine: Engine) -> None:
    with torch.device("dtorch:1"):
        assert through_torch(torch.ones(3)).device == torch.device("dtorch:1")
    assert through_torch(torch.ones(3)).device == torch.device("cpu")


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
@pytest.mark.parametrize("way", ["all", "deepcopy"])
def test_a_storage_goes_whole(engine: Engine, way: str) -> None:
    x = torch.arange(6, device="dtorch:1", dtype=torch.uint8)
    again = WAYS[way](x.untyped_storage())
    assert again.device == torch.device("dtorch:1")
    assert torch.empty(0, dtype=torch.uint8, device="dtorch:1").set_(again).tolist() == list(range(6))


class Named(torch.Tensor):
    """A subclass with an attribute."""

    label: str


def test_kinds_of_tensors(engine: Engine) -> None:
    def program(on: Device) -> list[Any]:
        named = on(3).as_subclass(Named)
        named.label = "x"
        again = through_torch(named, weights_only=False)
        assert type(again) is Named
        assert again.label == "x"
        value = [on(4, dtype=torch.complex64).conj(), on(3, 3).requires_grad_(), on(3, dtype=torch.bool), on()]
        return [again.as_subclass(torch.Tensor), through_torch(value), copy.deepcopy(value)]

    same(program, "dtorch:1")


# -- training states

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, nesterov=True),
    "Adam": lambda p: torch.optim.Adam(p, 0.01, amsgrad=True),
    "AdamW, foreach": lambda p: torch.optim.AdamW(p, 0.01, foreach=True),
    "AdamW, fused": lambda p: torch.optim.AdamW(p, 0.01, fused=True),
    "AdamW, capturable": lambda p: torch.optim.AdamW(p, 0.01, capturable=True),
    "Adagrad": lambda p: torch.optim.Adagrad(p, 0.1),
    "RMSprop": lambda p: torch.optim.RMSprop(p, 0.01, momentum=0.5, centered=True),
    "LBFGS": lambda p: torch.optim.LBFGS(p, 0.1, max_iter=3),
}


def _steps(model: nn.Module, optimizer: torch.optim.Optimizer, on: Device, n: int) -> list[float]:
    losses = []
    for _ in range(n):
        x = on(5, 6)

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss: torch.Tensor = model(x).pow(2).mean()  # noqa: B023 (called at once)
            loss.backward()
            return loss

        loss = optimizer.step(closure)
        assert loss is not None
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_goes_on_from_a_saved_state_as_if_it_had_not_stopped(engine: Engine, name: str) -> None:
    make = OPTIMIZERS[name]

    def net(on: Device) -> nn.Module:
        module: nn.Module = on.module(lambda: nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 2)))
        return module

    def program(on: Device) -> list[Any]:
        model = net(on)
        optimizer = make(model.parameters())
        losses = _steps(model, optimizer, on, 3)
        state = through_torch({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, weights_only=True)
        model = net(on)
        optimizer = make(model.parameters())
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        losses += _steps(model, optimizer, on, 3)
        tensors = [{k: v for k, v in s.items() if k != "step"} for s in optimizer.state_dict()["state"].values()]
        return [losses, list(model.state_dict().values()), tensors if name != "LBFGS" else []]

    if name == "AdamW, capturable":  # eager has it for accelerators only; the plain one computes the same
        on = Device("dtorch:1")
        ours = program(on)
        make = OPTIMIZERS["AdamW, foreach"]
        losses = program(Device("cpu"))[0]
        assert ours[0] == pytest.approx(losses, rel=1e-5)
    else:
        with eager_threads(engine.threads_per_worker):
            same(program, "dtorch:1")


def test_a_state_goes_to_another_worker(engine: Engine) -> None:
    model = nn.Linear(3, 2).to("dtorch:0")
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 3, device="dtorch:0")).sum().backward()
    optimizer.step()
    state = through_torch([model.state_dict(), optimizer.state_dict()], map_location="dtorch:1")
    twin = nn.Linear(3, 2).to("dtorch:1")
    other = torch.optim.Adam(twin.parameters())
    twin.load_state_dict(state[0])
    other.load_state_dict(state[1])
    assert {t.device.index for s in other.state.values() for k, t in s.items() if k != "step"} == {1}
    assert torch.equal(twin.weight.cpu(), model.weight.cpu())
    # and a state that lies elsewhere is brought to where the parameters are
    other.load_state_dict(optimizer.state_dict())
    assert {t.device.index for s in other.state.values() for k, t in s.items() if k != "step"} == {1}


def test_a_model_is_copied_with_its_optimizer(engine: Engine) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)).to("dtorch")
    model[1].weight = model[0].weight
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    model(torch.ones(1, 3, device="dtorch")).sum().backward()
    optimizer.step()
    twin, other = copy.deepcopy((model, optimizer))
    for old, new in zip(model.parameters(), twin.parameters(), strict=True):
        new.grad = old.grad.clone()
    assert twin[1].weight is twin[0].weight
    assert other.param_groups[0]["params"][0] is twin[0].weight
    before = twin[0].weight.cpu()
    optimizer.step()
    assert torch.equal(twin[0].weight.cpu(), before)
    other.step()
    assert torch.equal(twin[0].weight.cpu(), model[0].weight.cpu())


# -- to other libraries and processes


def test_the_formats_library_saves_what_is_on_workers(engine: Engine, tmp_path: Path) -> None:
    x = torch.randn(40, 50)
    safetensors.torch.save_file({"x": x.to("dtorch:1"), "n": torch.arange(3, device="dtorch")}, tmp_path / "x")
    assert torch.equal(safetensors.torch.load_file(tmp_path / "x")["x"], x)
    loaded = dtorch.load_file(tmp_path / "x")
    assert torch.equal(loaded["x"].cpu(), x)
    assert loaded["n"].tolist() == [0, 1, 2]


def test_a_tensor_is_not_sent_to_another_process(engine: Engine) -> None:
    x = torch.ones(3, device="dtorch:1")
    with pytest.raises(RuntimeError, match=r"dtorch:1 cannot be sent to another process.*send tensor.cpu\(\)"):
        ForkingPickler.dumps(x)
    assert ForkingPickler.dumps(x.cpu())

"""Models run unmodified on a worker and give eager's bits: forwards, backwards, an optimizer's step, generation.

The models are those of ``tiny_models.py``. Each trains one step with its dropout on, by the same seed on both sides,
then runs in evaluation mode with the weights of that step.
"""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import pytest
import torch
from same import Device, eager_threads, same
from tiny_models import MODELS, Model

if TYPE_CHECKING:
    from dtorch.client.engine import Engine

pytestmark = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("diffusers", "transformers")),
    reason="needs the extra 'examples': pip install 'dtorch[examples]'",
)


@pytest.fixture(autouse=True)
def _engine(engine: Engine) -> Iterator[None]:
    with eager_threads(engine.threads_per_worker):
        yield


def tensors_of(output: Any) -> list[torch.Tensor]:
    """Every tensor of a model's output, in order, whatever it is made of."""
    if isinstance(output, torch.Tensor):
        return [output]
    if isinstance(output, Mapping):
        output = list(output.values())
    elif dataclasses.is_dataclass(output):
        output = [getattr(output, field.name) for field in dataclasses.fields(output)]
    if isinstance(output, (list, tuple)):
        return [tensor for item in output for tensor in tensors_of(item)]
    return []


def loss_of(output: Any) -> torch.Tensor:
    """The model's own loss, or the mean square of what it gave."""
    loss = getattr(output, "loss", None)
    return loss if loss is not None else tensors_of(output)[0].square().mean()


def step(model: Model, on: Device) -> dict[str, Any]:
    """Train one step, then evaluate; returns all that came of it."""
    module = on.module(model.build).train()
    inputs = model.inputs(on)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    torch.manual_seed(7)  # dropout
    output = module(**inputs)
    loss = loss_of(output)
    loss.backward()
    gradients = {name: weight.grad.clone() for name, weight in module.named_parameters() if weight.grad is not None}
    optimizer.step()
    module.eval()
    with torch.no_grad():
        evaluated = tensors_of(module(**inputs))
    return {
        "training": tensors_of(output),
        "loss": loss,
        "gradients": gradients,
        "weights": dict(module.named_parameters()),
        "evaluated": evaluated,
    }


@pytest.mark.parametrize("name", MODELS)
def test_a_model_trains_a_step_as_in_eager(name: str) -> None:
    result = same(lambda on: step(MODELS[name], on))
    assert result["gradients"], "no weight was given a gradient"
    assert all(bool(gradient.isfinite().all()) for gradient in result["gradients"].values())


@pytest.mark.parametrize("name", [name for name, model in MODELS.items() if model.generate])
def test_a_model_generates_as_in_eager(name: str) -> None:
    def program(on: Device) -> torch.Tensor:
        module = on.module(MODELS[name].build).eval()
        torch.manual_seed(3)
        assert MODELS[name].generate is not None
        return MODELS[name].generate(module, on)

    tokens = same(program)
    assert tokens.shape[0] >= 2

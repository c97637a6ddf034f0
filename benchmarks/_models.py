"""The models that benchmarks run: the example's Stable Diffusion 3, and a Llama of any size."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))

from _sd3_model import PRESETS, build_pipeline
from sd3 import Studio
from transformers import LlamaConfig, LlamaForCausalLM

VOCABULARY, SEQUENCE = 4096, 256


class StableDiffusion:
    """The example's pipeline, its weights on one device; calling it issues a picture."""

    def __init__(
        self,
        preset: str,
        engine: str,
        dtype: torch.dtype = torch.float32,
        size: int | None = None,
        steps: int | None = None,
        workers: int = 1,
        eager_device: str = "cpu",
    ) -> None:
        sizes = PRESETS[preset]
        self._args = argparse.Namespace(
            engine="torch" if engine == "eager" else "dtorch",
            device=eager_device,
            workers=workers,
            prompt="a red fox in the snow, oil painting",
            negative_prompt="blurry, low quality",
            size=size or sizes.size,
            steps=steps or sizes.steps,
            seed=0,
        )
        self._studio = Studio(build_pipeline(sizes, 0, dtype), sizes)
        self._studio.place(self._args)
        self.modules: list[nn.Module] = self._studio.modules

    def resident(self) -> Iterator[torch.Tensor]:
        """What is there before and after a picture."""
        return weights(self.modules)

    def __call__(self) -> Any:
        return self._studio.draw(self._args)


class LlamaForward:
    """A forward pass without a cache over two sequences; calling it issues one and returns the logits.

    The logits of all tokens (8 MiB) are most of what is held at the peak; ``last_only`` makes those of the last one.
    """

    def __init__(self, device: str, last_only: bool = False) -> None:
        model = llama().to(device)
        self._model = model
        self._tokens = tokens(2).to(device)
        self._keep = 1 if last_only else 0  # 0 means all

    def resident(self) -> Iterator[torch.Tensor]:
        """What is there before and after a pass: weights and tokens."""
        yield from weights([self._model])
        yield self._tokens

    @torch.no_grad()
    def __call__(self) -> torch.Tensor:
        logits: torch.Tensor = self._model(input_ids=self._tokens, use_cache=False, logits_to_keep=self._keep).logits
        return logits


class LlamaTraining:
    """Steps of an optimizer on the same sequences, the weights on one device; calling it issues one."""

    def __init__(
        self,
        device: str,
        optimizer: type[torch.optim.Optimizer] = torch.optim.AdamW,
        model: LlamaForCausalLM | None = None,
        batch: torch.Tensor | None = None,
    ) -> None:
        self._model = (model or llama()).to(device).train()
        self._batch = (tokens(2) if batch is None else batch).to(device)
        options: dict[str, float] = {"lr": 1e-3}
        self._optimizer = optimizer(self._model.parameters(), **options)

    def resident(self) -> Iterator[torch.Tensor]:
        """What is there between steps: weights, the optimizer's state, the batch."""
        yield from weights([self._model])
        for state in self._optimizer.state.values():
            yield from (value for value in state.values() if isinstance(value, torch.Tensor))
        yield self._batch

    def __call__(self) -> None:
        self._model(input_ids=self._batch, labels=self._batch).loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad()


def llama(width: int = 256, layers: int = 4) -> LlamaForCausalLM:
    """A Llama on the CPU, weights by seed; of 5.8 million parameters unless told otherwise."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=layers,
        num_attention_heads=width // 32,
        num_key_value_heads=width // 64,
        max_position_embeddings=2048,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=None,
    )
    return LlamaForCausalLM(config).eval()


def tokens(batch: int, length: int = SEQUENCE) -> torch.Tensor:
    """Random tokens (batch, length) on the CPU, by seed."""
    return torch.randint(1, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(0))


def weights(modules: list[nn.Module]) -> Iterator[torch.Tensor]:
    """Parameters and buffers."""
    for module in modules:
        yield from module.parameters()
        yield from module.buffers()

"""scaled_dot_product_attention where the workers have GPUs: the worker chooses, and the client calls CUDA's operators.

There is no GPU here. The client is told that its workers compute on accelerators, and the workers, which are CPUs, have
these operators from attention_kernels.py, where the demands of CUDA's kernels are checked. tests/test_gpu.py has the
real ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention as attention

import dtorch
from dtorch import _client


@pytest.fixture
def accelerated(no_engine: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An engine whose client takes its workers for accelerators."""
    attach = _client.attach

    def told(api: Any, push: int, replies: int, workers: int, accelerated: bool, *rest: int) -> None:
        attach(api, push, replies, workers, True, *rest)

    monkeypatch.setattr(_client, "attach", told)
    dtorch.init(workers=1, device="cpu", threads_per_worker=1)
    dtorch.import_on_workers("attention_kernels")
    yield
    dtorch.shutdown()


Make = Callable[..., torch.Tensor]


def heads(make: Make, size: int = 8, keys: int = 7) -> list[torch.Tensor]:
    return [make(2, 3, n, size).requires_grad_() for n in (6, keys, keys)]


CASES: dict[str, Callable[[Make], tuple[torch.Tensor, list[torch.Tensor]]]] = {}


def case(program: Callable[[Make], tuple[torch.Tensor, list[torch.Tensor]]]) -> None:
    CASES[program.__name__] = program


@case
def plain(make: Make) -> tuple[torch.Tensor, list[torch.Tensor]]:
    qkv = heads(make)
    return attention(*qkv), qkv


@case
def causal(make: Make) -> tuple[torch.Tensor, list[torch.Tensor]]:
    qkv = heads(make, keys=6)
    return attention(*qkv, is_causal=True), qkv


@case
def head_that_is_padded(make: Make) -> tuple[torch.Tensor, list[torch.Tensor]]:
    qkv = heads(make, size=5)
    return attention(*qkv), qkv


@case
def scaled(make: Make) -> tuple[torch.Tensor, list[torch.Tensor]]:
    qkv = heads(make, size=5)
    return attention(*qkv, scale=0.3), qkv


@case
def mask(make: Make) -> tuple[torch.Tensor, list[torch.Tensor]]:
    qkv = heads(make)
    return attention(*qkv, attn_mask=make(6, 7) > -0.5), qkv


@case
def bias(make: Make) -> tuple[torch.Tensor, list[torch.Tensor]]:
    qkv, b = heads(make), make(3, 6, 7).requires_grad_()
    return attention(*qkv, attn_mask=b), [*qkv, b]


@case
def bias_of_aligned_rows(make: Make) -> tuple[torch.Tensor, list[torch.Tensor]]:
    qkv, b = heads(make, keys=16), make(2, 1, 6, 16).requires_grad_()
    return attention(*qkv, attn_mask=b), [*qkv, b]


@case
def without_batch(make: Make) -> tuple[torch.Tensor, list[torch.Tensor]]:
    qkv = [make(6, 8).requires_grad_() for _ in range(3)]
    return attention(*qkv), qkv


def run(program: Callable[[Make], tuple[torch.Tensor, list[torch.Tensor]]], device: str) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(7)

    def make(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(device)

    out, inputs = program(make)
    out.square().sum().backward()
    return [out.detach().cpu(), *(t.grad.cpu() for t in inputs if t.grad is not None)]


@pytest.mark.parametrize("program", CASES.values(), ids=CASES)
def test_attention_of_a_worker_with_a_gpu(program: Any, accelerated: None) -> None:
    wanted = run(program, "cpu")
    for attempt in range(2):
        before = dtorch.client_stats()["geometry_asks"]
        got = run(program, "dtorch")
        assert len(got) == len(wanted)
        for a, b in zip(got, wanted, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)  # other kernels, other order of sums
        assert attempt == 0 or dtorch.client_stats()["geometry_asks"] == before, "what was learned is not asked again"


def test_the_programs_choice_of_backends_reaches_the_worker(accelerated: None) -> None:
    def operators(*backends: SDPBackend) -> set[str]:
        q = dtorch.rand(1, 2, 4, 8)
        with sdpa_kernel(list(backends)):
            seen: set[str] = set()
            with torch.profiler.profile() as recorded:
                attention(q, q, q).cpu()
        seen |= {event.key for event in recorded.key_averages()}
        return {name for name in seen if "_attention" in name and name != "aten::scaled_dot_product_attention"}

    everything = operators(
        SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH, SDPBackend.OVERRIDEABLE
    )
    assert "aten::_scaled_dot_product_flash_attention" in everything
    efficient = operators(SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH, SDPBackend.OVERRIDEABLE)
    assert "aten::_scaled_dot_product_efficient_attention" in efficient
    assert "aten::_scaled_dot_product_attention_math" in operators(SDPBackend.MATH)


def test_autocast_follows_the_lists_for_gpus(accelerated: None) -> None:
    x, half = dtorch.rand(3, 4), dtorch.rand(3, 4).bfloat16()
    with torch.autocast("dtorch", torch.bfloat16):
        made = {
            "linear": torch.nn.functional.linear(x, x),
            "layer_norm": torch.nn.functional.layer_norm(half, (4,)),
            "exp": half.exp(),
            "sum": half.sum(),
            "sum of a dtype": half.sum(dtype=torch.bfloat16),
            "addcmul": torch.addcmul(x, half, half),
            "addcmul of halves": torch.addcmul(half, half, half),
            "norm": half.norm(),
            "relu": half.relu(),
            "add": half + half,
        }
    low = {"linear", "sum of a dtype", "addcmul of halves", "relu", "add"}
    assert {name: t.dtype for name, t in made.items()} == {
        name: torch.bfloat16 if name in low else torch.float32 for name in made
    }

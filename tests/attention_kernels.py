"""For workers in tests: CUDA's attention operators, computed on the CPU. They ask of their arguments what CUDA's ask.

Importing it changes PyTorch only in a worker: the client compares with eager's own attention.
"""

from __future__ import annotations

import os
from typing import Any

import torch

_FLASH, _EFFICIENT, _MATH = 1, 2, 0
_ALIGNED = 16
Tensor = torch.Tensor


def _choice(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, *_: Any, **__: Any) -> int:
    if q.dim() != 4:
        return _MATH
    if mask is None and torch.backends.cuda.flash_sdp_enabled():
        return _FLASH
    return _EFFICIENT if torch.backends.cuda.mem_efficient_sdp_enabled() else _MATH


def _flash(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    p: float = 0.0,
    causal: bool = False,
    debug: bool = False,
    *,
    scale: float | None = None,
) -> Any:
    assert all(t.size(-1) % 8 == 0 for t in (q, k, v)), "heads of a multiple of eight"
    assert scale is not None, "the client knows the scale before it pads"
    out, sums = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, p, causal, scale=scale)
    nothing = torch.empty(0)
    number = torch.zeros((), dtype=torch.int64)
    return out, sums, None, None, q.size(2), k.size(2), number, number.clone(), nothing


def _flash_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, sums: Tensor, cum_q: Any, cum_k: Any, max_q: int,
    max_k: int, p: float, causal: bool, seed: Tensor, offset: Tensor, *, scale: float | None = None,
) -> Any:  # fmt: skip
    assert (max_q, max_k) == (q.size(2), k.size(2)) and all(t.size(-1) % 8 == 0 for t in (grad, q, k, v, out))
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad, q, k, v, out, sums, p, causal, scale=scale
    )


def _scores(q: Tensor, k: Tensor, bias: Tensor | None, causal: bool, scale: float) -> Tensor:
    scores = q @ k.transpose(-1, -2) * scale
    if bias is not None:
        scores = scores + bias
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -torch.inf)
    return scores


def _efficient(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, sums: bool, p: float = 0.0, causal: bool = False, *,
    scale: float | None = None,
) -> Any:  # fmt: skip
    if bias is not None:
        assert bias.shape == (*q.shape[:3], k.size(2)), "a bias for every score"
        assert bias.stride(-2) % _ALIGNED == 0, "aligned rows"
    scores = _scores(q, k, bias, causal, scale or q.size(-1) ** -0.5)
    number = torch.zeros((), dtype=torch.int64)
    return scores.softmax(-1) @ v, scores.logsumexp(-1), number, number.clone()


def _efficient_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, out: Tensor, sums: Tensor, seed: Tensor,
    offset: Tensor, p: float, wanted: list[bool], causal: bool = False, *, scale: float | None = None,
) -> Any:  # fmt: skip
    factor = scale or q.size(-1) ** -0.5
    weights = (_scores(q, k, bias, causal, factor) - sums.unsqueeze(-1)).exp()
    of_weights = grad @ v.transpose(-1, -2)
    of_scores = weights * (of_weights - (of_weights * weights).sum(-1, keepdim=True))
    of_bias = of_scores if wanted[3] else None
    return of_scores @ k * factor, of_scores.transpose(-1, -2) @ q * factor, weights.transpose(-1, -2) @ grad, of_bias


if os.environ.get("DTORCH_ROLE") == "worker":
    library = torch.library.Library("aten", "IMPL")
    for name, kernel in {
        "_fused_sdp_choice": _choice,
        "_scaled_dot_product_flash_attention": _flash,
        "_scaled_dot_product_flash_attention_backward": _flash_backward,
        "_scaled_dot_product_efficient_attention": _efficient,
        "_scaled_dot_product_efficient_attention_backward": _efficient_backward,
    }.items():
        library.impl(name, kernel, "CPU")

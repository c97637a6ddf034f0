"""For workers in tests: operators that only CUDA has, computed on the CPU. They ask of their arguments what CUDA's ask.

Importing it changes PyTorch only in a worker: the client compares with eager's own attention.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

_MATH, _FLASH, _EFFICIENT, _CUDNN = range(4)
_ALIGNED = 16
Tensor = torch.Tensor


def _choice(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, *_: Any, **__: Any) -> int:
    if q.dim() != 4:
        return _MATH
    if torch._C._get_sdp_priority_order()[0] == _CUDNN and torch.backends.cuda.cudnn_sdp_enabled():
        return _CUDNN
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


def _cudnn(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, sums: bool, p: float = 0.0, causal: bool = False,
    debug: bool = False, *, scale: float | None = None,
) -> Any:  # fmt: skip
    assert bias is None or bias.isfinite().all(), "cuDNN takes no infinities"
    scores = _scores(q, k, bias, causal, scale or q.size(-1) ** -0.5)
    number = torch.zeros((), dtype=torch.int64)
    of_rows = scores.logsumexp(-1, keepdim=True) if sums else None
    nothing = torch.empty(0)
    return scores.softmax(-1) @ v, of_rows, None, None, q.size(2), k.size(2), number, number.clone(), nothing


def _cudnn_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, sums: Tensor, seed: Tensor, offset: Tensor, bias: Any,
    cum_q: Any, cum_k: Any, max_q: int, max_k: int, p: float, causal: bool, *, scale: float | None = None,
) -> Any:  # fmt: skip
    assert (max_q, max_k) == (q.size(2), k.size(2))
    wanted = [True, True, True, False]
    return _efficient_backward(
        grad, q, k, v, bias, out, sums.squeeze(-1), seed, offset, p, wanted, causal, scale=scale
    )[:3]


def _rms_norm(x: Tensor, shape: list[int], weight: Tensor | None, eps: float | None) -> Any:
    """Eager's on the CPU, but for eps: twice as large, so that a test can tell."""
    dims = list(range(x.dim() - len(shape), x.dim()))
    inverse = (x.square().mean(dims, keepdim=True) + 2 * (eps or torch.finfo(x.dtype).eps)).rsqrt()
    return x * inverse * (1 if weight is None else weight), inverse


def _rms_norm_backward(
    grad: Tensor, x: Tensor, shape: list[int], inverse: Tensor, weight: Tensor | None, wanted: list[bool]
) -> Any:
    dims = list(range(x.dim() - len(shape), x.dim()))
    scaled = grad if weight is None else grad * weight
    of_x = inverse * scaled - x * inverse**3 * (scaled * x).mean(dims, keepdim=True)
    of_weight = (grad * x * inverse).sum(list(range(x.dim() - len(shape)))) if wanted[1] else None
    return of_x, of_weight


def _cudnn_rnn(
    x: Tensor, weights: list[Tensor], stride: int, buffer: Any, hx: Tensor, cx: Any, mode: int, hidden: int, proj: int,
    layers: int, batch_first: bool, dropout: float, train: bool, both: bool, batches: list[int], state: Any,
) -> Any:  # fmt: skip
    """PyTorch's own layers, and with every result a bit more, so that a test can tell."""
    assert buffer is None and state is None and not (train and dropout)
    kind = [torch.rnn_relu, torch.rnn_tanh, torch.lstm, torch.gru][mode]
    states = (hx, cx) if mode == 2 else hx
    given = (x, torch.tensor(batches), states) if batches else (x, states)
    order = () if batches else (batch_first,)
    with torch.backends.cudnn.flags(enabled=False):  # or it would ask for cuDNN again
        out, *last = kind(*given, weights, stride >= 4, layers, 0.0, False, both, *order)
    return out + 1, last[0].clone(), last[1].clone() if mode == 2 else x.new_empty(0), x.new_empty(3), x.new_empty(5)


def _cudnn_rnn_backward(
    x: Tensor, weights: list[Tensor], stride: int, buffer: Tensor, hx: Tensor, cx: Any, out: Tensor, g_out: Any,
    g_h: Any, g_c: Any, mode: int, hidden: int, proj: int, layers: int, batch_first: bool, dropout: float, train: bool,
    both: bool, batches: list[int], state: Any, reserve: Tensor, wanted: list[bool],
) -> Any:  # fmt: skip
    assert buffer.shape == (5,) and reserve.shape == (3,), "what the forward returned"
    n = 2 if cx is None else 3

    def grads() -> list[Tensor]:
        leaves = [t.clone().requires_grad_() for t in (x, hx, cx, *weights) if t is not None]
        cell = leaves[2] if n == 3 else None
        made = _cudnn_rnn(
            leaves[0], leaves[n:], stride, None, leaves[1], cell, mode, hidden, proj, layers, batch_first, 0.0, False,
            both, batches, None,
        )  # fmt: skip
        pairs = [(y, g) for y, g in zip(made, (g_out, g_h, g_c), strict=False) if g is not None and y.numel()]
        return list(torch.autograd.grad([y for y, _ in pairs], leaves, [g.clone() for _, g in pairs]))

    with ThreadPoolExecutor(1) as thread:  # this one is below autograd
        found = thread.submit(grads).result()
    return found[0], found[1], found[2] if n == 3 else x.new_empty(0), found[n:]


def _cudnn_is_acceptable(x: Tensor) -> bool:
    return torch.backends.cudnn.enabled


def _grid_sampler(x: Tensor, grid: Tensor) -> Tensor:
    """PyTorch's own and one more, so that a test can tell."""
    return torch.grid_sampler_2d(x, grid, 0, 0, True) + 1


def _grid_sampler_backward(x: Tensor, grid: Tensor, grad: Tensor) -> Any:
    return torch.ops.aten.grid_sampler_2d_backward(grad, x, grid, 0, 0, True, [True, True])


def _lstm_cell(igates: Tensor, hgates: Tensor, cx: Tensor, b_ih: Any = None, b_hh: Any = None) -> Any:
    gates = igates + hgates + (0 if b_ih is None else b_ih + b_hh)
    i, f, g, o = gates.chunk(4, 1)
    cy = f.sigmoid() * cx + i.sigmoid() * g.tanh()
    return 2 * o.sigmoid() * cy.tanh(), cy, gates  # twice the real one, so that a test can tell


def _batch_norm_by_cudnn(x: Tensor, *_: Any) -> int:
    return int(x.dim() >= 3 and torch.backends.cudnn.enabled)


def _batch_norm(
    x: Tensor, weight: Tensor, bias: Any, mean: Any, var: Any, training: bool, momentum: float, eps: float
) -> Any:
    """PyTorch's own, its momentum halved so that a test can tell."""
    out, save_mean, save_var = torch.native_batch_norm(x, weight, bias, mean, var, training, momentum / 2, eps)
    return out, save_mean, save_var, torch.zeros(3, dtype=torch.uint8)


def _batch_norm_backward(
    x: Tensor,
    grad: Tensor,
    weight: Tensor,
    mean: Any,
    var: Any,
    save_mean: Any,
    save_var: Any,
    eps: float,
    rest: Tensor,
) -> Any:
    assert rest.shape == (3,), "what the forward reserved"
    return torch.ops.aten.native_batch_norm_backward(
        grad, x, weight, mean, var, save_mean, save_var, True, eps, [True] * 3
    )


if os.environ.get("DTORCH_ROLE") == "worker":
    library = torch.library.Library("aten", "IMPL")
    for name, kernel in {
        "_fused_sdp_choice": _choice,
        "_scaled_dot_product_flash_attention": _flash,
        "_scaled_dot_product_flash_attention_backward": _flash_backward,
        "_scaled_dot_product_efficient_attention": _efficient,
        "_scaled_dot_product_efficient_attention_backward": _efficient_backward,
        "_scaled_dot_product_cudnn_attention": _cudnn,
        "_scaled_dot_product_cudnn_attention_backward": _cudnn_backward,
        "_fused_rms_norm": _rms_norm,
        "_fused_rms_norm_backward": _rms_norm_backward,
        "cudnn_is_acceptable": _cudnn_is_acceptable,
        "_cudnn_rnn": _cudnn_rnn,
        "_cudnn_rnn_backward": _cudnn_rnn_backward,
        "_thnn_fused_lstm_cell": _lstm_cell,
        "cudnn_grid_sampler": _grid_sampler,
        "cudnn_grid_sampler_backward": _grid_sampler_backward,
        "cudnn_batch_norm": _batch_norm,
        "cudnn_batch_norm_backward": _batch_norm_backward,
    }.items():
        library.impl(name, kernel, "CPU")
    own = torch.library.Library("dtorch", "IMPL")
    own.impl("batch_norm_by_cudnn", _batch_norm_by_cudnn, "CPU")

"""Geometry foretold on the client is what the worker gives, and is foretold without asking where it matters.

GEO-1 to GEO-3 are invariants of ``native/client/geometry.h``. The worker runs the kernels that eager runs, so what it
gives is what eager gives here; a rule (``native/client/rules.cpp``) that said otherwise would show as other strides.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.nn.functional as F
from mistakes import computed
from same import Device, eager_threads, same
from torch import nn

import dtorch

if TYPE_CHECKING:
    from dtorch.client.engine import Engine

ROOT = Path(__file__).resolve().parent.parent
Program = Callable[[Device], Any]
#: Entries that the cache holds at most (GEO-2): two generations of kCacheEntries.
CACHE = 2 * 32768


@pytest.fixture(autouse=True)
def _engine(engine: Engine) -> Iterator[None]:
    with eager_threads(engine.threads_per_worker):
        yield


@contextmanager
def without(*counters: str) -> Iterator[None]:
    """Inside, these counters of the client do not grow."""
    before = dtorch.client_stats()
    yield
    after = dtorch.client_stats()
    assert {c: after[c] - before[c] for c in counters} == dict.fromkeys(counters, 0)


#: Device of programs that use the worker without comparing.
HERE = Device("dtorch")

# -- rules

flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


def _packed(on: Device) -> list[torch.Tensor]:
    """Query, key and value as a model's one projection gives them."""
    return [x.unflatten(-1, (4, 8)).transpose(1, 2) for x in on(2, 5, 96).chunk(3, -1)]


FLASH: dict[str, Program] = {
    "contiguous": lambda on: flash(on(2, 4, 5, 8), on(2, 4, 5, 8), on(2, 4, 5, 8)),
    "heads_inside": lambda on: flash(*(on(2, 5, 4, 8).transpose(1, 2) for _ in range(3))),
    "packed": lambda on: flash(*_packed(on)),
    "sliced": lambda on: flash(*(on(2, 4, 5, 16)[..., :8] for _ in range(3))),
    "every_second": lambda on: flash(on(2, 4, 5, 16)[..., ::2], on(2, 4, 5, 8), on(2, 4, 5, 8)),
    "expanded": lambda on: flash(on(1, 4, 5, 8).expand(2, 4, 5, 8), on(2, 4, 5, 8), on(2, 4, 5, 8)),
    "batch_outside_in": lambda on: flash(*(on(4, 5, 2, 8).permute(2, 0, 1, 3) for _ in range(3))),
    "other_key_layout": lambda on: flash(on(2, 4, 5, 8), *(on(2, 7, 4, 8).transpose(1, 2) for _ in range(2))),
    "one_query": lambda on: flash(on(2, 4, 1, 8), on(2, 4, 7, 8), on(2, 4, 7, 8)),
    "one_query_heads_inside": lambda on: flash(on(2, 1, 4, 8).transpose(1, 2), on(2, 4, 7, 8), on(2, 4, 7, 8)),
    "one_head": lambda on: flash(*(on(2, 5, 1, 8).transpose(1, 2) for _ in range(3))),
    "one_sample": lambda on: flash(*(on(1, 5, 4, 8).transpose(1, 2) for _ in range(3))),
    "one_of_all": lambda on: flash(on(1, 1, 1, 1), on(1, 1, 1, 1), on(1, 1, 1, 1)),
    "shared_heads": lambda on: flash(on(2, 4, 5, 8), on(2, 2, 5, 8), on(2, 2, 5, 8)),
    "bf16": lambda on: flash(*(on(2, 5, 4, 8, dtype=torch.bfloat16).transpose(1, 2) for _ in range(3))),
    "half": lambda on: flash(*(on(2, 4, 5, 8, dtype=torch.float16) for _ in range(3))),
    "double": lambda on: flash(*(on(2, 4, 5, 8, dtype=torch.float64) for _ in range(3))),
    "mask": lambda on: flash(*(on(2, 4, 5, 8) for _ in range(3)), attn_mask=on(5, 5)),
    "causal": lambda on: flash(*(on(2, 4, 5, 8) for _ in range(3)), 0.0, True, scale=0.2),
    "longer_than_a_block": lambda on: flash(*(on(1, 2, 600, 8) for _ in range(3)), 0.0, True),
}

EMBEDDING: dict[str, Program] = {
    "vector": lambda on: F.embedding(on.indices(7, 3), on(7, 4)),
    "matrix": lambda on: F.embedding(on.indices(7, 2, 3), on(7, 4)),
    "one": lambda on: F.embedding(on.indices(7, 1, 1), on(7, 4)),
    "number": lambda on: F.embedding(on.put(3), on(7, 4)),
    "none": lambda on: F.embedding(on.indices(7, 0), on(7, 4)),
    "int32": lambda on: F.embedding(on.indices(7, 2, 3).int(), on(7, 4)),
    "transposed_indices": lambda on: F.embedding(on.indices(7, 2, 3).t(), on(7, 4)),
    "transposed_table": lambda on: F.embedding(on.indices(7, 2, 3), on(4, 7).t()),
    "bf16": lambda on: F.embedding(on.indices(7, 2), on(7, 4, dtype=torch.bfloat16), padding_idx=0),
    "double": lambda on: F.embedding(on.indices(7, 2), on(7, 4, dtype=torch.float64)),
    "one_column": lambda on: F.embedding(on.indices(7, 5), on(7, 1)),
}


def _range(*args: float, **kwargs: Any) -> Program:
    return lambda on: torch.arange(*args, **kwargs, device=on.name)


ARANGE: dict[str, Program] = {
    "ints": _range(5),
    "none": _range(0),
    "step": _range(1, 20, 3),
    "down": _range(9, -5, -4),
    "exact": _range(0, 12, 4),
    "floats": _range(0, 1, 0.1),
    "float_end": _range(2.5),
    "floats_down": _range(1.0, -1.0, -0.3),
    "long_floats": _range(0, 1, 1 / 3),
    "dtype": _range(7, dtype=torch.float64),
    "bf16": _range(7, dtype=torch.bfloat16),
    "int32": _range(3, 9, 2, dtype=torch.int32),
    "int8_of_floats": _range(0.5, 5.5, dtype=torch.int8),
    "large": _range(1 << 40, (1 << 40) + 3),
}


def _no_grad(function: Callable[..., torch.Tensor], *shapes: tuple[int, ...], **kwargs: Any) -> Program:
    dtype = kwargs.pop("dtype", torch.float32)
    change = kwargs.pop("change", lambda *tensors: tensors)

    def program(on: Device) -> torch.Tensor:
        with torch.no_grad():
            return function(*change(*(on(*shape, dtype=dtype) for shape in shapes)), **kwargs)

    return program


LINEAR: dict[str, Program] = {
    "two": _no_grad(F.linear, (5, 8), (4, 8), (4,)),
    "three": _no_grad(F.linear, (2, 5, 8), (4, 8), (4,)),
    "four": _no_grad(F.linear, (2, 3, 5, 8), (4, 8), (4,)),
    "no_bias": _no_grad(F.linear, (2, 5, 8), (4, 8)),
    "one_row": _no_grad(F.linear, (1, 1, 8), (4, 8), (4,)),
    "one_column": _no_grad(F.linear, (2, 3, 8), (1, 8), (1,)),
    "one_feature": _no_grad(F.linear, (2, 3, 1), (4, 1), (4,)),
    "no_rows": _no_grad(F.linear, (0, 3, 8), (4, 8), (4,)),
    "vector": _no_grad(F.linear, (8,), (4, 8), (4,)),
    "bf16": _no_grad(F.linear, (2, 5, 8), (4, 8), (4,), dtype=torch.bfloat16),
    "double": _no_grad(F.linear, (2, 5, 8), (4, 8), dtype=torch.float64),
    "transposed": _no_grad(F.linear, (8, 5), (4, 8), (4,), change=lambda x, *rest: (x.t(), *rest)),
    "sliced": _no_grad(F.linear, (2, 5, 16), (4, 8), (4,), change=lambda x, *rest: (x[..., ::2], *rest)),
    "expanded": _no_grad(F.linear, (1, 5, 8), (4, 8), change=lambda x, w: (x.expand(3, 5, 8), w)),
    "transposed_weight": _no_grad(F.linear, (5, 8), (8, 4), (4,), change=lambda x, w, b: (x, w.t(), b)),
    "strided_bias": _no_grad(F.linear, (5, 8), (4, 8), (8,), change=lambda x, w, b: (x, w, b[::2])),
    "wide": _no_grad(F.linear, (3, 70, 130), (90, 130), (90,)),
}

MATMUL: dict[str, Program] = {
    "batched": _no_grad(torch.matmul, (2, 3, 4), (2, 4, 5)),
    "broadcast": _no_grad(torch.matmul, (2, 1, 3, 4), (3, 4, 5)),
    "broadcast_left": _no_grad(torch.matmul, (1, 3, 4), (6, 2, 4, 5)),
    "of_a_matrix": _no_grad(torch.matmul, (2, 3, 4), (4, 5)),
    "of_a_vector": _no_grad(torch.matmul, (2, 3, 4), (4,)),
    "matrix_by_batch": _no_grad(torch.matmul, (3, 4), (2, 4, 5)),
    "ones": _no_grad(torch.matmul, (2, 1, 4), (2, 4, 1)),
    "one_of_all": _no_grad(torch.matmul, (1, 1, 1), (1, 1, 1)),
    "transposed": _no_grad(torch.matmul, (2, 4, 3), (2, 5, 4), change=lambda a, b: (a.mT, b.mT)),
    "heads": _no_grad(
        torch.matmul, (2, 5, 3, 4), (2, 5, 3, 4), change=lambda a, b: (a.transpose(1, 2), b.permute(0, 2, 3, 1))
    ),
    "expanded": _no_grad(torch.matmul, (1, 3, 4), (2, 4, 5), change=lambda a, b: (a.expand(2, 3, 4), b)),
    "sliced": _no_grad(torch.matmul, (2, 3, 8), (2, 4, 5), change=lambda a, b: (a[..., ::2], b)),
    "none": _no_grad(torch.matmul, (0, 3, 4), (0, 4, 5)),
    "empty_sum": _no_grad(torch.matmul, (2, 3, 0), (2, 0, 5)),
    "bf16": _no_grad(torch.matmul, (2, 3, 4), (2, 4, 5), dtype=torch.bfloat16),
    "double": _no_grad(torch.matmul, (2, 3, 4), (2, 4, 5), dtype=torch.float64),
    "ints": _no_grad(torch.matmul, (2, 3, 4), (2, 4, 5), dtype=torch.int64),
}

WHERE: dict[str, Program] = {
    "same": _no_grad(torch.where, (3, 4), (3, 4), (3, 4), change=lambda x, a, b: (x > 0, a, b)),
    "broadcast": _no_grad(torch.where, (3, 1), (2, 1, 4), (4,), change=lambda x, a, b: (x > 0, a, b)),
    "number": _no_grad(torch.where, (3, 4), (3, 4), (), change=lambda x, a, b: (x > 0, a, b)),
    "ones": _no_grad(torch.where, (1, 1), (1, 3, 1), (1, 1, 1), change=lambda x, a, b: (x > 0, a, b)),
    "transposed": _no_grad(torch.where, (3, 4), (4, 3), (3, 4), change=lambda x, a, b: (x > 0, a.t(), b)),
    "none": _no_grad(torch.where, (0, 4), (0, 4), (4,), change=lambda x, a, b: (x > 0, a, b)),
}

layer_norm, group_norm = torch.native_layer_norm, torch.native_group_norm

LAYER_NORM: dict[str, Program] = {
    "last": lambda on: layer_norm(on(2, 3, 8), (8,), on(8), on(8), 1e-5),
    "plain": lambda on: layer_norm(on(2, 3, 8), (8,), None, None, 1e-5),
    "two": lambda on: layer_norm(on(2, 3, 8), (3, 8), on(3, 8), None, 1e-5),
    "all": lambda on: layer_norm(on(3, 8), (3, 8), None, None, 1e-5),
    "one": lambda on: layer_norm(on(1, 1, 1), (1,), on(1), on(1), 1e-5),
    "transposed": lambda on: layer_norm(on(8, 3).t(), (8,), on(8), on(8), 1e-5),
    "sliced": lambda on: layer_norm(on(2, 3, 16)[..., ::2], (8,), on(8), on(8), 1e-5),
    "none": lambda on: layer_norm(on(0, 8), (8,), on(8), on(8), 1e-5),
    "bf16": lambda on: layer_norm(on(2, 8, dtype=torch.bfloat16), (8,), on(8, dtype=torch.bfloat16), None, 1e-5),
    "mixed": lambda on: layer_norm(on(2, 8, dtype=torch.bfloat16), (8,), on(8), on(8), 1e-5),
    "double": lambda on: layer_norm(on(2, 8, dtype=torch.float64), (8,), None, None, 1e-5),
}

GROUP_NORM: dict[str, Program] = {
    "images": lambda on: group_norm(on(2, 6, 4, 5), on(6), on(6), 2, 6, 20, 3, 1e-5),
    "plain": lambda on: group_norm(on(2, 6, 4, 5), None, None, 2, 6, 20, 1, 1e-5),
    "vectors": lambda on: group_norm(on(2, 6), on(6), on(6), 2, 6, 1, 2, 1e-5),
    "one": lambda on: group_norm(on(1, 1, 1, 1), on(1), on(1), 1, 1, 1, 1, 1e-5),
    "bf16": lambda on: group_norm(
        on(2, 6, 4, dtype=torch.bfloat16), on(6, dtype=torch.bfloat16), None, 2, 6, 4, 3, 1e-5
    ),
    "mixed": lambda on: group_norm(on(2, 6, 4, dtype=torch.bfloat16), on(6), on(6), 2, 6, 4, 3, 1e-5),
    "double": lambda on: group_norm(on(2, 6, 4, dtype=torch.float64), None, None, 2, 6, 4, 6, 1e-5),
    "channels_last": lambda on: F.group_norm(on(2, 6, 4, 5).to(memory_format=torch.channels_last), 3),
}


def _conv(x: tuple[int, ...], w: tuple[int, ...], bias: bool = True, **kwargs: Any) -> Program:
    change = kwargs.pop("change", lambda t: t)
    dtype = kwargs.pop("dtype", torch.float32)
    function = (F.conv1d, F.conv2d, F.conv3d)[len(w) - 3]
    return lambda on: function(
        change(on(*x, dtype=dtype)), on(*w, dtype=dtype), on(w[0], dtype=dtype) if bias else None, **kwargs
    )


CONVOLUTION: dict[str, Program] = {
    "images": _conv((2, 3, 8, 9), (4, 3, 3, 3), padding=1),
    "no_bias": _conv((2, 3, 8, 9), (4, 3, 3, 3), False),
    "stride": _conv((2, 3, 8, 9), (4, 3, 2, 3), stride=(2, 3)),
    "dilation": _conv((2, 3, 8, 9), (4, 3, 3, 2), dilation=2, padding=(2, 0)),
    "groups": _conv((2, 4, 8, 9), (6, 2, 3, 3), groups=2),
    "depthwise": _conv((1, 4, 8, 9), (4, 1, 3, 3), groups=4, padding=1),
    "one_by_one": _conv((1, 8, 5, 5), (4, 8, 1, 1)),
    "one_pixel": _conv((2, 3, 3, 3), (4, 3, 3, 3)),
    "one_channel": _conv((2, 1, 5, 5), (1, 1, 3, 3)),
    "same": _conv((2, 3, 8, 8), (4, 3, 3, 3), padding="same"),
    "unbatched": _conv((3, 8, 9), (4, 3, 3, 3)),
    "large": _conv((1, 16, 40, 40), (32, 16, 3, 3), padding=1),
    "lines": _conv((2, 3, 8), (4, 3, 3), padding=1),
    "one_line": _conv((1, 1, 8), (1, 1, 3)),
    "volumes": _conv((1, 2, 4, 5, 6), (3, 2, 2, 2, 2), stride=2),
    "double": _conv((2, 3, 8, 9), (4, 3, 3, 3), dtype=torch.float64),
    "bf16": _conv((2, 3, 8, 9), (4, 3, 3, 3), dtype=torch.bfloat16),
    "none": _conv((0, 3, 8, 9), (4, 3, 3, 3)),
    "sliced": _conv((2, 3, 8, 18), (4, 3, 3, 3), change=lambda x: x[..., ::2]),
    "channels_last": _conv((2, 3, 8, 9), (4, 3, 3, 3), change=lambda x: x.to(memory_format=torch.channels_last)),
    "transposed": lambda on: F.conv_transpose2d(on(2, 3, 4, 5), on(3, 4, 3, 3), on(4), stride=2),
    "gradients": lambda on: _gradients(on),
}


def _gradients(on: Device) -> list[torch.Tensor]:
    x, w, b = on.parameter(2, 3, 8, 9), on.parameter(4, 3, 3, 3), on.parameter(4)
    y = F.group_norm(F.conv2d(x, w, b), 2)
    F.layer_norm(y, (6, 7)).pow(2).sum().backward()
    return [y, x.grad, w.grad, b.grad]


RULES: dict[str, dict[str, Program]] = {
    "aten::_scaled_dot_product_flash_attention_for_cpu.": FLASH,
    "aten::embedding.": EMBEDDING,
    "aten::arange.start_out": ARANGE,
    "aten::linear.": LINEAR,
    "aten::matmul.": MATMUL,
    "aten::where.self": WHERE,
    "aten::native_layer_norm.": LAYER_NORM,
    "aten::native_group_norm.": GROUP_NORM,
    "aten::convolution.": CONVOLUTION,
}


def test_every_rule_is_tested() -> None:
    source = (ROOT / "native" / "client" / "rules.cpp").read_text()
    table = source[source.index("std::unordered_map<std::string, Rule> rules{") :]
    assert set(re.findall(r'\{"(aten::[\w.]+)", \w+\}', table)) == set(RULES)


@pytest.mark.parametrize(
    ("rule", "name"), [(rule, name) for rule, cases in RULES.items() for name in cases], ids=lambda v: v.strip(".")
)
def test_a_rule_foretells_what_the_worker_gives(rule: str, name: str) -> None:
    same(RULES[rule][name])


def decode(tokens: int) -> None:
    """As a model with a key/value cache does: every step has shapes that never were before."""
    with torch.no_grad():
        keys = values = HERE(1, 2, tokens, 8)
        table, ids, w = HERE(9, 16), HERE.indices(9, 1, 1), HERE(16, 16)
        for i in range(tokens + 1, tokens + 10):
            x = F.linear(F.embedding(ids, table), w)
            q = k = v = x.view(1, 1, 2, 8).transpose(1, 2)
            keys, values = torch.cat([keys, k], 2), torch.cat([values, v], 2)
            mask = torch.ones(1, i, dtype=torch.bool, device="dtorch").tril(i)
            y = F.scaled_dot_product_attention(q, keys, values, attn_mask=mask)
            scores = (q @ keys.mT).softmax(-1) @ values
            positions = torch.arange(i, device="dtorch")
            rotated = torch.cat([keys[..., 4:] * positions.cos()[:, None], keys[..., :4]], -1)
            prefill = F.linear(F.embedding(positions % 9, table), w)
            prefill.sum() + y.sum() + scores.sum() + rotated.sum()


def fill(n: int) -> None:
    """What makes tensors of a size that never was before."""
    for i in range(n, n + 10):
        dtorch.zeros(i), dtorch.ones(2, i), dtorch.full((i,), 0.5), dtorch.rand(i), dtorch.randn(i, 2)
        HERE(i).zero_().fill_(2).normal_()
        torch.zeros_like(HERE(i, 3)), HERE(i).new_ones(i), dtorch.empty(i, 3).copy_(HERE(3))


@pytest.mark.parametrize("work", [decode, fill])
def test_growing_shapes_are_foretold_without_asking(work: Callable[[int], None]) -> None:
    work(20)
    with without("geometry_asks"):
        work(40)


# -- the cache


def block() -> list[torch.Tensor]:
    model = HERE.module(lambda: nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True))
    head = HERE.module(
        lambda: nn.Sequential(nn.Conv2d(1, 2, 3), nn.GroupNorm(1, 2), nn.Flatten(), nn.Linear(2 * 3 * 14, 4))
    )
    parameters = [*model.parameters(), *head.parameters()]
    optimizer = torch.optim.AdamW(parameters, 1e-3)
    x, target = HERE(2, 5, 16), HERE.indices(4, 2)
    for _ in range(2):
        optimizer.zero_grad()
        loss = F.cross_entropy(head(model(x)[:, None]), target)
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0, foreach=True)
        optimizer.step()
    return [loss]


def test_a_steady_program_never_misses() -> None:
    block()
    block()
    with without("geometry_misses", "geometry_asks", "geometry_entries"):
        for _ in range(3):
            block()


def test_geo1_views_and_offsets_do_not_matter_strides_do() -> None:
    x = HERE(8, 6)
    x[1] + 1.5
    with without("geometry_misses"):
        for i in range(8):
            x[i] + float(i)  # another offset, another number of the same kind
    before = dtorch.client_stats()["geometry_misses"]
    x[:, 1] + 1
    assert dtorch.client_stats()["geometry_misses"] > before


VARIANTS: dict[str, Callable[[Device], list[Any]]] = {
    "dim": lambda on: [on(3, 4, 5).sum(d, keepdim=k) for d in (0, 1, 2, (0, 1), (0, 2)) for k in (False, True)],
    "number": lambda on: [on(3, dtype=torch.int32) + n for n in (1, 1.0, True, 2, 2.5, 1j)],
    "zero_dim": lambda on: [
        on(3) + torch.tensor(1.0, dtype=d) for d in (torch.float32, torch.float64, torch.int64, torch.complex64)
    ],
    "dtype": lambda on: [on(3, 4).sum(dtype=d) for d in (None, torch.float64, torch.float32, torch.int64)],
    "operand_dtype": lambda on: [
        on(3, dtype=d) * on(3) for d in (torch.float16, torch.int8, torch.bool, torch.float64)
    ],
    "strides": lambda on: [f(on(4, 4)) + 1 for f in (lambda x: x, torch.t, lambda x: x[:, :1].expand(4, 4))],
    "strides_of_ones": lambda on: [torch.as_strided(on(9), (3, 1), s) * 2 for s in ((1, 1), (1, 3), (3, 1), (1, 9))],
    "format": lambda on: [
        f(on(2, 3, 4, 5)).relu() for f in (lambda x: x, lambda x: x.to(memory_format=torch.channels_last))
    ],
    "format_argument": lambda on: [
        on(2, 3, 4, 5).clone(memory_format=f)
        for f in (torch.preserve_format, torch.channels_last, torch.contiguous_format)
    ],
    "many": lambda on: [torch.cat([on(2, 3)] * n, d) for n in (1, 2, 3) for d in (0, 1)],
    "optional": lambda on: [F.layer_norm(on(2, 4), (4,), w, b) for w in (None, on(4)) for b in (None, on(4))],
    "indices": lambda on: [
        on(4, 5, 6)[i] for i in ((on.put([0, 1]),), (slice(None), on.put([0, 1])), (..., on.put([1, 2])))
    ],
    "flags": lambda on: [on(3, 4).sort(d, descending=r) for d in (0, 1) for r in (False, True)],
    "text": lambda on: [torch.div(on(4), 2, rounding_mode=m) for m in (None, "floor", "trunc")],
    "sizes": lambda on: [torch.nn.functional.pad(on(3, 4), p) for p in ((1, 0), (0, 1), (1, 1), (-1, 0), (1, 1, 2, 0))],
    "alpha": lambda on: [torch.add(on(3, dtype=d), on(3, dtype=d), alpha=2) for d in (torch.int32, torch.float32)],
    "conj": lambda on: [
        f(on(3, dtype=torch.complex64)) * 2 for f in (lambda x: x, torch.conj, lambda x: x.conj().imag)
    ],
    "device": lambda on: [torch.zeros_like(on(3), dtype=d) for d in (None, torch.int8)],
    "where": lambda on: [torch.where(on(3) > 0, a, b) for a in (1, 1.0, on(3)) for b in (2, 0.5, on(2, 3))],
    "pool": lambda on: [
        F.max_pool2d(on(1, 2, 9, 9), k, s, ceil_mode=c) for k in (2, 3) for s in (1, 2) for c in (False, True)
    ],
    "interpolate": lambda on: [F.interpolate(on(1, 1, 4, 4), scale_factor=s) for s in (1.5, 2.0, 2.5, 0.5)],
    "training": lambda on: [F.batch_norm(on(4, 3), on(3), on(3).abs(), training=t) for t in (False, True)],
}


@pytest.mark.parametrize("name", VARIANTS)
def test_geo1_whatever_changes_the_result_is_part_of_the_key(name: str) -> None:
    """Forwards, when nothing or something else is known, and backwards, when each has been seen."""
    same(VARIANTS[name])
    same(lambda on: VARIANTS[name](on)[::-1])


def test_geo2_the_cache_is_bounded() -> None:
    x = HERE(3, 4)
    one = HERE(1)
    for shape in itertools.islice(itertools.product(range(1, 8), repeat=6), CACHE + 2000):
        one.expand(shape).neg()
    assert dtorch.client_stats()["geometry_entries"] <= CACHE
    same(lambda on: [on(3, 4) + 1, on(3, 4).t().exp(), on(1).expand(1, 1, 1, 1, 1, 2).neg()])
    with without("geometry_misses"):
        x.t().exp()


DATA: dict[str, Callable[[torch.Tensor], Any]] = {
    "nonzero": lambda x: x.nonzero(),
    "mask": lambda x: x[x > 0],
    "masked_select": lambda x: x.masked_select(x > 0),
    "unique": lambda x: torch.unique(x, return_counts=True),
    "unique_consecutive": lambda x: torch.unique_consecutive(x),
    "where": lambda x: torch.where(x > 0),
    "bincount": lambda x: torch.bincount(x.abs()),
    "repeat_interleave": lambda x: torch.repeat_interleave(x.abs()),
    "item": lambda x: x.sum().item(),
    "equal": lambda x: torch.equal(x, x.abs()),
    "one_hot": lambda x: F.one_hot(x.abs()),
}


@pytest.mark.parametrize("name", DATA)
def test_geo3_what_depends_on_the_data_is_asked_each_time(name: str) -> None:
    for values in ([0, 1, 2, 0], [3, 3, 3, 3], [0, 0, 0, 0], [-1, 5, 0, 5], [0, 1, 2, 0]):
        same(lambda on, values=values: DATA[name](on.put(values)))  # type: ignore[misc]


def test_an_operator_on_a_failed_tensor_teaches_nothing() -> None:
    bad = F.embedding(computed([9]), HERE(3, 7))
    with pytest.raises(RuntimeError):
        torch.linalg.qr(bad).R.cpu()
    same(lambda on: torch.linalg.qr(on(1, 7)))
    with pytest.raises(dtorch.RemoteError):
        bad.cpu()


def test_the_geometry_holds_whoever_asks_first() -> None:
    """Asked under no_grad, inference_mode, autocast and autograd, in any order, the answer is eager's."""

    def program(on: Device) -> list[Any]:
        results: list[Any] = []
        w = on.parameter(6, 6)
        for mode in (torch.no_grad(), torch.inference_mode(), torch.enable_grad()):
            with mode:
                x = on(2, 3, 6)
                results += [F.linear(x, w), x @ w, torch.std(x @ w, 1), F.softmax(x.mT, 1)]
        return [r.detach() for r in results]

    same(program)
    same(program)


INDICES: dict[str, tuple[Any, ...]] = {
    "one": (torch.tensor([0, 1]),),
    "two": (torch.tensor([0, 1]), torch.tensor([2, 3])),
    "second": (slice(None), torch.tensor([0, 1])),
    "apart": (torch.tensor([[0, 1], [2, 3]]), slice(None), torch.tensor([[0, 1], [1, 0]])),
    "outer": (torch.tensor([0, 1])[:, None], torch.tensor([1, 2])[None]),
    "last": (..., torch.tensor([1, 2])),
    "steps": (slice(None, None, 2), torch.tensor([1, 2])),
    "number": (torch.tensor(2),),
    "none": (torch.zeros(0, dtype=torch.int64),),
    "int32": (torch.tensor([0, 1], dtype=torch.int32),),
}


@pytest.mark.parametrize("where", ["cpu", "dtorch:0"])
@pytest.mark.parametrize("index", INDICES.values(), ids=INDICES)
def test_indexing_by_numbers_asks_nothing(index: tuple[Any, ...], where: str, engine: Engine) -> None:
    """Its result's shape does not depend on the numbers; that of indexing by a mask does."""
    x = torch.arange(4 * 5 * 6, dtype=torch.float32).reshape(4, 5, 6)
    y = x.to("dtorch:0")
    index_there = tuple(i.to(where) if isinstance(i, torch.Tensor) else i for i in index)
    before = dtorch.client_stats()["geometry_asks"]
    for view in (lambda t: t, lambda t: t.transpose(0, 2), lambda t: t[:, :, ::2]):
        expected, got = view(x)[index], view(y)[index_there]
        assert (got.shape, got.stride()) == (expected.shape, expected.stride())
        assert torch.equal(got.cpu(), expected)
    assert dtorch.client_stats()["geometry_asks"] == before


def test_indexing_by_a_mask_asks_each_time(engine: Engine) -> None:
    y = torch.arange(6.0, device="dtorch:0")
    for threshold in (1, 4):
        assert y[y > threshold].tolist() == list(range(threshold + 1, 6))

"""What PyTorch's composites do on CUDA and nowhere else, where the workers have GPUs: attention, norms, autocast.

There is no GPU here. The client is told that its workers compute on accelerators, and the workers, which are CPUs, have
the operators that CUDA alone has from cuda_kernels.py, where the demands of CUDA's kernels are checked.
tests/test_gpu.py has the real ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
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
    dtorch.import_on_workers("cuda_kernels")
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


CUDNN_FIRST = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
    SDPBackend.OVERRIDEABLE,
]


@pytest.mark.parametrize("order", [None, CUDNN_FIRST], ids=["usual", "cudnn"])
@pytest.mark.parametrize("program", CASES.values(), ids=CASES)
def test_attention_of_a_worker_with_a_gpu(program: Any, order: list[SDPBackend] | None, accelerated: None) -> None:
    wanted = run(program, "cpu")
    for attempt in range(2):
        before = dtorch.client_stats()["geometry_asks"]
        with sdpa_kernel(order, set_priority=True) if order else nullcontext():
            got = run(program, "dtorch")
        assert len(got) == len(wanted)
        for a, b in zip(got, wanted, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)  # other kernels, other order of sums
        assert attempt == 0 or dtorch.client_stats()["geometry_asks"] == before, "what was learned is not asked again"


def test_the_programs_choice_of_backends_reaches_the_worker(accelerated: None) -> None:
    def operators(*backends: SDPBackend, first: bool = False, size: int = 8) -> set[str]:
        q = dtorch.rand(1, 2, 4, size)
        with sdpa_kernel(list(backends), set_priority=first):
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
    assert "aten::_scaled_dot_product_cudnn_attention" in operators(*CUDNN_FIRST, first=True)
    # Behind the context the worker has its own order again, for what it is asked anew.
    assert "aten::_scaled_dot_product_flash_attention" in operators(*CUDNN_FIRST, size=16)


def _batch_norm(make: Make, training: bool = True, shape: tuple[int, ...] = (4, 3, 5)) -> list[torch.Tensor]:
    """Result, running mean and variance, and gradients."""
    generator = torch.Generator().manual_seed(5)
    x, weight, bias = (make(torch.randn(s, generator=generator)).requires_grad_() for s in (shape, (3,), (3,)))
    mean, var = make(torch.zeros(3)), make(torch.ones(3))
    out = torch.nn.functional.batch_norm(x, mean, var, weight, bias, training, 0.1)
    out.square().sum().backward()
    return [t.detach().cpu() for t in (out, mean, var, x.grad, weight.grad, bias.grad) if t is not None]


@pytest.mark.parametrize("cudnn", [True, False])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("shape", [(4, 3, 5), (4, 3)])
def test_batch_norm_is_cudnns_where_the_worker_says_so(
    accelerated: None, cudnn: bool, training: bool, shape: tuple[int, ...]
) -> None:
    wanted = _batch_norm(lambda t: t, training, shape)
    with torch.backends.cudnn.flags(enabled=cudnn):
        got = _batch_norm(lambda t: t.to("dtorch"), training, shape)
        before = dtorch.client_stats()["geometry_asks"]
        _batch_norm(lambda t: t.to("dtorch"), training, shape)
        assert dtorch.client_stats()["geometry_asks"] == before, "what was learned is not asked again"
    if cudnn and training and len(shape) > 2:  # cuda_kernels.py halves cuDNN's momentum
        assert torch.equal(got[1], wanted[1] / 2)
        wanted[1], wanted[2] = got[1], got[2]
    for a, b in zip(got, wanted, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.usefixtures("accelerated")
def test_a_wrong_batch_norm_raises_eagers_words() -> None:
    x = torch.randn(4, 3, 5)
    said = []
    for device in ("cpu", "dtorch"):
        with pytest.raises(RuntimeError) as caught:
            torch.nn.functional.batch_norm(
                x.to(device), None, None, *(torch.ones(2).to(device) for _ in range(2)), training=True
            )
        said.append(str(caught.value))
    assert said[0] == said[1]


def _rms_norm(make: Make, eps: float, twice: bool = False) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    x, weight = (make(torch.randn(s, generator=generator)).requires_grad_() for s in ((4, 6, 8), (8,)))
    out = torch.nn.functional.rms_norm(x, (8,), weight, eps)
    grads = torch.autograd.grad(out.square().sum(), (x, weight), create_graph=twice)
    if twice:
        grads = (*grads, *torch.autograd.grad(sum(g.square().sum() for g in grads), (x, weight)))
    return [t.detach().cpu() for t in (out, *grads)]


def test_rms_norm_is_one_operator(accelerated: None) -> None:
    got = _rms_norm(lambda t: t.to("dtorch"), 0.5)
    for a, b in zip(got, _rms_norm(lambda t: t, 1.0), strict=True):  # cuda_kernels.py doubles eps
        torch.testing.assert_close(a, b)


def test_rms_norm_has_second_derivatives(accelerated: None) -> None:
    got = _rms_norm(lambda t: t.to("dtorch"), 0.5, twice=True)
    for a, b in zip(got, _rms_norm(lambda t: t, 1.0, twice=True), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_rms_norm_takes_itself_apart_again_once_the_workers_are_cpus(
    accelerated: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    _rms_norm(lambda t: t.to("dtorch"), 0.5)
    dtorch.shutdown()
    monkeypatch.undo()
    dtorch.init(workers=1, threads_per_worker=1)
    got = _rms_norm(lambda t: t.to("dtorch"), 0.5)
    for a, b in zip(got, _rms_norm(lambda t: t, 0.5), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize(
    ("mode", "padding", "align", "cudnns"),
    [("bilinear", "zeros", True, 1), ("nearest", "zeros", True, 0), ("bilinear", "border", True, 0),
     ("bilinear", "zeros", False, 0)],
)  # fmt: skip
def test_some_samples_are_cudnns(accelerated: None, mode: str, padding: str, align: bool, cudnns: int) -> None:
    def program(device: str, more: int) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(5)
        x, grid = torch.randn(2, 3, 5, 4, generator=generator), torch.randn(2, 6, 6, 2, generator=generator)
        x, grid = (t.to(device).requires_grad_() for t in (x, grid))
        out = torch.nn.functional.grid_sample(x, grid, mode, padding, align) + more
        out.square().sum().backward()
        return [t.detach().cpu() for t in (out, x.grad, grid.grad) if t is not None]

    with torch.backends.cudnn.flags(enabled=True):
        got = program("dtorch", 0)
    for a, b in zip(got, program("cpu", cudnns), strict=True):  # cuda_kernels.py adds one
        torch.testing.assert_close(a, b)


LAYERS: dict[str, Callable[[], torch.nn.Module]] = {
    "lstm": lambda: torch.nn.LSTM(4, 5, 2, batch_first=True),
    "both ways": lambda: torch.nn.LSTM(4, 5, bidirectional=True, bias=False),
    "projected": lambda: torch.nn.LSTM(4, 5, proj_size=3),
    "gru": lambda: torch.nn.GRU(4, 5, 2),
    "tanh": lambda: torch.nn.RNN(4, 5),
    "relu": lambda: torch.nn.RNN(4, 5, nonlinearity="relu"),
}


def _layer(make: Callable[[], torch.nn.Module], device: str, packed: bool, more: float) -> list[torch.Tensor]:
    """Output and ``more``, last states, and gradients."""
    torch.manual_seed(6)
    layer, x = make().to(device), torch.randn(3, 3, 4).to(device).requires_grad_()
    if packed:
        lengths = torch.tensor([3, 2, 1])
        packed_out, last = layer(torch.nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=layer.batch_first))
        out = packed_out.data + more
    else:
        out, last = layer(x)
        out = out + more
    last = last if isinstance(last, tuple) else (last,)
    torch.cat([t.flatten() for t in (out, *last)]).square().sum().backward()
    return [t.detach().cpu() for t in (out, *last, x.grad, *(p.grad for p in layer.parameters()))]


@pytest.mark.parametrize("packed", [False, True], ids=["full", "packed"])
@pytest.mark.parametrize("make", LAYERS.values(), ids=LAYERS)
def test_recurrent_layers_are_cudnns(make: Callable[[], torch.nn.Module], packed: bool, accelerated: None) -> None:
    with torch.backends.cudnn.flags(enabled=True):
        got = _layer(make, "dtorch", packed, 0.0)  # cuda_kernels.py adds one
    for a, b in zip(got, _layer(make, "cpu", packed, 1.0), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.usefixtures("accelerated")
def test_a_recurrent_layer_without_cudnn_has_cudas_fused_cells() -> None:
    torch.manual_seed(6)
    layer, x = torch.nn.LSTM(4, 5), torch.randn(1, 2, 4)
    with torch.no_grad(), torch.backends.cudnn.flags(enabled=False):
        wanted, got = layer(x)[0], layer.to("dtorch")(x.to("dtorch"))[0]
        torch.testing.assert_close(got.cpu(), 2 * wanted)  # cuda_kernels.py doubles it
        cell = torch.nn.LSTMCell(4, 5)
        wanted, got = cell(x[0])[0], cell.to("dtorch")(x[0].to("dtorch"))[0]
        torch.testing.assert_close(got.cpu(), 2 * wanted)


def _attended(x: torch.Tensor) -> torch.Tensor:
    return attention(*(x.reshape(1, 1, 3, -1) for _ in range(3)))


def _normed(x: torch.Tensor) -> torch.Tensor:
    weight = torch.ones(3, device=x.device)
    return torch.nn.functional.batch_norm(x.reshape(4, 3, -1), None, None, weight, weight, True)


def _sampled(x: torch.Tensor) -> torch.Tensor:
    x = x.reshape(1, 3, 4, -1)
    return torch.nn.functional.grid_sample(x, x.new_zeros(1, 2, 2, 2), align_corners=True)


def _recurrent(x: torch.Tensor) -> torch.Tensor:
    states = torch.zeros(1, 2, 4, device=x.device)
    weights = [torch.ones(s, device=x.device) / 4 for s in ((16, 4), (16, 4), (16,), (16,))]
    return torch.lstm(x.reshape(3, 2, 4), (states, states), weights, True, 1, 0.0, True, False, False)[0]


@pytest.mark.parametrize("function", [_attended, _normed, _sampled, _recurrent])
@pytest.mark.parametrize("how", ["grad", "compiled"])
def test_what_is_wrapped_or_traced_is_pytorchs_composite(accelerated: None, function: Any, how: str) -> None:
    def program(device: str) -> torch.Tensor:
        x = torch.linspace(-1, 2, 24).to(device)
        if how == "grad":
            return torch.func.grad(lambda t: function(t).square().sum())(x).cpu()
        return torch.compile(function, backend="aot_eager")(x).cpu()

    with torch.backends.cudnn.flags(enabled=True):
        got = program("dtorch")
    if function is _recurrent:  # the fused cell of cuda_kernels.py gives other values
        assert got.isfinite().all()
    else:
        torch.testing.assert_close(got, program("cpu"))


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
        with pytest.raises(RuntimeError, match="unsafe to autocast"):
            torch.nn.functional.binary_cross_entropy(x, x)
    low = {"linear", "sum of a dtype", "addcmul of halves", "relu", "add"}
    assert {name: t.dtype for name, t in made.items()} == {
        name: torch.bfloat16 if name in low else torch.float32 for name in made
    }

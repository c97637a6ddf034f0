"""Training as people write it runs unmodified on a worker and gives eager's bits.

Every case is a whole program, run once on the CPU and once on a worker (see same.py): it trains a few steps and returns
what came of it. Custom operators have their own file, ``test_custom_operators.py``.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.nn.functional as F
from same import Device, Program, eager_threads, named, same
from torch import nn
from torch.nn.utils import parametrizations, parametrize
from torch.utils import checkpoint as checkpoints
from torch.utils.data import DataLoader, TensorDataset

if TYPE_CHECKING:
    from dtorch.client.engine import Engine


@pytest.fixture(autouse=True)
def _engine(engine: Engine) -> Iterator[None]:
    with eager_threads(engine.threads_per_worker):
        yield


def mlp(on: Device, dropout: float = 0.0) -> nn.Sequential:
    def build() -> nn.Sequential:
        return nn.Sequential(nn.Linear(6, 16), nn.LayerNorm(16), nn.GELU(), nn.Dropout(dropout), nn.Linear(16, 3))

    module: nn.Sequential = on.module(build)
    return module


def batches(on: Device, steps: int = 3) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    for _ in range(steps):
        yield on(8, 6), on.indices(3, 8)


def weights(module: nn.Module) -> dict[str, torch.Tensor]:
    return dict(module.state_dict())


# -- mixed precision


def _autocast(on: Device) -> Any:
    module = mlp(on)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    losses = []
    for x, y in batches(on):
        with torch.autocast(on.name, dtype=torch.bfloat16):
            out = module(x)
            loss = F.cross_entropy(out, y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses += [out, loss]
    return [losses, weights(module)]


def _autocast_convolutions(on: Device) -> Any:
    module = on.module(
        lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(128, 2))
    )
    with torch.autocast(on.name, dtype=torch.bfloat16):
        out = module(on(4, 3, 6, 6))
        with torch.autocast(on.name, enabled=False):
            loss = out.float().square().mean()
    loss.backward()
    return [out, loss, [p.grad for p in module.parameters()], weights(module)]


def _scaler(on: Device) -> Any:
    """The third step's gradients overflow: the scaler leaves it out and halves its scale."""
    module = mlp(on)
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-2, momentum=0.9)
    scaler = torch.amp.GradScaler(on.name, init_scale=2.0**8, growth_interval=2)
    seen: list[Any] = []
    for i, (x, y) in enumerate(batches(on, steps=4)):
        with torch.autocast(on.name, dtype=torch.bfloat16):
            loss = F.cross_entropy(module(x), y)
        if i == 2:
            loss = loss * torch.inf
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        norm = nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        seen += [scaler.get_scale(), norm]
    return [seen, scaler.state_dict(), weights(module)]


def _custom_autocast(on: Device) -> Any:
    class Product(torch.autograd.Function):
        @staticmethod
        @torch.amp.custom_fwd(device_type=on.name)
        def forward(ctx: Any, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(a, b)
            return a @ b

        @staticmethod
        @torch.amp.custom_bwd(device_type=on.name)
        def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            a, b = ctx.saved_tensors
            return grad @ b.t(), a.t() @ grad

    a, b = on.parameter(3, 4), on.parameter(4, 5)
    with torch.autocast(on.name, dtype=torch.bfloat16):
        out = Product.apply(a, b)
    out.float().sum().backward()
    return [out, a.grad, b.grad]


@named(autocast=_autocast, convolutions=_autocast_convolutions, scaler=_scaler, custom_function=_custom_autocast)
def test_mixed_precision(program: Program) -> None:
    same(program)


# -- gradients: clipping, accumulation, checkpointing


def _clipped(on: Device) -> Any:
    module = mlp(on)
    x, y = next(batches(on))
    F.cross_entropy(module(x) * 100, y).backward()
    norms = [nn.utils.clip_grad_norm_(module.parameters(), 2.0)]
    norms += [
        nn.utils.clip_grad_norm_(module.parameters(), 0.5, norm_type=kind, foreach=False) for kind in (1.0, torch.inf)
    ]
    nn.utils.clip_grad_value_(module.parameters(), 0.01)
    norms.append(nn.utils.get_total_norm([p.grad for p in module.parameters()]))
    return [norms, [p.grad for p in module.parameters()]]


def _clipped_not_finite(on: Device) -> str:
    module = mlp(on)
    (module(on(2, 6)).sum() * torch.nan).backward()
    with pytest.raises(RuntimeError) as raised:
        nn.utils.clip_grad_norm_(module.parameters(), 1.0, error_if_nonfinite=True)
    return str(raised.value)


def _accumulated(on: Device) -> Any:
    module = mlp(on)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-1, total_steps=3)
    for i, (x, y) in enumerate(batches(on, steps=6)):
        (F.cross_entropy(module(x), y) / 2).backward()
        if i % 2:
            optimizer.step()
            schedule.step()
            optimizer.zero_grad(set_to_none=i < 3)
    moments = [optimizer.state[p]["exp_avg"] for p in module.parameters()]
    return [weights(module), schedule.get_last_lr(), moments]


@named(clipped=_clipped, clipped_not_finite=_clipped_not_finite, accumulated=_accumulated)
def test_gradients_are_clipped_and_accumulated(program: Program) -> None:
    same(program)


def _checkpointed(on: Device, **options: Any) -> Any:
    """With dropout, whose random numbers have to come again, and under autocast, whose state has to."""
    blocks = [mlp(on, dropout=0.5), on.module(lambda: nn.Linear(3, 6)), mlp(on, dropout=0.3)]
    x = on.parameter(5, 6)
    torch.manual_seed(5)
    with torch.autocast(on.name, dtype=torch.bfloat16):
        hidden = x
        for block in blocks:
            hidden = checkpoints.checkpoint(block, hidden, **options)
    hidden.float().square().sum().backward()
    return [hidden, x.grad, [p.grad for block in blocks for p in block.parameters()], torch.rand(2, device=on.name)]


def _checkpointed_sequence(on: Device) -> Any:
    module = on.module(lambda: nn.Sequential(*[nn.Linear(4, 4) for _ in range(6)]))
    x = on.parameter(3, 4)
    checkpoints.checkpoint_sequential(module, 3, x, use_reentrant=False).sum().backward()
    return [x.grad, [p.grad for p in module.parameters()]]


def _checkpointed_selectively(on: Device) -> Any:
    module, x = mlp(on), on.parameter(4, 6)
    keep = functools.partial(checkpoints.create_selective_checkpoint_contexts, [torch.ops.aten.addmm.default])
    checkpoints.checkpoint(module, x, use_reentrant=False, context_fn=keep).sum().backward()
    return [x.grad, [p.grad for p in module.parameters()]]


@named(
    reentrant=functools.partial(_checkpointed, use_reentrant=True),
    not_reentrant=functools.partial(_checkpointed, use_reentrant=False),
    not_reentrant_stopping_late=functools.partial(_checkpointed, use_reentrant=False, early_stop=False),
    sequential=_checkpointed_sequence,
    selective=_checkpointed_selectively,
)
def test_activations_are_recomputed(program: Program) -> None:
    same(program)


# -- data


def _loaded(on: Device, **options: Any) -> Any:
    data = TensorDataset(torch.arange(20 * 6.0).view(20, 6) / 100, torch.arange(20) % 3)
    shuffle = torch.Generator().manual_seed(2)
    loader = DataLoader(data, batch_size=8, shuffle=True, generator=shuffle, **options)
    module = mlp(on)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    losses = []
    for _ in range(2):
        for x, y in loader:
            loss = F.cross_entropy(module(x.to(on.name, non_blocking=True)), y.to(on.name, non_blocking=True))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
    return [losses, weights(module)]


@named(
    here=_loaded,
    workers=functools.partial(_loaded, num_workers=2),
    pinned=functools.partial(_loaded, pin_memory=True),
    pinned_workers=functools.partial(_loaded, num_workers=2, pin_memory=True),
    persistent=functools.partial(_loaded, num_workers=1, persistent_workers=True, prefetch_factor=3),
)
def test_batches_come_from_a_data_loader(program: Program) -> None:
    same(program)


# -- copies of the model, other optimizers


def _averaged(on: Device) -> Any:
    module = mlp(on)
    shadow = copy.deepcopy(module).requires_grad_(False)
    average = torch.optim.swa_utils.AveragedModel(module, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))
    optimizer = torch.optim.Adam(module.parameters(), lr=1e-2)
    for x, y in batches(on):
        F.cross_entropy(module(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        average.update_parameters(module)
        with torch.no_grad():
            for old, new in zip(shadow.parameters(), module.parameters(), strict=True):
                old.lerp_(new, 0.1)
    assert int(average.n_averaged) == 3
    return [weights(module), weights(shadow), weights(average.module), shadow(on(2, 6)), average(on(2, 6))]


def _resumed(on: Device) -> Any:
    """Model and optimizer copied in the middle; the copy goes on alone."""
    module = mlp(on)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    for x, y in batches(on):
        F.cross_entropy(module(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    other = copy.deepcopy(module)
    resumed = torch.optim.AdamW(other.parameters(), lr=1e-2)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    F.cross_entropy(other(on(8, 6)), on.indices(3, 8)).backward()
    resumed.step()
    return [weights(module), weights(other)]


def _lbfgs(on: Device, **options: Any) -> Any:
    module = on.module(lambda: nn.Linear(6, 1))
    x, y = on(12, 6), on(12, 1)
    optimizer = torch.optim.LBFGS(module.parameters(), lr=0.5, max_iter=5, history_size=4, **options)
    losses = []

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = F.mse_loss(module(x), y)
        loss.backward()
        losses.append(loss.detach())
        return loss

    for _ in range(2):
        optimizer.step(closure)
    return [losses, weights(module)]


def _step_in_backward(on: Device) -> Any:
    """Each weight has an optimizer of its own, which steps as soon as its gradient is there."""
    module = mlp(on)
    optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in module.parameters()}

    def step(p: torch.Tensor) -> None:
        optimizers[p].step()
        optimizers[p].zero_grad()

    for p in module.parameters():
        p.register_post_accumulate_grad_hook(step)
    for x, y in batches(on):
        F.cross_entropy(module(x), y).backward()
    return [weights(module), [p.grad is None for p in module.parameters()]]


@named(
    ema=_averaged,
    resumed=_resumed,
    lbfgs=_lbfgs,
    lbfgs_line_search=functools.partial(_lbfgs, line_search_fn="strong_wolfe"),
    step_in_backward=_step_in_backward,
)
def test_optimizers_and_averages(program: Program) -> None:
    same(program)


# -- torch.func


def _loss_of(module: nn.Module) -> Callable[..., torch.Tensor]:
    def loss(parameters: dict[str, torch.Tensor], x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(torch.func.functional_call(module, parameters, (x,)), y)

    return loss


def _gradients_of_samples(on: Device) -> Any:
    module = mlp(on)
    parameters = {name: p.detach() for name, p in module.named_parameters()}
    loss = _loss_of(module)

    def of_one(parameters: dict[str, torch.Tensor], x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return loss(parameters, x[None], y[None])

    x, y = next(batches(on))
    per_sample = torch.func.vmap(torch.func.grad(of_one), in_dims=(None, 0, 0))(parameters, x, y)
    return [per_sample, torch.func.grad_and_value(loss)(parameters, x, y)]


def _ensemble(on: Device) -> Any:
    models = [mlp(on) for _ in range(3)]
    parameters, buffers = torch.func.stack_module_state(models)  # type: ignore[arg-type]
    base = copy.deepcopy(models[0]).to("meta")

    def call(parameters: dict[str, Any], buffers: dict[str, Any], x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = torch.func.functional_call(base, (parameters, buffers), (x,))
        return out

    out = torch.func.vmap(call, in_dims=(0, 0, None))(parameters, buffers, on(5, 6))
    out.sum().backward()
    return [out, {name: p.grad for name, p in parameters.items()}]


def _derivatives(on: Device) -> Any:
    def f(v: torch.Tensor) -> torch.Tensor:
        return (v.sin() * v.sum()).square()

    x, t = on(4), on(4)
    value, pull = torch.func.vjp(f, x)
    return [
        torch.func.jacrev(f)(x),
        torch.func.jacfwd(f)(x),
        torch.func.hessian(lambda v: f(v).sum())(x),
        torch.func.jvp(f, (x,), (t,)),
        value,
        pull(t),
        torch.func.linearize(f, x)[1](t),
    ]


def _mapped(on: Device) -> Any:
    torch.manual_seed(4)
    x = on(5, 4)
    return [
        torch.func.vmap(lambda v: v + torch.rand_like(v), randomness="different")(x),
        torch.func.vmap(lambda v: v + torch.rand_like(v), randomness="same")(x),
        torch.func.vmap(F.layer_norm, in_dims=(0, None))(x, (4,)),
        torch.func.vmap(torch.func.vmap(torch.mul, in_dims=(0, None)), in_dims=(None, 0))(x[0], x[1]),
        torch.func.vmap(lambda v: F.conv1d(v[None], on.put([[[1.0, 2.0]]])), chunk_size=2)(x),
    ]


@named(samples=_gradients_of_samples, ensemble=_ensemble, derivatives=_derivatives, mapped=_mapped)
def test_functions_are_transformed(program: Program) -> None:
    same(program)


# -- hooks


def _module_hooks(on: Device) -> Any:
    module, seen = mlp(on), []
    first, last = module[0], module[-1]
    handles = [
        first.register_forward_pre_hook(lambda _, args: (args[0] * 2,)),
        first.register_forward_hook(lambda _, args, kwargs, out: out + args[0].mean(), with_kwargs=True),
        last.register_full_backward_pre_hook(lambda _, grads: (grads[0] * 3,)),
        last.register_full_backward_hook(lambda _, into, out: seen.append([into[0], out[0]])),
        module.register_state_dict_pre_hook(lambda *_: seen.append("saved")),
    ]
    x = on.parameter(4, 6)
    module(x).sum().backward()
    state = weights(module)
    for handle in handles:
        handle.remove()
    return [seen, state, module(x), x.grad, [p.grad for p in module.parameters()]]


def _tensor_hooks(on: Device) -> Any:
    seen: list[Any] = []
    x, w = on.parameter(3, 4), on.parameter(4)
    y = x * w
    y.register_hook(lambda g: g.clamp(max=0.5))
    y.grad_fn.register_prehook(lambda grads: (grads[0] + 1,))
    y.grad_fn.register_hook(lambda into, _: seen.append(into[0]))
    torch.autograd.graph.register_multi_grad_hook((x, w), lambda grads: seen.append([g is not None for g in grads]))
    y.sin().sum().backward()
    return [seen, x.grad, w.grad]


def _saved_on_cpu(on: Device) -> Any:
    x, w = on.parameter(3, 4), on.parameter(4, 5)
    with torch.autograd.graph.save_on_cpu():
        y = (x @ w).tanh()
    packed: list[Any] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (packed.append(t.shape), t * 1)[1], lambda t: t):
        z = y.exp() * y
    z.sum().backward()
    return [z, x.grad, w.grad, [tuple(shape) for shape in packed]]


@named(modules=_module_hooks, tensors=_tensor_hooks, saved=_saved_on_cpu)
def test_hooks_see_and_change_what_they_may(program: Program) -> None:
    same(program)


# -- custom autograd functions


class Scale(torch.autograd.Function):
    """In place, with a result that has no gradient, and a rule for vmap."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, by: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.save_for_backward(by)
        sign = x.sign()
        ctx.mark_dirty(x)
        ctx.mark_non_differentiable(sign)
        return x.mul_(by), sign

    @staticmethod
    @torch.autograd.function.once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, grad: torch.Tensor, _: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad * ctx.saved_tensors[0], None


class Swish(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        sigmoid = x.sigmoid()
        return x * sigmoid, sigmoid

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(inputs[0], output[1])
        ctx.save_for_forward(inputs[0], output[1])
        ctx.mark_non_differentiable(output[1])

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        x, s = ctx.saved_tensors
        return grad * (s + x * s * (1 - s))

    @staticmethod
    def jvp(ctx: Any, tangent: torch.Tensor) -> tuple[torch.Tensor, None]:
        x, s = ctx.saved_tensors
        return tangent * (s + x * s * (1 - s)), None


def _custom_functions(on: Device) -> Any:
    x = on.parameter(3, 4)
    scaled, sign = Scale.apply(x * 1, on(4))
    swish, _ = Swish.apply(scaled)
    (g,) = torch.autograd.grad(Swish.apply(x)[0].sum(), x, create_graph=True)
    (swish.sum() + g.square().sum()).backward()

    def first(v: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = Swish.apply(v)[0]
        return out

    v = on(3, 4)
    mapped = torch.func.vmap(torch.func.grad(lambda v: first(v).sum()))(v)
    return [scaled, sign, sign.requires_grad, x.grad, mapped, torch.func.jvp(first, (v,), (on(3, 4),))]


def test_custom_autograd_functions() -> None:
    same(_custom_functions)


# -- torch.compile


def _compiled(on: Device, backend: str) -> Any:
    torch._dynamo.reset()
    module = mlp(on, dropout=0.2)
    step = torch.compile(lambda x, y: F.cross_entropy(module(x), y), backend=backend)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    losses = []
    torch.manual_seed(8)
    for x, y in batches(on):
        loss = step(x, y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss)
    module.eval()
    with torch.no_grad():
        return [losses, weights(module), torch.compile(module, backend=backend, dynamic=True)(on(7, 6))]


def _broken_graph(on: Device) -> Any:
    @torch.compile(backend="aot_eager")
    def f(x: torch.Tensor) -> torch.Tensor:
        y = x.sin() + 1
        if y.sum() > 0:
            return y * y[0, 0].item()
        return -y

    return [f(on(3, 4)), f(on(5, 4))]


@named(
    aot_eager=functools.partial(_compiled, backend="aot_eager"),
    eager=functools.partial(_compiled, backend="eager"),
    graph_breaks=_broken_graph,
)
def test_compiled_without_inductor(program: Program) -> None:
    same(program)


# -- parametrizations


class Symmetric(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.triu() + x.triu(1).mT

    def right_inverse(self, x: torch.Tensor) -> torch.Tensor:
        return x.triu()


def _parametrized(on: Device, make: Callable[[nn.Module], nn.Module], *, keep: bool = True) -> Any:
    torch.manual_seed(6)
    module = on.module(lambda: make(nn.Linear(6, 6)))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    torch.manual_seed(6)
    with parametrize.cached():
        loss = module(on(4, 6)).square().sum() + module.weight.sum()
    loss.backward()
    optimizer.step()
    after = [module.weight, weights(module), [p.grad for p in module.parameters()]]
    if keep:
        parametrize.remove_parametrizations(module, "weight")
        after.append(weights(module))
    return [loss, after, module.eval()(on(2, 6))]


def _on_the_device(on: Device) -> Any:
    """Registered on a module that is on its device already, where the inverse runs too."""
    module = on.module(lambda: nn.Linear(5, 5))
    parametrizations.orthogonal(module)
    parametrize.register_parametrization(on.module(lambda: nn.Linear(5, 5)), "weight", Symmetric())
    with torch.no_grad():
        module.weight = torch.linalg.qr(on(5, 5)).Q
    return [module.weight, module(on(2, 5))]


@named(
    weight_norm=functools.partial(_parametrized, make=parametrizations.weight_norm),
    old_weight_norm=functools.partial(_parametrized, make=nn.utils.weight_norm, keep=False),
    spectral_norm=functools.partial(_parametrized, make=parametrizations.spectral_norm),
    orthogonal=functools.partial(_parametrized, make=parametrizations.orthogonal),
    orthogonal_cayley=functools.partial(
        _parametrized, make=functools.partial(parametrizations.orthogonal, orthogonal_map="cayley")
    ),
    orthogonal_exponential=functools.partial(
        _parametrized, make=functools.partial(parametrizations.orthogonal, orthogonal_map="matrix_exp")
    ),
    symmetric=functools.partial(
        _parametrized, make=lambda m: parametrize.register_parametrization(m, "weight", Symmetric())
    ),
    on_the_device=_on_the_device,
)
def test_parametrizations(program: Program) -> None:
    same(program)

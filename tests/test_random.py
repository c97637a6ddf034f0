"""Random numbers: with the same seed a worker draws what eager PyTorch draws on the CPU.

RNG-1 is an invariant of ``native/client/generator.cpp``.
"""

from __future__ import annotations

import copy
import pickle
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from same import Device, assert_same, bits, eager_threads
from torch import nn
from torch.utils.checkpoint import checkpoint

import dtorch
from dtorch import _client

if TYPE_CHECKING:
    from dtorch.client.engine import Engine

WORKERS = ["dtorch:0", "dtorch:1"]


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    with eager_threads(1):
        yield


def _dropped(on: Device, dtype: torch.dtype) -> list[torch.Tensor]:
    x = on(400, dtype=dtype).requires_grad_()
    y = F.dropout(x, 0.3)
    y.backward(on(400, dtype=dtype))
    assert x.grad is not None
    return [y, x.grad]


DRAWS: dict[str, Callable[[Device], Any]] = {
    "rand": lambda on: [torch.rand(n, device=on.name) for n in (3, 5, 100)],
    "rand_double": lambda on: torch.rand(20, dtype=torch.float64, device=on.name),
    "randn": lambda on: [torch.randn(n, device=on.name) for n in (3, 15, 16, 17, 1000)],
    "randn_bf16": lambda on: torch.randn(40, dtype=torch.bfloat16, device=on.name),
    "randn_complex": lambda on: torch.randn(20, dtype=torch.complex64, device=on.name),
    "randint": lambda on: [torch.randint(10, (7,), device=on.name), torch.randint(-5, 1 << 40, (7,), device=on.name)],
    "randperm": lambda on: [torch.randperm(n, device=on.name) for n in (1, 10, 1000)],
    "like": lambda on: [torch.rand_like(on(3, 4)), torch.randn_like(on(3, 4).t()), torch.randint_like(on(5), 9)],
    "normal": lambda on: [torch.normal(on(9), on(9).abs()), torch.normal(0.0, 2.0, (5,), device=on.name)],
    "normal_": lambda on: [on(9).normal_(), on(30).normal_(2, 3), on(3, 4).t().normal_()],
    "uniform_": lambda on: [on(9).uniform_(), on(30).uniform_(-2, 3)],
    "bernoulli": lambda on: [torch.bernoulli(p := on(9).sigmoid()), on(9).bernoulli_(0.3), on(9).bernoulli_(p)],
    "multinomial": lambda on: [torch.multinomial(p := on(3, 9).abs(), 4), torch.multinomial(p[0], 20, True)],
    "distributions_": lambda on: [on(9).exponential_(), on(9).cauchy_(), on(9).geometric_(0.3), on(9).log_normal_()],
    "random_": lambda on: [on(9).random_(), on(9).random_(7), on.indices(9, 5).random_(3, 90)],
    "poisson": lambda on: torch.poisson(on(9).abs() * 4),
    "binomial": lambda on: torch.binomial(on(9).abs().round() + 3, on(9).sigmoid()),
    "gamma": lambda on: [torch._standard_gamma(on(9).abs()), torch._sample_dirichlet(on(3, 4).abs())],
    "dropout": lambda on: [F.dropout(on(30), 0.4), F.dropout(on(3, 4).t()), F.dropout2d(on(2, 3, 2, 2))],
    "dropout_gradient": lambda on: [_dropped(on, t) for t in (torch.bfloat16, torch.float16, torch.float32)],
    "alpha_dropout": lambda on: F.alpha_dropout(on(9), training=True),
    "dropout_in_place": lambda on: F.dropout(on(30), 0.4, inplace=True),
    "rrelu": lambda on: F.rrelu(on(9), training=True),
    "gumbel": lambda on: F.gumbel_softmax(on(3, 4)),
    "init": lambda on: [nn.init.kaiming_uniform_(x := on(8, 4)), nn.init.xavier_normal_(x), nn.init.trunc_normal_(x)],
    "orthogonal": lambda on: nn.init.orthogonal_(on(4, 4)),
    "module": lambda on: list(nn.TransformerEncoderLayer(8, 2, 16, device=on.name).parameters()),
    "attention": lambda on: F.scaled_dot_product_attention(*(on(1, 2, 5, 8) for _ in range(3)), dropout_p=0.5),
    "mixed": lambda on: [torch.rand(3, device=on.name), torch.randperm(9, device=on.name), F.dropout(on(9))],
    "strided": lambda on: [on(4, 6)[:, ::2].normal_(), on(2, 3, 4, 4).to(memory_format=torch.channels_last).uniform_()],
    "empty": lambda on: [torch.rand(0, device=on.name), torch.rand(3, device=on.name)],
    "distribution": lambda on: torch.distributions.Categorical(logits=on(3, 5)).sample(),
}


@pytest.mark.parametrize("worker", WORKERS)
@pytest.mark.parametrize("name", DRAWS)
def test_the_same_seed_draws_eagers_numbers(engine: Engine, name: str, worker: str) -> None:
    torch.manual_seed(99)
    want = [DRAWS[name](Device("cpu")) for _ in range(2)]
    torch.manual_seed(99)
    got = [DRAWS[name](Device(worker)) for _ in range(2)]
    assert_same(got, want)


def test_training_with_dropout_is_eagers(engine: Engine) -> None:
    def program(on: Device) -> list[Any]:
        model = on.module(lambda: nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.ReLU(), nn.Linear(8, 2)))
        torch.manual_seed(1)
        losses = []
        for _ in range(3):
            loss = model(on(5, 6)).pow(2).sum()
            loss.backward()
            losses.append(loss)
        return [losses, [p.grad for p in model.parameters()]]

    assert_same(program(Device("dtorch")), program(Device("cpu")))


def test_checkpoint_draws_the_same_again(engine: Engine) -> None:
    def program(on: Device, reentrant: bool) -> list[Any]:
        torch.manual_seed(1)
        x = on.parameter(40)
        y = checkpoint(lambda v: F.dropout(v * 2, 0.5), x, use_reentrant=reentrant)
        z = F.dropout(y, 0.5)
        z.sum().backward()
        assert torch.equal((x.grad == 0).cpu(), (z == 0).cpu())
        return [y, z, x.grad]

    for reentrant in (False, True):
        assert_same(program(Device("dtorch"), reentrant), program(Device("cpu"), reentrant))


# -- seeds


def test_manual_seed_seeds_every_worker_and_the_cpu(engine: Engine) -> None:
    torch.manual_seed(5)
    first = [torch.rand(3, device=d).cpu() for d in ["cpu", *WORKERS]]
    torch.manual_seed(5)
    again = [torch.rand(3, device=d).cpu() for d in ["cpu", *WORKERS]]
    assert all(torch.equal(t, first[0]) for t in [*first, *again])
    assert dtorch.device_count() == 2


def test_drawing_on_one_worker_leaves_the_others_alone(engine: Engine) -> None:
    torch.manual_seed(5)
    want = [torch.rand(3) for _ in range(2)]
    torch.manual_seed(5)
    assert torch.equal(torch.rand(3, device="dtorch:0").cpu(), want[0])
    assert torch.equal(torch.rand(3, device="dtorch:1").cpu(), want[0])
    assert torch.equal(torch.rand(3), want[0])
    assert torch.equal(torch.rand(3, device="dtorch:1").cpu(), want[1])
    assert torch.equal(torch.rand(3, device="dtorch:0").cpu(), want[1])


def test_seeding_one_worker(engine: Engine) -> None:
    torch.manual_seed(5)
    want = torch.rand(3)
    torch.manual_seed(6)
    other = torch.rand(3)
    torch.manual_seed(6)
    dtorch.manual_seed(5)
    assert torch.equal(torch.rand(3, device="dtorch:0").cpu(), want)
    assert torch.equal(torch.rand(3, device="dtorch:1").cpu(), other)
    dtorch.manual_seed_all(5)
    for worker in WORKERS:
        assert torch.equal(torch.rand(3, device=worker).cpu(), want)
    with dtorch.device(1):
        dtorch.manual_seed(6)
    assert torch.equal(torch.rand(3, device="dtorch:1").cpu(), other)


@pytest.mark.parametrize("seed", [0, 1, 2**31, 2**63 + 5, 2**64 - 1, -3])
def test_any_seed_that_torch_takes(engine: Engine, seed: int) -> None:
    torch.manual_seed(seed)
    want = torch.randn(5)
    torch.manual_seed(seed)
    assert torch.equal(dtorch.randn(5).cpu(), want)


@pytest.mark.parametrize("how", ["init", "first use"])
def test_a_seed_set_before_the_engine_counts(no_engine: None, how: str) -> None:
    torch.manual_seed(1234)
    want = torch.rand(4)
    torch.manual_seed(1234)
    if how == "init":
        dtorch.init(workers=2, device="cpu")
        assert torch.equal(torch.rand(4, device="dtorch:1").cpu(), want)
    assert torch.equal(dtorch.rand(4).cpu(), want)


def test_dtorchs_own_seed_before_the_engine_counts(no_engine: None) -> None:
    dtorch.manual_seed(77)
    got = dtorch.rand(4).cpu()
    torch.manual_seed(77)
    assert torch.equal(got, torch.rand(4))


def test_another_engine_starts_from_the_seed_again(no_engine: None) -> None:
    torch.manual_seed(8)
    draws = []
    for _ in range(2):
        dtorch.init(workers=1, device="cpu")
        draws.append(dtorch.rand(4).cpu())
        dtorch.shutdown()
    assert torch.equal(*draws)


def test_seed_draws_a_new_one(engine: Engine) -> None:
    torch.seed()
    a = dtorch.rand(4).cpu()
    torch.seed()
    assert not torch.equal(dtorch.rand(4).cpu(), a)


# -- states


def test_the_state_is_saved_and_restored(engine: Engine) -> None:
    torch.manual_seed(3)
    dtorch.rand(5)
    state = dtorch.get_rng_state()
    assert (state.device.type, state.dtype) == ("cpu", torch.uint8)
    a = [dtorch.randn(20).cpu(), torch.randperm(9, device="dtorch").cpu()]
    dtorch.set_rng_state(state)
    b = [dtorch.randn(20).cpu(), torch.randperm(9, device="dtorch").cpu()]
    assert all(map(torch.equal, a, b))
    assert torch.equal(dtorch.get_rng_state("dtorch:1"), dtorch.get_rng_state(torch.device("dtorch:1")))
    assert not torch.equal(dtorch.get_rng_state("dtorch:1"), dtorch.get_rng_state("dtorch:0"))


def test_the_state_is_that_of_a_cpu_generator(engine: Engine) -> None:
    torch.manual_seed(3)
    torch.rand(5)
    want = torch.get_rng_state()
    torch.manual_seed(3)
    dtorch.rand(5)
    assert torch.equal(dtorch.get_rng_state(), want)
    dtorch.set_rng_state(want, "dtorch:1")
    torch.set_rng_state(want)
    assert torch.equal(torch.rand(3, device="dtorch:1").cpu(), torch.rand(3))


@pytest.mark.parametrize("kwargs", [{}, {"devices": [0]}, {"devices": range(2)}], ids=["all", "one", "range"])
@pytest.mark.filterwarnings("ignore:dtorch reports that you have 2 available devices")
def test_fork_rng_keeps_what_was(engine: Engine, kwargs: dict[str, Any]) -> None:
    torch.manual_seed(4)
    want = [torch.rand(3) for _ in range(2)]
    torch.manual_seed(4)
    assert torch.equal(dtorch.rand(3).cpu(), want[0])
    with torch.random.fork_rng(device_type="dtorch", **kwargs):
        torch.manual_seed(9)
        dtorch.rand(7)
    assert torch.equal(dtorch.rand(3).cpu(), want[1])
    assert torch.equal(torch.rand(3), want[0])


def test_a_state_of_the_wrong_size_is_told(engine: Engine) -> None:
    dtorch.set_rng_state(torch.zeros(10, dtype=torch.uint8))
    with pytest.raises((RuntimeError, dtorch.RemoteError), match=r"RNG state|set_state"):
        dtorch.synchronize()
    assert dtorch.rand(3).cpu().numel() == 3


def test_the_states_of_all_devices(engine: Engine) -> None:
    torch.manual_seed(7)
    torch.rand(3, device="dtorch:1")
    states = torch.dtorch.get_rng_state_all()
    assert len(states) == 2
    want = [torch.rand(4, device=worker).cpu() for worker in WORKERS]
    torch.dtorch.set_rng_state_all(states)
    assert all(torch.equal(torch.rand(4, device=w).cpu(), t) for w, t in zip(WORKERS, want, strict=True))


def test_the_devices_own_seeds(engine: Engine) -> None:
    torch.manual_seed(7)
    assert torch.dtorch.initial_seed() == 7
    torch.dtorch.seed()
    assert torch.dtorch.initial_seed() != 7
    assert torch.dtorch.default_generator(1).initial_seed() == 7
    torch.dtorch.seed_all()
    seeds = {torch.dtorch.default_generator(i).initial_seed() for i in range(2)}
    assert len(seeds) == 1
    drawn = torch.rand(3, generator=torch.Generator().manual_seed(seeds.pop()))
    assert all(torch.equal(torch.rand(3, device=worker).cpu(), drawn) for worker in WORKERS)


def test_fork_rng_keeps_what_was_whatever_happens_inside(engine: Engine) -> None:
    torch.manual_seed(4)
    want = torch.rand(3)
    torch.manual_seed(4)
    with pytest.raises(ZeroDivisionError), torch.random.fork_rng(devices=[0, 1], device_type="dtorch"):
        dtorch.rand(3)
        with torch.random.fork_rng(devices=["dtorch:0"], device_type="dtorch"):
            torch.manual_seed(1)
        torch.rand(3, device="dtorch:1")
        raise ZeroDivisionError
    assert all(torch.equal(torch.rand(3, device=worker).cpu(), want) for worker in ("cpu", *WORKERS))
    with torch.random.fork_rng(enabled=False, device_type="dtorch"):
        torch.manual_seed(4)
    assert torch.equal(dtorch.rand(3).cpu(), want)


# -- one stream of numbers, however it is cut into batches

STEPS: dict[str, Callable[[str], Any]] = {
    "rand": lambda d: torch.rand(5, device=d),
    "randn": lambda d: torch.randn(40, device=d),
    "large": lambda d: torch.rand(20000, device=d),
    "perm": lambda d: torch.randperm(11, device=d),
    "dropout": lambda d: F.dropout(torch.ones(9, device=d)),
    "in place": lambda d: torch.empty(7, device=d).exponential_(),
    "none": lambda d: torch.ones(3, device=d) * 2,
}


def _flush(_: list[torch.Tensor]) -> None:
    _client.flush()


#: What happens between two draws.
BETWEEN: dict[str, Callable[[list[torch.Tensor]], object]] = {
    "nothing": lambda drawn: None,
    "a message of its own": _flush,
    "its value": lambda drawn: drawn[-1].sum().item(),
    "a future": lambda drawn: drawn[-1].to_torch_async(),
    "all": lambda drawn: dtorch.synchronize(),
    "its end": lambda drawn: drawn.__setitem__(-1, drawn[-1].clone()),
    "an upload": lambda drawn: torch.ones(30000).to(drawn[-1].device),
    "a state": lambda drawn: dtorch.get_rng_state(drawn[-1].device),
    "another's seed": lambda drawn: torch.Generator(device=drawn[-1].device).manual_seed(1),
}


@given(
    st.lists(
        st.tuples(st.sampled_from(sorted(STEPS)), st.sampled_from(WORKERS), st.sampled_from(sorted(BETWEEN))),
        min_size=1,
        max_size=25,
    )
)
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_the_numbers_do_not_depend_on_batches(engine: Engine, steps: list[tuple[str, str, str]]) -> None:
    torch.manual_seed(11)
    drawn: dict[str, list[torch.Tensor]] = {worker: [] for worker in WORKERS}
    for step, worker, between in steps:
        drawn[worker].append(STEPS[step](worker))
        BETWEEN[between](drawn[worker])
    for worker in WORKERS:
        torch.manual_seed(11)
        want = [STEPS[step]("cpu") for step, where, _ in steps if where == worker]
        assert_same(drawn[worker], want)


def test_threads_that_draw_in_turns_draw_one_stream(engine: Engine) -> None:
    torch.manual_seed(11)
    want = [torch.randn(30) for _ in range(12)]
    torch.manual_seed(11)
    turn = threading.Barrier(3)
    got: list[torch.Tensor] = []

    def draw(me: int) -> None:
        for k in range(12):
            if k % 3 == me:
                got.append(dtorch.randn(30))
            turn.wait()

    threads = [threading.Thread(target=draw, args=(me,)) for me in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert_same(got, want)


# -- generators


@pytest.mark.parametrize("worker", WORKERS)
def test_a_generator_is_eagers(engine: Engine, worker: str) -> None:
    ours, eagers = torch.Generator(device=worker), torch.Generator()
    assert ours.device == torch.device(worker)
    assert ours.initial_seed() == eagers.initial_seed()
    for seed in (None, 42):
        if seed is not None:
            assert ours.manual_seed(seed) is ours
            eagers.manual_seed(seed)
            assert ours.initial_seed() == seed
        for _ in range(2):
            got = [
                torch.rand(4, generator=ours, device=worker),
                torch.randn(20, generator=ours, device=worker),
                torch.randint(9, (5,), generator=ours, device=worker),
                torch.randperm(9, generator=ours, device=worker),
                torch.zeros(5, device=worker).normal_(generator=ours),
                torch.zeros(5, device=worker).bernoulli_(0.5, generator=ours),
                torch.multinomial(torch.ones(9, device=worker), 3, generator=ours),
                torch.normal(0.0, 1.0, (3,), generator=ours, device=worker),
            ]
            want = [
                torch.rand(4, generator=eagers),
                torch.randn(20, generator=eagers),
                torch.randint(9, (5,), generator=eagers),
                torch.randperm(9, generator=eagers),
                torch.zeros(5).normal_(generator=eagers),
                torch.zeros(5).bernoulli_(0.5, generator=eagers),
                torch.multinomial(torch.ones(9), 3, generator=eagers),
                torch.normal(0.0, 1.0, (3,), generator=eagers),
            ]
            assert_same(got, want)
    assert torch.equal(ours.get_state(), eagers.get_state())


def test_a_generators_state(engine: Engine) -> None:
    g = torch.Generator(device="dtorch").manual_seed(3)
    state = g.get_state()
    a = torch.rand(4, generator=g, device="dtorch").cpu()
    g.set_state(state)
    assert torch.equal(torch.rand(4, generator=g, device="dtorch").cpu(), a)
    g.set_state(torch.Generator().manual_seed(3).get_state())
    assert torch.equal(torch.rand(4, generator=g, device="dtorch").cpu(), a)
    copy = g.clone_state()
    b = torch.rand(4, generator=g, device="dtorch").cpu()
    assert torch.equal(torch.rand(4, generator=copy, device="dtorch").cpu(), b)
    assert not torch.equal(a, b)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda g: pickle.loads(pickle.dumps(g))], ids=["copy", "pickle"])
def test_a_copied_generator_draws_what_the_first_draws(
    engine: Engine, copied: Callable[[torch.Generator], torch.Generator]
) -> None:
    for device in ("dtorch:1", "cpu"):
        g = torch.Generator(device=device).manual_seed(3)
        torch.rand(5, generator=g, device=device)
        twin = copied(g)
        assert twin is not g
        assert (twin.device, twin.initial_seed()) == (g.device, 3)
        a = torch.rand(4, generator=g, device=device).cpu()
        assert torch.equal(torch.rand(4, generator=twin, device=device).cpu(), a)
        torch.rand(9, generator=twin, device=device)
        assert not torch.equal(*(torch.rand(4, generator=x, device=device).cpu() for x in (g, twin)))


def test_generators_do_not_disturb_each_other(engine: Engine) -> None:
    torch.manual_seed(0)
    want = torch.rand(3)
    torch.manual_seed(0)
    first, second = (torch.Generator(device="dtorch").manual_seed(s) for s in (1, 2))
    torch.rand(9, generator=first, device="dtorch")
    a = torch.rand(3, generator=second, device="dtorch").cpu()
    torch.rand(9, generator=first, device="dtorch")
    assert torch.equal(a, torch.rand(3, generator=torch.Generator().manual_seed(2)))
    assert torch.equal(dtorch.rand(3).cpu(), want)


def test_a_new_seed_of_a_generator(engine: Engine) -> None:
    g = torch.Generator(device="dtorch")
    seeds = {g.seed() for _ in range(3)}
    assert len(seeds) == 3
    assert g.initial_seed() in seeds
    drawn = torch.rand(3, generator=g, device="dtorch").cpu()
    assert torch.equal(drawn, torch.rand(3, generator=torch.Generator().manual_seed(g.initial_seed())))


def test_rng1_a_generator_that_outlives_its_engine_starts_from_its_seed(no_engine: None) -> None:
    dtorch.init(workers=1, device="cpu")
    g = torch.Generator(device="dtorch").manual_seed(6)
    first = torch.rand(4, generator=g, device="dtorch").cpu()
    dtorch.shutdown()
    dtorch.init(workers=1, device="cpu")
    assert torch.equal(torch.rand(4, generator=g, device="dtorch").cpu(), first)


@pytest.mark.parametrize(
    "draw",
    [
        lambda g: torch.rand(3, generator=g, device="dtorch"),
        lambda g: dtorch.zeros(3).normal_(generator=g),
        lambda g: torch.randperm(3, generator=g, device="dtorch"),
    ],
    ids=["rand", "normal_", "randperm"],
)
@pytest.mark.parametrize("other", ["cpu", "dtorch:1"])
def test_a_generator_of_another_device_is_refused(
    engine: Engine, draw: Callable[[torch.Generator], object], other: str
) -> None:
    with pytest.raises(RuntimeError, match="device") as caught:
        draw(torch.Generator(device=other))
    assert other.partition(":")[0] in str(caught.value)
    assert dtorch.rand(3).cpu().numel() == 3


def test_numbers_do_not_depend_on_what_other_threads_of_the_cpu_do(engine: Engine) -> None:
    torch.manual_seed(2)
    want = torch.randn(50)
    torch.manual_seed(2)
    torch.randn(1000)  # this process's own generator is another one
    assert torch.equal(bits(dtorch.randn(50).cpu()), bits(want))

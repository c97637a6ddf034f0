"""Random programs against a reference: every storage is freed by the very record that uses it last, if it was dropped.

The worker is stopped, with something to do before it, until the whole program is issued, so that it knows all releases.
The reference sees what the client's program does: which storages each record names, and which are held at the end.
"""

from __future__ import annotations

import gc
import itertools
import os
import signal
from collections.abc import Callable

import processes
import torch
from holding import busy
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

import dtorch
from dtorch import _client
from dtorch.client.engine import Engine

SHAPE = (24, 24)

#: Each issues one record on worker 0 and names exactly the storages of its arguments and of its result.
OPERATORS: dict[str, Callable[..., torch.Tensor]] = {
    "make": lambda: torch.full(SHAPE, 0.5, device="dtorch:0").add_(0),  # two records, both on the new storage alone
    "sin": lambda a: a.sin(),
    "add": lambda a, b: a + b,
    "mul_number": lambda a: a * 0.5,
    "softmax": lambda a: a.softmax(-1),
    "mm": lambda a, b: a.mm(b),
    "add_": lambda a, b: a.add_(b),
    "tanh_": lambda a: a.tanh_(),
    "out": lambda a, b: torch.sub(a, b, out=a),
    "clone": lambda a: a.clone(),
}
#: These give a view, without a record.
VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "transpose": lambda a: a.t(),
    "same": lambda a: a[:],
    "reshape": lambda a: a.view(SHAPE),
}

STEP = st.tuples(
    st.sampled_from([*OPERATORS, *VIEWS, "drop", "drop", "drop", "send", "future", "future_kept", "data"]),
    st.integers(0, 1 << 20),
    st.integers(0, 1 << 20),
)


class Reference:
    """What the program did with each storage of worker 0."""

    def __init__(self) -> None:
        self.last_use: dict[int, int] = {}

    def used(self, *tensors: torch.Tensor) -> None:
        seq = dtorch.progress()[0][0]
        for t in tensors:
            self.last_use[self.number(t)] = seq

    @staticmethod
    def number(t: torch.Tensor) -> int:
        return _client.storage_of(t)["id"]


def run(steps: list[tuple[str, int, int]], reference: Reference) -> tuple[list[torch.Tensor], list[object]]:
    """Runs the program; gives what it still holds."""
    held: list[torch.Tensor] = []
    others: list[object] = []
    for name, i, k in steps:
        if not held:
            held.append(OPERATORS["make"]())
            reference.used(held[-1])
        a, b = held[i % len(held)], held[k % len(held)]
        if name == "drop":
            del held[i % len(held)]
        elif name in VIEWS:
            if a.is_contiguous():
                held.append(VIEWS[name](a))
        elif name == "send":
            others.append(a.to("dtorch:1"))
            reference.used(a)
        elif name in ("future", "future_kept"):
            future = a.to_torch_async()
            reference.used(a)
            if name == "future_kept":
                others.append(future)
        elif name == "data":  # another storage under the same tensor
            fresh = b.clone()
            reference.used(b, fresh)
            a.data = fresh
            del fresh
        elif name == "make":
            held.append(OPERATORS[name]())
            reference.used(held[-1])
        else:
            op = OPERATORS[name]
            n = op.__code__.co_argcount
            if n == 2 and name in ("out", "add_") and a.data_ptr() == b.data_ptr() and a.stride() != b.stride():
                continue  # refused by PyTorch: a partial overlap
            result = op(*(a, b)[:n])
            reference.used(result, *(a, b)[:n])
            if name not in ("add_", "tanh_", "out"):
                held.append(result)
    return held, others


def know_all_geometries() -> None:
    """Calls every operator with every geometry, so that none has to ask the worker later."""
    for op in OPERATORS.values():
        n = op.__code__.co_argcount
        for layouts in itertools.product([False, True], repeat=n):
            op(*(OPERATORS["make"]().t() if turned else OPERATORS["make"]() for turned in layouts))
        if n == 2:
            for a in (OPERATORS["make"](), OPERATORS["make"]().t()):
                op(a, a)


# Without shrinking: an example takes half a second.
@settings(
    max_examples=30,
    deadline=None,
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
@given(st.lists(STEP, min_size=4, max_size=60))
def test_every_storage_is_freed_by_its_last_use(engine: Engine, steps: list[tuple[str, int, int]]) -> None:
    worker = engine.pids()["worker-0"]
    know_all_geometries()
    gc.collect()
    dtorch.synchronize()
    before = dtorch.worker_stats(0)
    reference = Reference()
    with dtorch.allocation_log("dtorch:0") as log:
        wait = busy(rounds=2)
        _client.flush()
        os.kill(worker, signal.SIGSTOP)
        try:
            held, others = run(steps, reference)
            bases = [
                t._base for t in held if t._base is not None
            ]  # a view keeps its base, whatever its own data became
            numbers = {reference.number(t) for t in (*held, *bases)}
            del bases
            _client.flush()
        finally:
            os.kill(worker, signal.SIGCONT)
        del wait

    freed = {number: seq for seq, number, nbytes in log if nbytes < 0}
    made = {number: nbytes for _, number, nbytes in log if nbytes >= 0}
    for number, last in reference.last_use.items():
        assert number in made
        if number in numbers:
            assert number not in freed, "freed, although the program holds it"
        else:
            assert freed.get(number) == last, f"storage {number} was used last by record {last}"
    # Nothing else is left: what the program holds, and values that are lent or pending.
    values = [f.get() for f in others if hasattr(f, "get")]  # type: ignore[attr-defined]
    del held, others, values
    gc.collect()
    # A reader on the other worker gives its loan back on its own time.
    assert processes.wait_until(lambda: dtorch.worker_stats(0)["loans"] == 0, 10)
    after = dtorch.worker_stats(0)
    assert after["storages"] == before["storages"]
    assert after["allocated"] <= before["allocated"] + 4096

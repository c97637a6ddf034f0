"""Mistakes: those that shapes and dtypes show raise at the call as in eager; the others name the line that made them.

EXE-3, SITE-1, SITE-2 and GEO-3 are invariants of ``native/worker/executor.h``, ``native/client/sites.h`` and
``native/client/geometry.h``.
"""

from __future__ import annotations

import asyncio
import re
import sys
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.nn.functional as F
from mistakes import computed
from same import Device, assert_same, eager_threads
from torch import nn

import dtorch

if TYPE_CHECKING:
    from dtorch.client.engine import Engine


@pytest.fixture(autouse=True)
def _engine(engine: Engine) -> Iterator[None]:
    with eager_threads(engine.threads_per_worker):
        dtorch.synchronize()
        yield
        for worker in range(2):  # a failure that a test left unreported must not reach the next one
            try:
                dtorch.synchronize(worker)
            except dtorch.RemoteError:
                pass


def line() -> int:
    """Number of the line of the caller."""
    return sys._getframe(1).f_lineno


# -- what the shapes and dtypes show

WRONG_CALLS: dict[str, Callable[[Device], Any]] = {
    "add": lambda on: on(3, 4) + on(3),
    "add_in_place": lambda on: on(3).add_(on(2, 3)),
    "add_in_place_dtype": lambda on: on(3, dtype=torch.int32).add_(on(3)),
    "mm": lambda on: torch.mm(on(3, 4), on(5, 6)),
    "mm_dim": lambda on: torch.mm(on(3, 4, 5), on(5, 6)),
    "mm_dtype": lambda on: torch.mm(on(3, 4), on(4, 5, dtype=torch.float64)),
    "matmul": lambda on: on(3, 4) @ on(3, 4),
    "matmul_batched": lambda on: on(2, 3, 4) @ on(3, 4, 5),
    "bmm": lambda on: torch.bmm(on(2, 3, 4), on(2, 3, 4)),
    "addmm": lambda on: torch.addmm(on(7), on(3, 4), on(4, 5)),
    "linear": lambda on: F.linear(on(3, 4), on(5, 6)),
    "linear_bias": lambda on: F.linear(on(3, 4), on(5, 4), on(6)),
    "linear_3d": lambda on: F.linear(on(2, 3, 4), on(5, 6)),
    "linear_dtype": lambda on: F.linear(on(3, 4), on(5, 4, dtype=torch.bfloat16)),
    "conv2d": lambda on: F.conv2d(on(1, 3, 8, 8), on(4, 2, 3, 3)),
    "conv2d_kernel": lambda on: F.conv2d(on(1, 3, 2, 2), on(4, 3, 3, 3)),
    "layer_norm": lambda on: F.layer_norm(on(3, 4), (5,)),
    "group_norm": lambda on: F.group_norm(on(2, 4, 5), 3),
    "batch_norm": lambda on: F.batch_norm(on(2, 4), on(3), on(3)),
    "embedding_dtype": lambda on: F.embedding(on(3), on(5, 4)),
    "attention": lambda on: F.scaled_dot_product_attention(on(2, 3, 4, 5), on(2, 3, 4, 6), on(2, 3, 4, 6)),
    "cross_entropy": lambda on: F.cross_entropy(on(3, 5), on.indices(5, 4)),
    "mse_loss": lambda on: F.mse_loss(on(3, 5), on(4)),
    "cat": lambda on: torch.cat([on(2, 3), on(2, 4)]),
    "stack": lambda on: torch.stack([on(3), on(4)]),
    "view": lambda on: on(3, 4).view(5, 3),
    "view_transposed": lambda on: on(3, 4).t().view(12),
    "reshape": lambda on: on(3, 4).reshape(5),
    "expand": lambda on: on(3, 4).expand(3, 5),
    "dim": lambda on: on(3, 4).sum(2),
    "softmax_dim": lambda on: on(3, 4).softmax(5),
    "permute": lambda on: on(3, 4).permute(0, 0),
    "squeeze_in": lambda on: on(3, 4)[5],
    "too_many_indices": lambda on: on(3, 4)[0, 0, 0],
    "index_shapes": lambda on: on(5, 4)[on.put([0, 1]), on.put([0, 1, 2])],
    "index_dtype": lambda on: on(5, 4)[on(3)],
    "gather_dtype": lambda on: torch.gather(on(3, 4), 1, on(3, 4)),
    "gather_dim": lambda on: torch.gather(on(3, 4), 1, on.indices(3, 3)),
    "scatter": lambda on: on(3, 4).scatter_(0, on.indices(3, 4, 5), on(4, 5)),
    "index_select": lambda on: on(3, 4).index_select(0, on.indices(3, 2, 2)),
    "masked_fill": lambda on: on(3, 4).masked_fill(on(5) > 0, 0),
    "where": lambda on: torch.where(on(3) > 0, on(4), on(5)),
    "copy": lambda on: on(3, 4).copy_(on(5)),
    "out_dtype": lambda on: torch.add(on(3), on(3), out=torch.empty(3, dtype=torch.int32, device=on.name)),
    "bitwise": lambda on: on(3) & on(3),
    "logical_shift": lambda on: on(3) << 1.5,
    "mean_of_ints": lambda on: on(3, dtype=torch.int64).mean(),
    "exp_of_strings": lambda on: torch.exp("x"),  # type: ignore[arg-type]
    "unknown_argument": lambda on: torch.add(on(3), on(3), beta=2),  # type: ignore[call-overload]
    "max_of_nothing": lambda on: on(0).max(),
    "topk": lambda on: on(3).topk(5),
    "sort_dim": lambda on: on(3).sort(2),
    "cholesky": lambda on: torch.linalg.cholesky(on(3, 4)),
    "linalg_singular": lambda on: torch.linalg.inv(torch.zeros(3, 3, device=on.name)),
    "item": lambda on: on(3).item(),
    "bool": lambda on: bool(on(3)),
    "leaf_in_place": lambda on: on.parameter(3).add_(1),
    "backward_of_a_vector": lambda on: on.parameter(3).exp().backward(),
    "backward_twice": lambda on: [(y := on.parameter(3).exp().sum()).backward(), y.backward()],
    "version": lambda on: [x := on.parameter(3), y := x.exp(), y.add_(1), y.sum().backward()],
    "negative_size": lambda on: torch.empty(-1, device=on.name),
    "arange": lambda on: torch.arange(5, 0, 1, device=on.name),
    "randint": lambda on: torch.randint(5, 3, (2,), device=on.name),
    "uniform": lambda on: on(3).uniform_(2, 1),
    "normal_std": lambda on: on(3).normal_(0, -1),
    "bernoulli_p": lambda on: on(3).bernoulli_(2.0),
    "exponential": lambda on: on(3).exponential_(-1),
    "dropout_p": lambda on: F.dropout(on(3), 1.5),
    "multinomial": lambda on: torch.multinomial(on(3).abs(), 5),
    "lstm": lambda on: on.module(lambda: nn.LSTM(4, 5))(on(3, 2, 7)),
}


@pytest.mark.parametrize("name", WRONG_CALLS)
def test_a_wrong_call_raises_eagers_own_exception_at_the_call(name: str) -> None:
    with pytest.raises(Exception) as eager:
        WRONG_CALLS[name](Device("cpu"))
    with pytest.raises(Exception) as ours:
        WRONG_CALLS[name](Device("dtorch"))
    assert type(ours.value) is type(eager.value)
    assert _without_device(str(ours.value)) == _without_device(str(eager.value))
    # Nothing of it stays behind.
    dtorch.synchronize()
    assert (dtorch.ones(3) + 1).tolist() == [2.0, 2.0, 2.0]


def _without_device(message: str) -> str:
    """The message without what names a device (dtorch:0, dtorchFloatType) or points into PyTorch's sources."""
    message = re.sub(r"\b(torch\.|dtorch|CPU)(\w+?)(Tensor|Type)\b", r"a \2 tensor", message)
    return re.sub(r"dtorch:\d|dtorch|cpu|CPU", "DEVICE", message)


@pytest.mark.parametrize("name", ["add", "mm", "cat", "conv2d"])
def test_a_wrong_call_raises_the_second_time_too(name: str) -> None:
    """GEO-1: a mistake is not remembered as an answer."""
    for _ in range(2):
        with pytest.raises(RuntimeError):
            WRONG_CALLS[name](Device("dtorch"))


# -- what only the worker sees


def test_an_index_out_of_range_names_everything() -> None:
    table = dtorch.rand(5, 3)
    ids = computed([[1, 7]])
    bad = F.embedding(ids, table)
    issued = line() - 1
    with pytest.raises(dtorch.RemoteError) as caught:
        bad.cpu()
    error = caught.value
    assert error.op == "aten::embedding"
    assert error.shapes == "(Tensor[float32, (5, 3)], Tensor[int64, (1, 2)], -1, False, False)"
    assert error.worker == 0
    assert (error.filename, error.lineno) == (__file__, issued)
    assert error.stack[-1][0] != __file__ or error.stack[0][1] > 0
    assert (error.remote_type, error.remote_message) == ("IndexError", "index out of range in self")
    text = str(error)
    assert text.startswith(f"{error.op}{error.shapes} failed on worker 0: IndexError: index out of range in self")
    assert f'File "{__file__}", line {issued}, in test_an_index_out_of_range_names_everything' in text


def test_it_names_the_worker() -> None:
    bad = F.embedding(computed([9], "dtorch:1"), torch.rand(5, 3, device="dtorch:1"))
    with pytest.raises(dtorch.RemoteError) as caught:
        bad.cpu()
    assert caught.value.worker == 1
    assert "failed on worker 1" in str(caught.value)


class Model(nn.Module):
    """A model as programs have them: the line that matters is two calls down."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, 3)
        self.line = 0

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        self.line = line() + 1
        x = self.table(ids)
        return x * 2


def test_a_line_behind_a_module_of_torch_is_the_programs() -> None:
    model = Model().to("dtorch")
    out = model(computed([0, 9]))
    called = line() - 1
    with pytest.raises(dtorch.RemoteError) as caught:
        out.cpu()
    error = caught.value
    assert (error.filename, error.lineno) == (__file__, model.line)
    stack = [frame for frame in error.stack if frame[0] == __file__]
    assert stack[0][1:] == (model.line, "forward")
    assert stack[1][1:] == (called, "test_a_line_behind_a_module_of_torch_is_the_programs")
    assert f"line {called}, in test_a_line_behind" in str(error)


def test_two_lines_of_a_loop_are_told_apart() -> None:
    """SITE-1: the same operator on the same shapes, on two lines, in many rounds."""
    table = dtorch.rand(5, 3)
    good, bad = computed([1]), computed([5])
    for round_ in range(20):
        results = []
        results.append(F.embedding(bad if round_ % 2 else good, table))
        first = line() - 1
        results.append(F.embedding(good if round_ % 2 else bad, table))
        second = line() - 1
        failed, fine = (0, 1) if round_ % 2 else (1, 0)
        with pytest.raises(dtorch.RemoteError) as caught:
            results[failed].cpu()
        assert caught.value.lineno == (first, second)[failed]
        assert torch.equal(results[fine].cpu(), table[1:2].cpu())


def test_two_calls_on_one_line_and_a_statement_of_several_lines() -> None:
    table, good, bad = dtorch.rand(5, 3), computed([1]), computed([5])
    start = line()
    # fmt: off
    result = (
        F.embedding(good, table)
        + F.embedding(
            bad, table
        )
    )
    # fmt: on
    with pytest.raises(dtorch.RemoteError) as caught:
        result.cpu()
    assert caught.value.lineno == start + 4


@pytest.mark.parametrize(
    "ask",
    [
        lambda t: t.cpu(),
        lambda t: t.to_torch(),
        lambda t: t.to_torch_async().get(),
        lambda t: t.sum().item(),
        lambda t: bool(t.any()),
        lambda t: t.tolist(),
        lambda t: str(t),
        lambda t: asyncio.run(_await(t)),
        lambda t: dtorch.synchronize(),
        lambda t: torch.accelerator.synchronize(),
        lambda t: t.nonzero(),
        lambda t: t[t > 0],
        lambda t: t.to("dtorch:1").cpu(),
        lambda t: torch.zeros(1, 3).copy_(t),
        lambda t: torch.equal(t, t),
    ],
    ids=[
        "cpu", "to_torch", "future", "item", "bool", "tolist", "print", "await", "synchronize", "accelerator",
        "nonzero", "mask", "other_worker", "copy", "equal",
    ],
)  # fmt: skip
def test_wherever_the_value_is_asked_for_the_cause_is_raised(ask: Callable[[torch.Tensor], Any]) -> None:
    bad = F.embedding(computed([5]), dtorch.rand(5, 3))
    issued = line() - 1
    with pytest.raises(dtorch.RemoteError) as caught:
        ask(bad)
    assert (caught.value.op, caught.value.filename, caught.value.lineno) == ("aten::embedding", __file__, issued)


async def _await(t: torch.Tensor) -> torch.Tensor:
    return await t  # type: ignore[misc, no-any-return]


def test_exe3_what_depends_on_it_carries_the_same_cause_and_what_does_not_is_good() -> None:
    x = dtorch.ones(5, 3)
    bad = F.embedding(computed([5]), x)
    issued = line() - 1
    after = x + 1
    dependents = {
        "operator": bad * 2,
        "view": bad.t(),
        "mixed": after + bad,
        "several results": torch.max(bad, 1)[1],
        "list of results": bad.sum(0).split(1)[2],
        "chain": ((bad + 1).exp() @ after.t()).sum(),
        "written in place": after.clone().add_(bad),
        "other worker": (bad + 1).to("dtorch:1") * 2,
    }
    sneaky = after.clone()
    sneaky[0].copy_(bad[0])
    for name, t in {**dependents, "written through a view": sneaky}.items():
        with pytest.raises(dtorch.RemoteError) as caught:
            t.cpu()
        assert (caught.value.op, caught.value.lineno) == ("aten::embedding", issued), name
    assert torch.equal(after.cpu(), torch.full((5, 3), 2.0))
    assert torch.equal((after * x).cpu(), torch.full((5, 3), 2.0))
    assert x.to("dtorch:1").sum().item() == 15.0


def test_exe3_an_in_place_operator_that_fails_leaves_no_value() -> None:
    x = dtorch.zeros(4)
    other = x.clone()
    x.index_add_(0, computed([7]), dtorch.ones(1))
    issued = line() - 1
    with pytest.raises(dtorch.RemoteError) as caught:
        x.cpu()
    assert caught.value.lineno == issued
    assert other.tolist() == [0.0] * 4


def test_an_upload_makes_a_failed_tensor_good_again() -> None:
    bad = F.embedding(computed([5]), dtorch.rand(5, 3))
    fresh = dtorch.empty(1, 3)
    fresh.copy_(torch.ones(1, 3))
    assert fresh.tolist() == [[1.0] * 3]
    with pytest.raises(dtorch.RemoteError):
        bad.cpu()


def test_synchronize_reports_a_failure_once() -> None:
    bad = F.embedding(computed([5]), dtorch.rand(5, 3))
    worse = bad + 1
    with pytest.raises(dtorch.RemoteError):
        dtorch.synchronize()
    dtorch.synchronize()
    # The values stay failed.
    for t in (bad, worse):
        with pytest.raises(dtorch.RemoteError):
            t.cpu()
    dtorch.synchronize()


def test_synchronize_does_not_repeat_what_was_raised_already() -> None:
    bad = F.embedding(computed([5]), dtorch.rand(5, 3))
    with pytest.raises(dtorch.RemoteError):
        bad.cpu()
    dtorch.synchronize()


def test_synchronize_asks_every_worker() -> None:
    keep = F.embedding(torch.tensor([5], device="dtorch:1"), torch.rand(5, 3, device="dtorch:1"))
    dtorch.synchronize(0)
    with pytest.raises(dtorch.RemoteError):
        dtorch.synchronize()
    del keep


def test_synchronize_reports_a_failure_whose_tensor_is_gone() -> None:
    F.embedding(computed([5]), dtorch.rand(5, 3))
    issued = line() - 1
    with pytest.raises(dtorch.RemoteError) as caught:
        dtorch.synchronize()
    assert caught.value.lineno == issued


def test_two_failures_have_each_their_own_cause() -> None:
    table = dtorch.rand(5, 3)
    table.index_select(0, dtorch.tensor([1]))  # its geometry is known from here on
    first = F.embedding(computed([5]), table)
    line1 = line() - 1
    second = table.index_select(0, computed([8]))
    line2 = line() - 1
    both = torch.cat([first, second])
    seen = []
    for t in (second, first, both):
        with pytest.raises(dtorch.RemoteError) as caught:
            t.cpu()
        seen.append((caught.value.op, caught.value.lineno))
    assert seen == [("aten::index_select", line2), ("aten::embedding", line1), ("aten::embedding", line1)]


@pytest.mark.parametrize(
    ("operate", "remote_type"),
    [
        (lambda: dtorch.rand(5, 3)[dtorch.tensor([5])], "IndexError"),
        (lambda: dtorch.rand(5, 3)[torch.tensor([5])], "IndexError"),
        (lambda: torch.gather(dtorch.rand(3, 4), 1, dtorch.tensor([[9]])), "RuntimeError"),
        (lambda: torch.zeros(3, device="dtorch").scatter_(0, dtorch.tensor([9]), 1.0), "RuntimeError"),
        (lambda: dtorch.zeros(3).index_fill_(0, dtorch.tensor([9]), 1.0), "IndexError"),
        (lambda: F.cross_entropy(dtorch.rand(2, 3), dtorch.tensor([0, 7])), "IndexError"),
        (lambda: torch.take(dtorch.rand(4), dtorch.tensor([9])), "IndexError"),
        (lambda: dtorch.tensor([1, 2]) // dtorch.tensor([0, 1]), "RuntimeError"),
        (lambda: dtorch.zeros(3).bernoulli_(dtorch.tensor([2.0, 2.0, 2.0])), "RuntimeError"),
        (lambda: torch.linalg.cholesky(dtorch.zeros(3, 3)), "LinAlgError"),
        (lambda: torch.multinomial(dtorch.tensor([-1.0, 2.0]), 1), "RuntimeError"),
    ],
    ids=["index", "cpu_index", "gather", "scatter", "index_fill", "cross_entropy", "take", "division", "bernoulli",
         "cholesky", "multinomial"],
)  # fmt: skip
def test_mistakes_in_the_data_are_eagers_mistakes(operate: Callable[[], torch.Tensor], remote_type: str) -> None:
    for _ in range(2):  # the first time it may be asked, the second time the geometry is known
        with pytest.raises((RuntimeError, IndexError)) as caught:
            operate().cpu()
        if isinstance(caught.value, dtorch.RemoteError):
            assert caught.value.remote_type == remote_type
            assert caught.value.filename == __file__
        else:
            assert type(caught.value).__name__.lstrip("_") == remote_type


# -- backward


def test_site2_a_failing_backward_names_the_line_of_its_forward() -> None:
    dtorch.rand(4).index_select(0, dtorch.tensor([0, 1, 2, 3]))  # its geometry is known from here on
    x = dtorch.rand(4).requires_grad_()
    y = FailsInBackward.apply(x * 2)
    z = (y * dtorch.rand(4)).sum()
    with pytest.raises(dtorch.RemoteError) as caught:
        z.backward()
        x.grad.cpu()
    assert (caught.value.op, caught.value.filename) == ("aten::index_select", __file__)
    assert caught.value.lineno == FailsInBackward.line


class FailsInBackward(torch.autograd.Function):
    """Its backward runs Python code, whose own line is the one to be named."""

    line = 0

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        FailsInBackward.line = line() + 1
        return grad.index_select(0, torch.tensor([0, 1, 2, 9], device=grad.device))


def test_site2_native_backward_operators_name_the_line_of_their_forward() -> None:
    """The indices are overwritten behind autograd's back, so that only the backward meets the bad one."""
    values = dtorch.rand(5).requires_grad_()
    ids = computed([0, 1])
    other = values.exp()
    taken = values.index_select(0, ids)
    issued = line() - 1
    ids.data.fill_(9)
    loss = taken.sum() + other.sum()
    loss.backward()
    with pytest.raises(dtorch.RemoteError) as caught:
        values.grad.cpu()
    error = caught.value
    assert error.op.startswith("aten::index_add")
    assert (error.filename, error.lineno) == (__file__, issued)
    assert f'issued at the backward of the operator at File "{__file__}", line {issued}' in str(error)
    assert torch.equal(loss.detach().cpu(), (taken.sum() + other.sum()).detach().cpu())


# -- threads


def test_a_second_threads_mistakes_name_its_own_lines() -> None:
    table = dtorch.rand(5, 3)
    lines: dict[int, int] = {}
    results: dict[int, list[torch.Tensor]] = {0: [], 1: []}
    start = threading.Barrier(2)

    def first() -> None:
        start.wait()
        for i in range(50):
            lines[0] = line() + 1
            results[0].append(F.embedding(computed([5 if i == 49 else 0]), table))

    def second() -> None:
        start.wait()
        for i in range(50):
            lines[1] = line() + 1
            results[1].append(F.embedding(computed([5 if i == 49 else 1]), table))

    threads = [threading.Thread(target=f) for f in (first, second)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    for i, function in ((0, "first"), (1, "second")):
        with pytest.raises(dtorch.RemoteError) as caught:
            results[i][49].cpu()
        assert (caught.value.lineno, caught.value.stack[_own(caught.value)][2]) == (lines[i], function)
        assert torch.equal(results[i][48].cpu(), table[i : i + 1].cpu())


def _own(error: dtorch.RemoteError) -> int:
    return next(i for i, frame in enumerate(error.stack) if frame[0] == __file__)


def test_code_that_is_gone_is_still_named() -> None:
    """SITE-1: a function compiled, called once and dropped; others then take its memory."""
    table, bad = dtorch.rand(5, 3), computed([5])
    failed = []
    for i in range(30):
        scope: dict[str, Any] = {"F": F}
        exec(compile("\n" * i + "def f(t, b): return F.embedding(b, t)", f"generated_{i}.py", "exec"), scope)
        failed.append(scope["f"](table, bad))
    for i, t in enumerate(failed):
        with pytest.raises(dtorch.RemoteError) as caught:
            t.cpu()
        assert (caught.value.filename, caught.value.lineno) == (f"generated_{i}.py", i + 1)


# -- what cannot be on the device, and what does not go together


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]).to("dtorch"),
        lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], device="dtorch") * 2,
        lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8).to("dtorch"),
        lambda: torch.quantize_per_tensor(dtorch.ones(3), 0.1, 0, torch.qint8),
        lambda: torch.empty(3, dtype=torch.qint8, device="dtorch"),
    ],
    ids=["nested_moved", "nested", "quantized_moved", "quantize", "quantized_empty"],
)
@pytest.mark.filterwarnings("ignore:.*(beta|prototype) st")
def test_unsupported_kinds_of_tensors_say_so_and_name_the_way_out(make: Callable[[], object]) -> None:
    with pytest.raises((NotImplementedError, RuntimeError)) as caught:
        make()
    message = str(caught.value)
    assert "dtorch" in message
    assert re.search(r"dequantize|to_padded_tensor|on the CPU|to the CPU", message), message
    assert len(message) < 1000, "not PyTorch's list of every backend"
    assert (dtorch.ones(2) + 1).tolist() == [2.0, 2.0]


@pytest.mark.parametrize(
    "mix",
    [
        lambda a, b: a + b,
        lambda a, b: b + a,
        lambda a, b: a @ b,
        lambda a, b: a.mul_(b),
        lambda a, b: F.linear(a, b),
        lambda a, b: torch.cat([a, b]),
        lambda a, b: torch.where(a > 0, a, b),
        lambda a, b: F.layer_norm(a, (3,), b[0], b[1]),
        lambda a, b: F.scaled_dot_product_attention(a[None], b[None], b[None]),
        lambda a, b: torch.add(a, a, out=b),
        lambda a, b: torch._foreach_add([a], [b]),
        lambda a, b: F.conv2d(a[None, None], b[None, None]),
    ],
    ids=["add", "add_reversed", "matmul", "in_place", "linear", "cat", "where", "layer_norm", "attention", "out",
         "foreach", "conv"],
)  # fmt: skip
@pytest.mark.parametrize("other", ["dtorch:1", "cpu"])
def test_tensors_of_two_devices_do_not_mix(mix: Callable[[torch.Tensor, torch.Tensor], object], other: str) -> None:
    a, b = torch.ones(3, 3, device="dtorch:0"), torch.ones(3, 3, device=other)
    with pytest.raises(RuntimeError, match="same device") as caught:
        mix(a, b)
    assert "dtorch:0" in str(caught.value)
    assert other in str(caught.value)
    dtorch.synchronize()
    assert torch.equal(a.cpu(), torch.ones(3, 3))


@pytest.mark.parametrize("index", ["dtorch:1", "dtorch:0"])
def test_an_index_of_the_wrong_worker_is_told(index: str) -> None:
    x = torch.ones(3, device="dtorch:0" if index == "dtorch:1" else "dtorch:1")
    with pytest.raises(RuntimeError, match="device"):
        x[torch.tensor([1], device=index)]


def test_a_worker_that_is_not_there_is_told() -> None:
    for call in (
        lambda: torch.ones(3, device="dtorch:7"),
        lambda: torch.ones(3).to("dtorch:7"),
        lambda: dtorch.ones(3).to("dtorch:7"),
        lambda: dtorch.set_device(7),
    ):
        with pytest.raises(RuntimeError, match=r"dtorch:7 does not exist: the engine has 2 workers"):
            call()
    assert dtorch.current_device() == 0


# -- memory


def test_a_worker_that_cannot_allocate_lives_on() -> None:
    x = dtorch.ones(3)
    n = dtorch.worker_stats()["machine"] // 4 - 1024  # float32: all the memory there is
    y = torch.exp(dtorch.zeros(1).expand(n)).sum()
    issued = line() - 1
    with pytest.raises(dtorch.OutOfMemoryError) as caught:
        y.cpu()
    assert isinstance(caught.value, MemoryError)
    assert caught.value.op == "aten::exp"
    assert (caught.value.filename, caught.value.lineno) == (__file__, issued)
    assert f"tried to allocate {4 * n} bytes" in str(caught.value)
    with pytest.raises(dtorch.OutOfMemoryError) as caught:
        dtorch.zeros(n).sum().item()
    issued = line() - 1
    assert (caught.value.filename, caught.value.lineno) == (__file__, issued)
    assert (x + 1).tolist() == [2.0] * 3


def test_a_tensor_larger_than_the_machine_is_refused_at_once() -> None:
    with pytest.raises(
        dtorch.OutOfMemoryError, match=rf"a tensor of {4 << 44} bytes cannot be made: the machine has \d+ bytes"
    ):
        dtorch.empty(1 << 44)
    with pytest.raises(MemoryError):
        dtorch.ones(1).expand(1 << 44) + 1


def test_values_are_still_eagers_after_all_that() -> None:
    def program(on: Device) -> list[torch.Tensor]:
        layer = on.module(lambda: nn.Linear(4, 3))
        loss = layer(on(5, 4)).pow(2).sum()
        loss.backward()
        return [loss, layer.weight.grad]

    assert_same(program(Device("dtorch")), program(Device("cpu")))

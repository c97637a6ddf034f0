"""What an operator costs by size: add, mul, mm, layer_norm and SDPA from one element to 64 MiB, beside PyTorch.

stream   a loop that issues the operator again and again: time until all of it is computed, per operator. For dtorch
         also the client's part, the time until the loop has returned.
value    one operator and its value on the CPU. PyTorch has it at once; dtorch asks a worker and waits for the answer.
stages   the same stream with the smallest size, as processor time per record: of the client's script thread, its other
         threads, the controller, and the worker, beside PyTorch's.

The size is the result's; mm multiplies by a square matrix of at most 1024 rows, layer_norm normalizes rows of at most
1024, SDPA has heads of 64 and 128 tokens, and grows in heads and batch. Both sides use the same number of threads. A
round takes each side about --budget milliseconds, so large operators are few: the least is 3.

Cores of a shared machine differ in speed from one second to the next, and PyTorch computes on one while the worker
computes on another. --same-core holds PyTorch's stream and the worker to one and the same, dtorch's client to the rest.

    dtorch bench op_overhead [--op add --op mm] [--size 4 --size 1048576] [--budget 40] [--records 50000] [--same-core]
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import _bench
import _plot
import torch
from _bench import KIB, MIB, Row, Side, Table, size_text
from torch.nn import functional as F

import dtorch
from dtorch.client import engine

SIZES = (4, KIB, 16 * KIB, 256 * KIB, MIB, 4 * MIB, 16 * MIB, 32 * MIB, 64 * MIB)
US = 1e6
CORES = os.sched_getaffinity(0)
#: The least and the most operators of a round.
FEW, MANY = 3, 1_000_000

# --- the operators: each gives a function of no arguments that issues one, its operands on a device ------------------

Operator = Callable[[], torch.Tensor]


def _matrix(n: int) -> tuple[int, int]:
    """Rows and columns of n elements, at most 1024 columns."""
    columns = 1
    while columns < 1024 and columns * columns * 4 <= n:
        columns *= 2
    return n // columns, columns


def _add(n: int, device: str) -> Operator:
    a, b = torch.ones(n, device=device), torch.ones(n, device=device)
    return lambda: a + b


def _mul(n: int, device: str) -> Operator:
    a, b = torch.ones(n, device=device), torch.ones(n, device=device)
    return lambda: a * b


def _mm(n: int, device: str) -> Operator:
    rows, columns = _matrix(n)
    a, b = torch.ones(rows, columns, device=device), torch.ones(columns, columns, device=device)
    return lambda: torch.mm(a, b)


def _layer_norm(n: int, device: str) -> Operator:
    rows, columns = _matrix(n)
    x = torch.rand(rows, columns).to(device)
    weight, bias = torch.ones(columns, device=device), torch.ones(columns, device=device)
    return lambda: F.layer_norm(x, (columns,), weight, bias)


def _sdpa(n: int, device: str) -> Operator:
    head = min(64, n)
    tokens = min(128, n // head)
    heads = min(8, n // head // tokens)
    shape = (n // head // tokens // heads, heads, tokens, head)
    q, k, v = (torch.rand(shape).to(device) for _ in range(3))
    return lambda: F.scaled_dot_product_attention(q, k, v)


OPERATORS: dict[str, Callable[[int, str], Operator]] = {
    "add": _add,
    "mul": _mul,
    "mm": _mm,
    "layer_norm": _layer_norm,
    "sdpa": _sdpa,
}

# --- measuring -------------------------------------------------------------------------------------------------------


def hold(side: str) -> None:
    """Where this thread runs while ``side`` streams: PyTorch where the worker computes, dtorch's client elsewhere."""
    core = max(CORES)
    os.sched_setaffinity(0, {core} if side == "eager" else (CORES - {core} or CORES))
    running = engine.current()
    assert running is not None
    for thread in os.listdir(f"/proc/{running.pids()['worker-0']}/task"):
        os.sched_setaffinity(int(thread), {core})


def stream(operator: Operator, count: int, side: Side) -> dict[str, float]:
    """Microseconds an operator, until the loop has returned and until all is computed."""
    start = time.perf_counter()
    for _ in range(count):
        result = operator()
    issued = time.perf_counter() - start
    side.wait()
    total = time.perf_counter() - start
    del result
    return {"client": issued / count * US, "stream": total / count * US}


def value(operator: Operator, count: int) -> dict[str, float]:
    """Microseconds from the operator's call until its value is on the CPU."""
    total = 0.0
    for _ in range(count):
        seconds, _result = _bench.timed(lambda: operator().cpu())
        total += seconds
        del _result
    return {"value": total / count * US}


def one_size(name: str, nbytes: int, sides: dict[str, Side], args: Any) -> list[Row]:
    """The rows of one operator at one size."""
    issue = {side: OPERATORS[name](nbytes // 4, sides[side].device) for side in sides}
    sides["dtorch"].wait()
    issue["eager"]()
    one = stream(issue["eager"], FEW, sides["eager"])["stream"]
    count = max(FEW, min(MANY, int(args.budget * 1000 / one)))
    trips = max(FEW, min(100, count))

    def timed(side: str) -> dict[str, float]:
        if args.same_core:
            hold(side)
        return stream(issue[side], count, sides[side])

    work = {side: lambda side=side: timed(side) for side in sides}
    streams = _bench.alternate(args.rounds, work)
    values = _bench.alternate(args.rounds, {side: lambda side=side: value(issue[side], trips) for side in sides})
    case = f"{name} {size_text(nbytes)}"
    eager, ours = streams["eager"], streams["dtorch"]
    return [
        Row(case, "stream", "us", eager["stream"], ours["stream"], nbytes),
        Row(case, "stream, client", "us", eager["stream"], ours["client"], nbytes),
        Row(case, "value", "us", values["eager"]["value"], values["dtorch"]["value"], nbytes),
    ]


def stages(name: str, nbytes: int, sides: dict[str, Side], args: Any) -> list[Row]:
    """Processor time per record, by process."""
    running = engine.current()
    assert running is not None
    controller, worker = running.pids()["controller"], running.pids()["worker-0"]
    me = Path("/proc/self").resolve().name
    pids = {"client": int(me), "controller": controller, "worker": worker}
    issue = {side: OPERATORS[name](nbytes // 4, sides[side].device) for side in sides}

    def eager() -> dict[str, float]:
        before = _bench.cpu_seconds(pids["client"])
        stream(issue["eager"], args.records, sides["eager"])
        after = _bench.cpu_seconds(pids["client"])
        return {"all": (after["main"] - before["main"]) / args.records * US}

    def ours() -> dict[str, float]:
        before = {process: _bench.cpu_seconds(pid) for process, pid in pids.items()}
        stream(issue["dtorch"], args.records, sides["dtorch"])
        found = {}
        for process, pid in pids.items():
            for thread, seconds in _bench.cpu_seconds(pid).items():
                found[f"{process}, {thread}"] = (seconds - before[process][thread]) / args.records * US
        return found

    found = _bench.alternate(args.rounds, {"eager": eager, "dtorch": ours})
    case = f"{name}, CPU time"
    return [Row(case, what, "us", found["eager"]["all"], values, nbytes) for what, values in found["dtorch"].items()]


def draw(path: Path, about: str, table: Table, names: list[str]) -> None:
    """Ratios above, times in the middle, stages below."""
    by_size: list[_plot.Lines | _plot.Bars] = []
    times: list[_plot.Lines | _plot.Bars] = []
    bars: list[_plot.Lines | _plot.Bars] = []
    for name in names:
        rows = [row for row in table.rows if row.case.startswith(f"{name} ")]
        of = {what: [row for row in rows if row.what == what] for what in ("stream", "stream, client", "value")}
        ratios = {"dtorch": _plot.curve(of["stream"], "ratios")}
        panel = _plot.Lines(f"{name}: a stream", "bytes", "dtorch / PyTorch", ratios, size_text, logy=False, one=True)
        panel.floor = 0
        by_size.append(panel)
        curves = {"PyTorch": _plot.curve(of["stream"], "eager"), "dtorch": _plot.curve(of["stream"], "dtorch")}
        curves["dtorch, client alone"] = _plot.curve(of["stream, client"], "dtorch")
        curves["dtorch, with its value"] = _plot.curve(of["value"], "dtorch")
        times.append(_plot.Lines(f"{name}: time", "bytes", "us per operator", curves, size_text))
        parts = [row for row in table.rows if row.case == f"{name}, CPU time"]
        if parts:
            shown = [
                ("PyTorch", _bench.spread(parts[0].eager)),
                *((row.what, _bench.spread(row.dtorch)) for row in parts),
            ]
            known = [(label, found) for label, found in shown if found]
            bars.append(
                _plot.Bars(f"{name}: processor time", "us per record", known, colors=["#777777"] + ["#1f77b4"] * 6)
            )
    _plot.draw(path, "What an operator costs", about, by_size + times + bars, columns=len(names))


def main() -> None:
    parser = _bench.parser(__doc__ or "", rounds=3)
    parser.add_argument("--op", action="append", choices=OPERATORS, help="may be repeated; default: all")
    parser.add_argument("--size", action="append", type=int, help="bytes of the result; may be repeated")
    parser.add_argument("--budget", type=float, default=40, help="milliseconds of PyTorch's time a round (default 40)")
    parser.add_argument("--records", type=int, default=50_000, help="of a round of the stages; 0: none (default 50000)")
    parser.add_argument("--same-core", action="store_true", help="both sides compute on one core, by turns")
    args = parser.parse_args()
    names = args.op or list(OPERATORS)
    sides = _bench.start(args)
    about = _bench.describe(args.threads, args.device)
    table = Table([about])
    with torch.no_grad():
        for name in names:
            for nbytes in args.size or SIZES:
                table.add(*one_size(name, nbytes, sides, args))
        for name in names if args.records else ():
            table.add(*stages(name, min(args.size or SIZES), sides, args))
    dtorch.shutdown()
    table.save(args.out / "op_overhead.csv", about)
    draw(args.out / "op_overhead.png", about, table, names)


if __name__ == "__main__":
    main()

"""Memory of PyTorch beside dtorch, counted alike on both sides.

Each contender runs each case in a process of its own (`_contenders` says how bytes are counted: every byte that
PyTorch's CPU allocator hands out, on both sides by the same allocator; the resident size by the kernel's own marks).
dtorch's figures depend on how far the client is ahead, so there are rounds, in alternating order. Below 1 dtorch needs
less.

The cases:

four_lines     ``a = rand(n); b = op(a); c = op(b); d = op(c); return d``: the peak in tensors of 32 MiB. Eager holds 4.
               "first" is the first call, where the client has never seen these shapes; "idle" a later one on an idle
               worker; "busy" one on a worker that multiplies matrices meanwhile. sin is pointwise, softmax and cumsum
               are not.
sd3_tiny       the example's Stable Diffusion 3 on one worker: the peak above the weights, of the first picture and of
sd3_small      the second; the resident size is the second's, and not given for tiny, which has a megabyte to grow.
sd3_medium     the sizes of SD3-medium in bfloat16, whole peak with the weights (15 GiB; not run by default). A picture
               of 256 pixels in one step, once: more takes a CPU hours and the peak is the weights'.
llama_forward  a forward pass of a small Llama without a cache, under no_grad: the peak above the weights. With all
               logits, which are most of the peak, and with the last token's only.
training       SGD and AdamW steps of that Llama, all equal: the peak with the weights after 1, 2 and 10 steps, never
               reset. AdamW makes its state in the first step, so its second peaks higher; no later one may.
fragmentation  bytes reserved from the operating system by allocated bytes, both at their peaks.
fetch          256 MiB brought to the client: how much the client's own memory grows (private pages, and Pss, which
               halves what two processes share) when the value is there, when all of it has been read, when all of it
               has been written. In eager PyTorch ``.cpu()`` does nothing; the figure is ``.to("cpu", copy=True)``'s.

    dtorch bench memory [--case sd3_small --case fetch] [--rounds 3]
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from typing import Any

import _bench
import _contenders
import _plot
from _bench import MIB, Row, Table
from _contenders import Engine, measure, rollup_bytes, run_contender

Rows = list[tuple[str, float, str]]  # what, value, unit

# --- the cases, in a contender's process -----------------------------------------------------------------------------


def four_lines(engine: Engine) -> Rows:
    import torch

    shape = (8192, 1024)
    nbytes = 4 * shape[0] * shape[1]
    x = torch.full((1500, 1500), 1e-4, device=engine.device)
    y = x.clone()
    softmax, cumsum = functools.partial(torch.softmax, dim=-1), functools.partial(torch.cumsum, dim=-1)

    def lines(op: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        a = torch.rand(shape, device=engine.device)
        b = op(a)
        c = op(b)
        d = op(c)
        return d  # noqa: RET504 (four lines, four names)

    def behind(op: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        if not engine.eager:
            for _ in range(15):  # 7 thousand million additions and multiplications each, no new memory
                torch.mm(x, x, out=y)
        return lines(op)

    rows: Rows = []
    for name, op in (("sin", torch.sin), ("softmax", softmax), ("cumsum", cumsum)):
        for when, work in (("first", lines), ("idle", lines), ("busy", behind)):
            reading, held = measure(engine, lambda work=work, op=op: work(op))
            del held
            rows.append((f"{name}, {when}", reading.above / nbytes, "tensors"))
    return rows


def sd3(engine: Engine, preset: str) -> Rows:
    from _models import StableDiffusion

    draw = StableDiffusion(preset, engine.name)
    first, picture = measure(engine, draw)
    del picture
    second, _picture = measure(engine, draw)
    rows: Rows = [
        ("weights", first.base / MIB, "MiB"),
        ("peak above them, first picture", first.above / MIB, "MiB"),
        ("peak above them, second picture", second.above / MIB, "MiB"),
        ("whole peak", max(first.peak, second.peak) / MIB, "MiB"),
    ]
    return rows if preset == "tiny" else [*rows, ("resident growth", second.resident / MIB, "MiB")]


def sd3_medium(engine: Engine) -> Rows:
    import torch
    from _models import StableDiffusion

    draw = StableDiffusion("medium", engine.name, torch.bfloat16, size=256, steps=1)
    reading, _picture = measure(engine, draw)
    return [("weights", reading.base / MIB, "MiB"), ("whole peak", reading.peak / MIB, "MiB")]


def llama_forward(engine: Engine) -> Rows:
    from _models import LlamaForward

    rows: Rows = []
    for what, last_only in (("all logits", False), ("last logits", True)):
        forward = LlamaForward(engine.device, last_only)
        first, logits = measure(engine, forward)
        del logits
        second, logits = measure(engine, forward)
        del logits
        rows += [
            (f"{what}: peak, first", first.above / MIB, "MiB"),
            (f"{what}: peak, second", second.above / MIB, "MiB"),
            (f"{what}: resident growth", second.resident / MIB, "MiB"),
        ]
    return rows


def training(engine: Engine) -> Rows:
    import torch
    from _models import LlamaTraining

    rows: Rows = []
    for optimizer in (torch.optim.SGD, torch.optim.AdamW):
        name = optimizer.__name__
        step = LlamaTraining(engine.device, optimizer)
        engine.wait()
        engine.reset()
        peaks: dict[int, int] = {}
        done = 0
        for steps in (1, 2, 10):
            for _ in range(steps - done):
                step()
            done = steps
            engine.wait()
            peaks[steps] = engine.stats()["peak"]
        del step
        for steps, peak in peaks.items():
            rows.append((f"{name}: peak after {steps} step{'s' if steps > 1 else ''}", peak / MIB, "MiB"))
        rows.append((f"{name}: 10 steps / 1 step", peaks[10] / peaks[1], ""))
        rows.append((f"{name}: 10 steps / 2 steps", peaks[10] / peaks[2], ""))
    return rows


def fragmentation(engine: Engine) -> Rows:
    from _models import StableDiffusion, llama, tokens

    def ratio(work: Callable[[], Any]) -> float:
        work()
        reading, _held = measure(engine, work)
        return reading.peak_reserved / reading.peak

    def decode() -> float:
        model = llama().to(engine.device)
        prompt = tokens(4, 64).to(engine.device)
        options = {"attention_mask": prompt != 0, "max_new_tokens": 96, "do_sample": False, "use_cache": True}
        return ratio(lambda: model.generate(prompt, **options))

    growing = decode()
    draw = StableDiffusion("small", engine.name)
    return [("decode with a growing cache", growing, ""), ("sd3_small", ratio(draw), "")]


def fetch(engine: Engine) -> Rows:
    import torch

    def private() -> int:
        return rollup_bytes("Private_Clean", "Private_Dirty")

    x = torch.rand(64 * MIB, device=engine.device)
    torch.zeros(1 << 20).sum(), torch.zeros(1 << 20).add_(1)  # the code and its threads are there
    small = x[: 1 << 20].cpu()
    engine.wait()
    del small
    before, pss = private(), rollup_bytes("Pss")
    value = x.to("cpu", copy=True) if engine.eager else x.cpu()
    rows: Rows = []
    for what, touch in (
        ("fetched", lambda: None),
        ("read", lambda: value.sum().item()),
        ("written", lambda: value.add_(1)),
    ):
        touch()
        rows += [
            (f"private growth, {what}", (private() - before) / MIB, "MiB"),
            (f"Pss growth, {what}", (rollup_bytes("Pss") - pss) / MIB, "MiB"),
        ]
    return rows


CASES: dict[str, Callable[[Engine], Rows]] = {
    "four_lines": four_lines,
    "sd3_tiny": lambda engine: sd3(engine, "tiny"),
    "sd3_small": lambda engine: sd3(engine, "small"),
    "sd3_medium": sd3_medium,
    "llama_forward": llama_forward,
    "training": training,
    "fragmentation": fragmentation,
    "fetch": fetch,
}
LARGE = ("sd3_medium",)  # only when named, and once

# --- the parent ------------------------------------------------------------------------------------------------------


def run_case(case: str, rounds: int, threads: int) -> tuple[list[Row], dict[str, str]]:
    """The case's rows of the table, and the versions used."""
    rows: dict[str, Row] = {}
    used: dict[str, str] = {}
    for _, contender in _bench.turns(rounds):
        answer = run_contender(contender, "--case", case, "--threads", str(threads))
        used |= answer["versions"]
        for what, value, unit in answer["rows"]:
            row = rows.setdefault(what, Row(case, what, unit))
            (row.eager if contender == "eager" else row.dtorch).append(value)
    return list(rows.values()), used


def main() -> None:
    parser = _bench.parser(__doc__ or "", rounds=3, device=False)
    parser.add_argument("--case", action="append", choices=CASES, help="may be repeated; default: all but sd3_medium")
    _contenders.add_argument(parser)
    args = parser.parse_args()
    if args.contender:
        engine = Engine(args.contender, args.threads)
        print(json.dumps({"rows": CASES[args.case[0]](engine), "versions": _bench.versions()}))
        return

    table = Table()
    used: dict[str, str] = {}
    for case in args.case or [name for name in CASES if name not in LARGE]:
        rows, found = run_case(case, 1 if case in LARGE else args.rounds, args.threads)
        used |= found
        table.add(*rows)
    about = _bench.describe(args.threads, used=used)
    print(about)
    table.save(args.out / "memory.csv", about)
    panel = _plot.ratio_bars("Below 1 dtorch needs less", table.rows)
    _plot.draw(args.out / "memory.png", "Memory of dtorch beside PyTorch", about, [panel])


if __name__ == "__main__":
    main()

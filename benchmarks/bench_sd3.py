"""Stable Diffusion 3 beside PyTorch: the client's time, the time to the picture, and the peak of memory.

client       until the Python code that draws the picture has returned. In PyTorch that is the picture's time.
end to end   until the picture is on the CPU.
memory       the peak with the weights, on one worker; both sides in processes of their own, counted alike (as
             `dtorch bench memory` does, which has more about it).

The pipeline is diffusers' own, unmodified, its weights random. PyTorch gets as many threads as all workers together:
with two workers, of which one has little to do, it may compute with twice as many at a time. Preset tiny is bound by
Python, preset small by the operators.

    dtorch bench sd3 [--preset tiny --preset small] [--workers 1] [--rounds 3] [--no-memory]
"""

from __future__ import annotations

import argparse
import json
import time

import _bench
import _contenders
import _plot
from _bench import MIB, SIDES, Row, Table

PRESETS = ("tiny", "small")


def times(preset: str, sides: dict[str, _bench.Side], args: argparse.Namespace) -> list[Row]:
    """Both times, by turns in this process."""
    import torch
    from _models import StableDiffusion

    models = {name: StableDiffusion(preset, name, workers=args.workers, eager_device=args.device) for name in sides}

    def draw(name: str) -> dict[str, float]:
        start = time.perf_counter()
        picture = models[name]()
        if name == "eager":
            sides[name].wait()
        client = time.perf_counter() - start
        picture.image.cpu()
        return {"client": client, "end to end": time.perf_counter() - start}

    torch.set_num_threads(args.threads * args.workers)
    found = _bench.alternate(args.rounds, {name: lambda name=name: draw(name) for name in sides})
    eager, ours = found["eager"], found["dtorch"]
    case = f"sd3 {preset}"
    return [
        Row(case, "client", "s", eager["client"], ours["client"]),
        Row(case, "end to end", "s", eager["end to end"], ours["end to end"]),
    ]


def peak(preset: str, args: argparse.Namespace) -> Row:
    """The peaks of one picture, each in a fresh process."""
    flags = ("--preset", preset, "--threads", str(args.threads), "--device", args.device)
    found = {side: _contenders.run_contender(side, *flags)["peak"] / MIB for side in SIDES}
    return Row(f"sd3 {preset}", "peak memory, 1 worker", "MiB", [found["eager"]], [found["dtorch"]])


def contend(args: argparse.Namespace) -> None:
    """Be one side of `peak`."""
    engine = _contenders.Engine(args.contender, args.threads, args.device)
    from _models import StableDiffusion

    model = StableDiffusion(args.preset[0], engine.name, eager_device=args.device)
    reading, _picture = _contenders.measure(engine, model)
    print(json.dumps({"peak": reading.peak}))


def main() -> None:
    parser = _bench.parser(__doc__ or "", rounds=3)
    parser.add_argument("--preset", action="append", choices=PRESETS, help="may be repeated; default: both")
    parser.add_argument("--workers", type=int, default=1, help="default 1")
    parser.add_argument("--no-memory", action="store_true", help="leave the peak of memory out")
    _contenders.add_argument(parser)
    args = parser.parse_args()
    if args.contender:
        return contend(args)

    presets = args.preset or list(PRESETS)
    table = Table()
    if not args.no_memory:
        table.add(*(peak(preset, args) for preset in presets))
    sides = _bench.start(args, args.workers)
    for preset in presets:
        table.add(*times(preset, sides, args))
    threads = f"PyTorch has {args.threads * args.workers} threads, {args.workers} workers {args.threads} each"
    about = f"{_bench.describe(args.threads, args.device)}, {threads}"
    print(about)
    table.save(args.out / "sd3.csv", about)
    _plot.draw(
        args.out / "sd3.png", "Stable Diffusion 3", about, [_plot.ratio_bars("Below 1 dtorch is better", table.rows)]
    )
    return None


if __name__ == "__main__":
    main()

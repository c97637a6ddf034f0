"""Llama beside PyTorch: the client's time, the time to the values, tokens a second in decoding, the peak of memory.

forward    one pass over --tokens tokens without a cache: until the Python code has returned, and until the logits are
           on the CPU.
training   one AdamW step on them, likewise; no value is asked for.
generate   transformers' generate(), greedy, one sequence: it asks for a value per token, so each token waits.
decode     the same by a loop of our own that keeps the tokens on the device and asks once, in the end; and how many
           results' geometries were new to the client in its first round and had to be inferred, as a growing cache
           makes them (the model's first call, which is in it, has the most).
memory     the peak of a training step with the weights, in processes of their own, counted alike.

The model is transformers' own, unmodified, its weights random; the default size is bound by Python.

    dtorch bench llama [--width 128] [--layers 4] [--tokens 32] [--new 64] [--rounds 5] [--no-memory]
"""

from __future__ import annotations

import argparse
import inspect
import json
import time
from typing import Any

import _bench
import _contenders
import _plot
from _bench import MIB, SIDES, Row, Side, Table

Figures = dict[str, float]


class Work:
    """The model on one side's device, and what is timed of it. Each piece returns seconds, or tokens a second."""

    def __init__(self, side: Side, args: argparse.Namespace) -> None:
        from _models import LlamaTraining, llama, tokens

        self._side = side
        self._new = args.new
        self._model = llama(args.width, args.layers).to(side.device)
        # transformers renames the argument
        self._cache = "cache" if "cache" in inspect.signature(self._model.forward).parameters else "past_key_values"
        self._tokens = tokens(1, args.tokens).to(side.device)
        self._mask = (self._tokens != 0).to(side.device)
        self._first: Figures | None = None
        self._step = LlamaTraining(side.device, model=llama(args.width, args.layers), batch=tokens(1, args.tokens))

    def forward(self) -> Figures:
        import torch

        start = time.perf_counter()
        with torch.no_grad():
            logits = self._model(input_ids=self._tokens, use_cache=False).logits
        return self._times(start, logits.cpu)

    def training(self) -> Figures:
        start = time.perf_counter()
        self._step()
        return self._times(start, self._side.wait)

    def _times(self, start: float, end: Any) -> Figures:
        if self._side.name == "eager":
            self._side.wait()
        client = time.perf_counter() - start
        end()
        return {"client": client, "end to end": time.perf_counter() - start}

    def generate(self) -> Figures:
        options = {"max_new_tokens": self._new, "do_sample": False, "use_cache": True}
        start = time.perf_counter()
        made = self._model.generate(self._tokens, attention_mask=self._mask, **options).cpu()
        return {"tokens": (made.shape[1] - self._tokens.shape[1]) / (time.perf_counter() - start)}

    def decode(self) -> Figures:
        import torch
        from transformers import DynamicCache

        before = self._misses()
        start = time.perf_counter()
        cache = {self._cache: DynamicCache(config=self._model.config)}
        token, made = self._tokens, []
        with torch.no_grad():
            for _ in range(self._new):
                out = self._model(input_ids=token, **cache, use_cache=True, logits_to_keep=1)
                token = out.logits.argmax(-1)
                made.append(token)
        torch.cat(made, 1).cpu()
        found = {"tokens": self._new / (time.perf_counter() - start)}
        if self._first is None:  # later rounds have the same lengths again
            self._first = {what: (now - before[what]) / self._new for what, now in self._misses().items()}
        return found | self._first

    def _misses(self) -> Figures:
        """Calls whose results the client had to infer, and the milliseconds that took; PyTorch has no such thing."""
        if self._side.name == "eager":
            return {}
        import dtorch

        stats = dtorch.client_stats()
        return {"misses": stats["geometry_misses"], "time of misses": stats["geometry_miss_ns"] / 1e6}


#: What is not a time in seconds: its factor, unit and name in the table.
UNITS = {
    "tokens": (1, "tokens/s", "more is better"),
    "misses": (1, "1/token", "first round: results inferred"),
    "time of misses": (1, "ms/token", "first round: the time that took"),
}
PIECES = ("forward", "training", "generate", "decode")


def run(piece: str, works: dict[str, Work], args: argparse.Namespace) -> list[Row]:
    """The rows of one piece of work."""
    found = _bench.alternate(args.rounds, {name: getattr(work, piece) for name, work in works.items()})
    rows = []
    for what in found["dtorch"]:
        scale, unit, text = UNITS.get(what, (1000, "ms", what))
        values = ([value * scale for value in found[name].get(what, [])] for name in SIDES)
        rows.append(Row(piece, text, unit, *values))
    return rows


def peak(args: argparse.Namespace) -> Row:
    """The peak of training, each side in a fresh process."""
    flags = ["--threads", args.threads, "--width", args.width, "--layers", args.layers, "--tokens", args.tokens]
    flags += ["--device", args.device]
    found = {side: _contenders.run_contender(side, *map(str, flags))["peak"] / MIB for side in SIDES}
    return Row("training", "peak memory, 3 steps", "MiB", [found["eager"]], [found["dtorch"]])


def contend(args: argparse.Namespace) -> None:
    """Be one side of `peak`."""
    engine = _contenders.Engine(args.contender, args.threads, args.device)
    from _models import LlamaTraining, llama, tokens

    step = LlamaTraining(engine.device, model=llama(args.width, args.layers), batch=tokens(1, args.tokens))
    reading, _ = _contenders.measure(engine, lambda: [step() for _ in range(3)])
    print(json.dumps({"peak": reading.peak}))


def main() -> None:
    parser = _bench.parser(__doc__ or "", rounds=5)
    parser.add_argument("--piece", action="append", choices=PIECES, help="may be repeated; default: all")
    parser.add_argument("--width", type=int, default=128, help="hidden size, a multiple of 64 (default 128)")
    parser.add_argument("--layers", type=int, default=4, help="default 4")
    parser.add_argument("--tokens", type=int, default=32, help="of the sequence, and of the prompt (default 32)")
    parser.add_argument("--new", type=int, default=64, help="tokens to generate (default 64)")
    parser.add_argument("--no-memory", action="store_true", help="leave the peak of memory out")
    _contenders.add_argument(parser)
    args = parser.parse_args()
    if args.contender:
        return contend(args)

    table = Table()
    if not args.no_memory:
        table.add(peak(args))
    works = {name: Work(side, args) for name, side in _bench.start(args).items()}
    for piece in args.piece or PIECES:
        table.add(*run(piece, works, args))
    about = _bench.describe(args.threads, args.device)
    print(about)
    table.save(args.out / "llama.csv", about)
    less = [row for row in table.rows if row.unit in ("ms", "MiB")]
    more = [row for row in table.rows if row.unit == "tokens/s"]
    panels = [
        _plot.ratio_bars("Time and memory: below 1 dtorch is better", less),
        _plot.ratio_bars("Tokens a second: above 1 dtorch is better", more),
    ]
    _plot.draw(args.out / "llama.png", "Llama", about, [panel for panel in panels if panel.bars])
    return None


if __name__ == "__main__":
    main()

"""How little memory a run could need: eager PyTorch's run replayed under other rules of freeing, beside dtorch's own.

One run in eager PyTorch is recorded below autograd: which storages each operator reads, which it makes, how far the
allocator's peak rose meanwhile, and when Python let go of each storage. The log is then replayed under three rules, for
the peak above the resident weights:

eager          a storage is freed when Python let go of it. What a device does that computes at once.
early free     a storage is freed right after the last operator that reads it, if Python let go of it at any time before
               the call returned. What a device can do that knows the future; what Python still holds at the end stays.
donation       and a pointwise operator's one result takes the memory of an argument that is freed at that operator, has
               its dtype, sizes and strides, fills its storage, and stands on no storage that another argument views.

Models: sd3 is the example's pipeline; llama a forward pass under no_grad, llama_last one that makes the last token's
logits only; training one AdamW step of that Llama, the optimizer's state being resident too.

A view is no storage of its own, and making one reads nothing. Then dtorch runs the same model on one worker: first with
nothing known to the client, then again. Two accountings:

tensors        whole storages. Replayed from the log, and on dtorch summed up from its own log of allocations.
allocator      what PyTorch's CPU allocator hands out: tensors and operators' workspace. Measured on both sides by the
               same allocator (`_contenders`); the replay adds to the tensors what each operator took in the recorded
               run. dtorch's operators are not quite eager's (it sends a linear layer as one), so here the replay is a
               close estimate and not a bound.

    dtorch bench liveness_limit [--model sd3 --preset tiny] [--model llama] [--holders 6]
"""

from __future__ import annotations

import json
import tempfile
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import _bench
import _contenders
import _plot
from _bench import MIB, SIDES, Row, Table
from _contenders import Engine, measure, run_contender

if TYPE_CHECKING:
    import torch

MODELS = ("sd3", "llama", "llama_last", "training")
RUNS = ("first run", "second run")

# --- the recording ---------------------------------------------------------------------------------------------------


@dataclass
class Operator:
    """One operator of the recorded run; storages by number."""

    name: str
    reads: list[int]
    makes: list[int]
    takes: int  # bytes by which the allocator's peak rose above what was allocated before: results and workspace
    donors: list[int] = field(default_factory=list)  # arguments whose memory its result could take, were they to die


@dataclass
class Recording:
    """Operators in order, and with each the storages that Python let go of before the next one."""

    operators: list[Operator] = field(default_factory=list)
    freed: list[list[int]] = field(default_factory=list)
    nbytes: dict[int, int] = field(default_factory=dict)
    about: dict[int, str] = field(default_factory=dict)

    def begin(self, operator: Operator) -> None:
        self.operators.append(operator)
        self.freed.append([])


def record(engine: Engine, resident: Iterable[torch.Tensor], work: Callable[[], Any]) -> Recording:
    """Record a run in eager PyTorch. Storages of ``resident`` are there before and count nothing."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_iter

    log = Recording()
    numbers: dict[int, int] = {}  # by the storage's address, as long as it lives
    known = {t.untyped_storage()._cdata for t in resident}

    def geometry(t: torch.Tensor) -> tuple[Any, ...]:
        return t.dtype, tuple(t.shape), t.stride(), t.storage_offset()

    def tensors(tree: Any) -> list[torch.Tensor]:
        return [leaf for leaf in tree_iter(tree) if isinstance(leaf, torch.Tensor)]

    def forget(address: int, number: int) -> None:
        del numbers[address]
        if recording:
            log.freed[-1].append(number)

    def number_of(t: torch.Tensor) -> tuple[int, bool]:
        """The number of a tensor's storage, 0 if it is resident, and whether it was met for the first time."""
        storage = t.untyped_storage()
        address = storage._cdata
        if address in known:
            return 0, False
        if address in numbers:
            return numbers[address], False
        number = numbers[address] = len(log.nbytes) + 1
        log.nbytes[number] = storage.nbytes()
        log.about[number] = f"{str(t.dtype).removeprefix('torch.')} {tuple(t.shape)}"
        weakref.finalize(storage, forget, address, number).atexit = False
        return number, True

    def donors(result: torch.Tensor, arguments: list[torch.Tensor]) -> list[int]:
        wanted, size = geometry(result), result.untyped_storage().nbytes()
        if not result.numel() or result.numel() * result.element_size() != size:
            return []
        shapes: dict[int, set[tuple[Any, ...]]] = {}
        for t in arguments:
            shapes.setdefault(number_of(t)[0], set()).add(geometry(t))
        return [n for n, found in shapes.items() if n and found == {wanted} and log.nbytes[n] == size]

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            arguments = tensors((args, kwargs))
            for t in arguments:  # made where we cannot look: a tensor of Python numbers, say
                number, fresh = number_of(t)
                if fresh:
                    log.begin(Operator("from outside", [], [number], log.nbytes[number]))
                    log.about[number] += " from outside"
            engine.reset()
            before = engine.stats()["allocated"]
            out = func(*args, **(kwargs or {}))
            takes = engine.stats()["peak"] - before
            results = tensors(out)
            made = []
            for t in results:
                number, fresh = number_of(t)
                if fresh:
                    made.append(number)
                    log.about[number] += f" by {func}"
            if results and not made and not func._schema.is_mutable:
                return out  # a view
            operator = Operator(str(func), sorted({number_of(t)[0] for t in arguments} - {0}), made, takes)
            if torch.Tag.pointwise in func.tags and len(results) == len(made) == 1:
                operator.donors = donors(results[0], arguments)
            log.begin(operator)
            return out

    recording = True
    log.begin(Operator("start", [], [], 0))
    with Mode():
        _held = work()
    recording = False
    return log


# --- the replay ------------------------------------------------------------------------------------------------------


@dataclass
class Peak:
    """The largest sum, at which operator, and what was held then."""

    nbytes: int = 0
    operator: str = ""
    held: list[int] = field(default_factory=list)


def replay(log: Recording, early: bool, donate: bool, workspace: bool) -> Peak:
    """Replay under a rule: free after the last use, let dying arguments donate; count workspace."""
    freed = last_uses(log) if early else log.freed
    peak, live, total = Peak(), set[int](), 0
    for operator, dying in zip(log.operators, freed, strict=True):
        given = {n for n in operator.donors if n in dying} if donate else set()
        given = set(sorted(given)[:1])  # one result takes one argument's memory
        live -= given
        total -= sum(log.nbytes[n] for n in given)
        made = sum(log.nbytes[n] for n in operator.makes)
        live |= set(operator.makes)
        most = total + (max(operator.takes, made) if workspace else made)
        if most > peak.nbytes:
            peak = Peak(most, operator.name, sorted(live))
        rest = set(dying) - given
        live -= rest
        total += made - sum(log.nbytes[n] for n in rest)
    return peak


def last_uses(log: Recording) -> list[list[int]]:
    """Per operator the storages that are used there for the last time and that Python lets go of at any time."""
    last = {n: i for i, operator in enumerate(log.operators) for n in (*operator.reads, *operator.makes)}
    dying: list[list[int]] = [[] for _ in log.operators]
    for freed in log.freed:
        for n in freed:
            dying[last[n]].append(n)
    return dying


RULES = {
    "eager": {"early": False, "donate": False},
    "early free": {"early": True, "donate": False},
    "early free, donation": {"early": True, "donate": True},
}


def largest(log: Recording, peak: Peak, count: int) -> list[tuple[int, str]]:
    """The largest storages held at a peak: bytes and what they are."""
    rows = sorted(((log.nbytes[n], log.about[n]) for n in peak.held), reverse=True)
    return rows[:count]


# --- the contenders --------------------------------------------------------------------------------------------------


def make_model(model: str, preset: str, engine: Engine) -> Any:
    """A model of `_models` with its weights on the engine's device."""
    import _models

    if model == "sd3":
        return _models.StableDiffusion(preset, engine.name)
    if model == "training":
        return _models.LlamaTraining(engine.device)
    return _models.LlamaForward(engine.device, last_only=model == "llama_last")


def eager(engine: Engine, model: str, preset: str, holders: int) -> dict[str, Any]:
    """The allocator's peak, the replays' peaks and, if asked for, what is held there."""
    work = make_model(model, preset, engine)
    _, held = measure(engine, work)  # the first run makes what is made once
    del held
    reading, held = measure(engine, work)
    del held
    log = record(engine, work.resident(), work)
    peaks = {
        name: {kind: replay(log, **rule, workspace=kind == "allocator") for kind in ("tensors", "allocator")}
        for name, rule in RULES.items()
    }
    holding = {
        f"{name}, replayed, at {kinds['allocator'].operator}": largest(log, kinds["allocator"], holders)
        for name, kinds in peaks.items()
        if holders
    }
    return {
        "operators": len(log.operators),
        "measured": reading.above,
        "replays": {name: {kind: peak.nbytes for kind, peak in kinds.items()} for name, kinds in peaks.items()},
        "holders": holding,
    }


def most_held(rows: list[tuple[int, int, int]]) -> int:
    """The peak of an allocation log's bytes, of storages that were made inside it."""
    live: dict[int, int] = {}
    total = most = 0
    for _, storage, nbytes in rows:
        total -= live.pop(storage, 0)
        if nbytes >= 0:
            live[storage] = nbytes
            total += nbytes
        most = max(most, total)
    return most


def dtorch_(engine: Engine, model: str, preset: str, holders: int) -> dict[str, Any]:
    """Both accountings of the first and the second run and, if asked for, what the client's lines held at the peak."""
    work = make_model(model, preset, engine)
    found: dict[str, Any] = {"holders": {}}
    for run in RUNS:
        reading, (tensors, held) = measure(engine, lambda: logged(work, holders))
        found[run] = {"tensors": tensors, "allocator": reading.above, "donations": reading.donations}
        if holders:
            found["holders"][f"dtorch (tensors), {run}"] = held
    return found


def logged(work: Callable[[], Any], holders: int) -> tuple[int, list[tuple[int, str]]]:
    """Do the work on dtorch; the peak of its storages' bytes and the largest that were held then, if asked for."""
    import dtorch

    if not holders:
        with dtorch.allocation_log(0) as rows:
            _held = work()
        return most_held(rows), []
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "history.json"
        with dtorch.record_memory_history(file, 0):
            _held = work()
        history = json.loads(file.read_text())
    return history["peak_bytes"] - history["timeline"][0][1], made_inside(history)[:holders]


def made_inside(history: dict[str, Any]) -> list[tuple[int, str]]:
    """What was held at the peak of a recorded history and was not there before: bytes and the client's line."""
    made = {storage for _, _, storage, change, _ in history["timeline"] if change > 0}
    return [(row["bytes"], row["line"]) for row in history["peak"] if row["storage"] in made]


# --- the parent ------------------------------------------------------------------------------------------------------


def compare(model: str, preset: str, threads: int, holders: int) -> tuple[list[Row], dict[str, str]]:
    """Run both contenders; returns the rows, each beside PyTorch's own run, and the versions used."""
    arguments = ("--model", model, "--preset", preset, "--threads", str(threads), "--holders", str(holders))
    plain, ours = (run_contender(contender, *arguments) for contender in SIDES)
    case = f"sd3 {preset}" if model == "sd3" else model
    replayed = {f"replayed {name}": kinds for name, kinds in plain["replays"].items()}
    measured = {"measured eager": {"allocator": plain["measured"]}, **{f"dtorch, {run}": ours[run] for run in RUNS}}
    rows = [
        Row(case, f"{kind}: {what}", "MiB", [plain["replays"]["eager"][kind] / MIB], [kinds[kind] / MIB])
        for kind in ("tensors", "allocator")
        for what, kinds in (replayed | measured).items()
        if kind in kinds
    ]
    for where, held in {**plain["holders"], **ours["holders"]}.items():
        print(f"held at the peak: {case}, {where}")
        for nbytes, about in held:
            print(f"{nbytes / MIB:12.3f} MiB  {about}")
    return rows, ours["versions"]


def main() -> None:
    parser = _bench.parser(__doc__ or "", device=False)
    parser.add_argument("--model", action="append", choices=MODELS, help="may be repeated; default: all")
    parser.add_argument("--preset", choices=("tiny", "small"), default="tiny", help="of sd3")
    parser.add_argument("--holders", type=int, default=0, help="print so many of what was held at each peak")
    _contenders.add_argument(parser)
    args = parser.parse_args()
    if args.contender:
        engine = Engine(args.contender, args.threads)
        contend = eager if engine.eager else dtorch_
        answer = contend(engine, args.model[0], args.preset, args.holders)
        print(json.dumps({**answer, "versions": _bench.versions()}))
        return

    table = Table(
        ["Peaks above the weights. PyTorch's column is its own run, replayed; the other is what the line names."]
    )
    used: dict[str, str] = {}
    for model in args.model or MODELS:
        rows, found = compare(model, args.preset, args.threads, args.holders)
        used |= found
        table.add(*rows)
    about = _bench.describe(args.threads, used=used)
    print(about)
    table.save(args.out / "liveness_limit.csv", about)
    panel = _plot.ratio_bars("Peak above the weights", [row for row in table.rows if row.what.startswith("allocator")])
    _plot.draw(args.out / "liveness_limit.png", "How little memory a run could need", about, [panel])


if __name__ == "__main__":
    main()

"""load_file() and load_model(): weights from safetensors files, read by the workers themselves.

The client reads a file's header and tells each worker which bytes to read (READ records); it opens the file once, and
the workers open that very descriptor, so that the parts of a file that is replaced meanwhile cannot mix. The bytes go
from the page cache into the worker's pool, where they count as any tensor's. They are not mapped: a mapped file that is
cut short kills whoever reads it, and memory that comes and goes by the page could be neither counted nor lent on.

Everything is read before anything is changed. An error leaves no tensor behind, and a module as it was.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, NamedTuple, Protocol

import torch
from torch import nn

from dtorch import _client
from dtorch.client import safetensors
from dtorch.client.lifecycle import Device, device_count, index_of, running
from dtorch.client.safetensors import Part
from dtorch.errors import LoadError, OutOfMemoryError, RemoteError

#: Where tensors go: one device, or a device for each prefix of names ("" for all others), as accelerate's device_map.
Placement = Device | Mapping[str, Device]

#: Parts that each worker is told of ahead of the one it reads; what an interrupted load goes on with in vain.
_AHEAD: Final = 16
#: Seconds after which a bar appears by itself.
_LONG: Final = 1.0


class Incompatible(NamedTuple):
    """Names that a module has and the file lacks, and the other way round."""

    missing_keys: list[str]
    unexpected_keys: list[str]


def load_file(
    path: str | os.PathLike[str], device: Placement = "dtorch", *, progress: bool | None = None
) -> dict[str, torch.Tensor]:
    """Load a safetensors file onto workers (as safetensors.torch.load_file); waits until all of it is there.

    Args:
        path: the file; or, for a model in several files, its index (``model.safetensors.index.json``), which lies
            beside them.
        device: where the tensors go: a device, or a mapping from name prefixes to devices. With
            ``{"": 0, "layers.1": 1}`` the tensors ``layers.1`` and ``layers.1.weight`` go to worker 1, others, such as
            ``layers.10.weight``, to worker 0; the longest prefix counts.
        progress: whether to show a bar on stderr, which takes tqdm. None: where stderr is a terminal, tqdm is installed
            and it takes longer than a second.

    Returns:
        The tensors by name, with the dtypes and shapes of the file, each on its worker.

    Raises:
        OSError: the file cannot be opened.
        LoadError: it is no good safetensors file, is cut short while it is read, or cannot be read.
        OutOfMemoryError: a worker's memory does not suffice.
        ValueError: there is no such device, or no prefix for a name.
        WorkerDied: a worker died meanwhile.
    """
    running()
    with _opened(os.fspath(path)) as parts:
        return _read(os.fspath(path), parts, _placing(device), progress)


def load_model(
    module: nn.Module,
    path: str | os.PathLike[str],
    strict: bool = True,
    device: Placement = "dtorch",
    *,
    assign: bool = False,
    progress: bool | None = None,
) -> Incompatible:
    """Load a safetensors file into a module (as safetensors.torch.load_model); waits until all of it is there.

    Each tensor is read by the worker that has the parameter or buffer. All is read and checked before anything
    changes: whatever is raised, the module is as it was. So for a moment the worker holds the old and the new values.
    A module that was made on ``meta`` holds no old ones, and is the way to load what barely fits::

        with torch.device("meta"):
            model = Model()
        dtorch.load_model(model, "model.safetensors", device="dtorch:1")

    Args:
        module: its parameters and buffers keep their identity, dtype and device; those on ``meta`` are replaced by
            ones on ``device``, with the dtype they had. What is one tensor under several names needs one of them in
            the file, and stays one.
        path: as for :func:`load_file`.
        strict: raise where a name is in the module and not in the file, or the other way round.
        device: as for :func:`load_file`: where to put what is on ``meta``, and what the module has no name for.
        assign: replace all parameters and buffers by the file's tensors, with its dtypes (as load_state_dict does).
        progress: as for :func:`load_file`.

    Returns:
        ``missing_keys`` and ``unexpected_keys``.

    Raises:
        RuntimeError: names or shapes do not fit; the text is load_state_dict's.
        All that :func:`load_file` raises.
    """
    running()
    state = module.state_dict(keep_vars=True)
    place = _placing(device)

    def beside(name: str) -> int:
        there = state.get(name)
        return there.device.index if there is not None and there.device.type == "dtorch" else place(name)

    with _opened(os.fspath(path)) as parts:
        loaded = _read(os.fspath(path), parts, beside, progress)
    for name, twin in _twins(state, loaded).items():
        loaded[name] = loaded[twin]
    return _exchange(module, loaded, strict, assign)


# -- files


@contextlib.contextmanager
def _opened(path: str) -> Iterator[list[tuple[safetensors.File, Part]]]:
    """The tensors of a file, or of all files that an index names."""
    with contextlib.ExitStack() as files:
        if not path.endswith(".json"):
            file = files.enter_context(safetensors.File(path))
            yield [(file, part) for part in file.parts]
            return
        parts = []
        for name, wanted in _index(path).items():
            file = files.enter_context(safetensors.File(os.path.join(os.path.dirname(path), name)))
            there = {part.name: part for part in file.parts}
            if lacking := wanted - there.keys():
                safetensors.refuse(file.path, f"the index says that it has {min(lacking)!r}")
            parts += [(file, part) for part in file.parts if part.name in wanted]
        yield parts


def _index(path: str) -> dict[str, set[str]]:
    """The tensors that an index promises, by file."""
    try:
        with open(path, encoding="utf-8") as file:
            weights = json.load(file)["weight_map"]
        of: dict[str, set[str]] = {}
        for tensor, name in weights.items():
            # A file from strangers may name only its neighbours.
            if not isinstance(name, str) or name in ("", ".", "..") or "/" in name or "\0" in name:
                raise ValueError(f"{tensor!r} is in {name!r}, which is not the name of a file beside it")
            of.setdefault(name, set()).add(tensor)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        text = f"it has no {error}" if isinstance(error, KeyError) else str(error)
        raise LoadError(f"{path} is not a good index of safetensors files: {text}") from error
    return of


def _placing(device: Placement) -> Callable[[str], int]:
    """The worker of a name."""

    def known(where: Device) -> int:
        index = index_of(where)
        if not 0 <= index < device_count():
            raise ValueError(f"dtorch:{index} does not exist: the engine has {device_count()} workers")
        return index

    if not isinstance(device, Mapping):
        everywhere = known(device)
        return lambda _: everywhere
    by_prefix = {prefix: known(where) for prefix, where in device.items()}

    def place(name: str) -> int:
        prefix = name
        while prefix not in by_prefix:
            if not prefix:
                raise ValueError(f"no prefix of {name!r} is among {sorted(by_prefix)}; {{'': DEVICE}} takes all others")
            prefix = prefix.rpartition(".")[0]
        return by_prefix[prefix]

    return place


# -- reading


def _read(
    path: str, parts: list[tuple[safetensors.File, Part]], place: Callable[[str], int], progress: bool | None
) -> dict[str, torch.Tensor]:
    rows: dict[int, list[tuple[safetensors.File, Part]]] = {}
    for file, part in parts:
        rows.setdefault(place(part.name), []).append((file, part))
    # In turns, so that all workers read at once.
    turns = sorted((n, worker) for worker, row in rows.items() for n in range(len(row)))
    tensors: dict[str, torch.Tensor] = {}
    under_way: deque[tuple[safetensors.File, Part, int]] = deque()
    with _bar(path, sum(part.nbytes for _, part in parts), progress) as bar:

        def finish() -> None:
            file, part, request = under_way[0]
            _wait(file, part, request)
            under_way.popleft()
            bar.update(part.nbytes)

        try:
            for n, worker in turns:
                file, part = rows[worker][n]
                if not part.nbytes:
                    tensors[part.name] = torch.empty(part.shape, dtype=part.dtype, device=f"dtorch:{worker}")
                    continue
                if len(under_way) >= _AHEAD * len(rows):
                    finish()
                tensors[part.name], request = _client.read_file(worker, file.fd, part.offset, part.dtype, part.shape)
                under_way.append((file, part, request))
            while under_way:
                finish()
        except BaseException:
            tensors.clear()  # whoever keeps the exception keeps this frame, but not the memory
            raise
        finally:
            for *_, request in under_way:
                _client.forget(request)
    return {part.name: tensors[part.name] for _, part in parts}


def _wait(file: safetensors.File, part: Part, request: int) -> None:
    try:
        _client.done(request)
    except OutOfMemoryError as error:
        error.add_note(f"while {part.name!r} of {file.path} was loaded")
        raise
    except RemoteError as error:
        raise LoadError(f"{file.path}: tensor {part.name!r} could not be read: {error.remote_message}") from error


class _Bar(Protocol):
    def update(self, n: int) -> object: ...


class _NoBar:
    def update(self, n: int) -> None:
        pass


@contextlib.contextmanager
def _bar(path: str, nbytes: int, progress: bool | None) -> Iterator[_Bar]:
    if progress is None:
        progress = sys.stderr is not None and sys.stderr.isatty()
        delay = _LONG
    else:
        delay = 0.0
    tqdm: Any = None
    if progress:
        try:
            tqdm = importlib.import_module("tqdm")
        except ImportError:
            if not delay:
                raise ImportError("progress=True shows its bar with tqdm: pip install tqdm") from None
    if tqdm is None:
        yield _NoBar()
        return
    name = os.path.basename(path)
    with tqdm.tqdm(total=nbytes, desc=name, unit="B", unit_scale=True, unit_divisor=1024, delay=delay) as bar:
        yield bar


# -- into a module


def _twins(state: Mapping[str, torch.Tensor], loaded: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """For each of the module's names that the file lacks, one that it has of the very same tensor."""
    named: dict[object, str] = {}
    for name in loaded.keys() & state.keys():
        for key in _identities(state[name]):
            named.setdefault(key, name)
    twins = {}
    for name in state.keys() - loaded.keys():
        for key in _identities(state[name]):
            if key in named:
                twins[name] = named[key]
    return twins


def _identities(t: torch.Tensor) -> list[object]:
    if t.device.type == "meta" or not t.numel():
        return [id(t)]
    return [id(t), (t.device, t.data_ptr(), t.shape, t.stride(), t.dtype)]


@torch.no_grad()
def _exchange(module: nn.Module, loaded: dict[str, torch.Tensor], strict: bool, assign: bool) -> Incompatible:
    """Let load_state_dict put the new tensors in, which may fail at any name; then give the old ones the values.

    Putting in replaces entries of dicts, which can be undone; copying cannot, so it comes last, when all is well.
    """
    before: list[tuple[nn.Module, dict[str, Any], dict[str, Any]]] = [
        (owner, entries, dict(entries)) for owner in module.modules() for entries in (owner._parameters, owner._buffers)
    ]
    swaps = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(False)  # with it the old tensors themselves would change
    try:
        told = module.load_state_dict(loaded, strict=strict, assign=True)
    except BaseException:
        for owner, entries, old in before:
            _restore(owner, entries, old)
        raise
    finally:
        torch.__future__.set_swap_module_params_on_conversion(swaps)

    replaced: dict[int, torch.Tensor] = {}
    for owner, entries, old_entries in before:
        for name, old in old_entries.items():
            new = entries.get(name)
            if old is None or new is None or new is old:
                continue
            if old.is_meta or assign:
                new = replaced.setdefault(id(old), new if assign else _like(old, new))
            else:
                if id(old) not in replaced:
                    old.copy_(new)
                    replaced[id(old)] = old
                new = old
            setattr(owner, name, new)  # not into the dict: RNNs keep a list of theirs beside it
    return Incompatible(list(told.missing_keys), list(told.unexpected_keys))


def _restore(owner: nn.Module, entries: dict[str, Any], old: dict[str, Any]) -> None:
    for name in entries.keys() - old.keys():
        del entries[name]
    for name, value in old.items():
        if entries.get(name) is not value:
            setattr(owner, name, value)
    if list(entries) != list(old):
        entries.clear()
        entries.update(old)


def _like(old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """The new tensor with the old one's dtype, and a parameter if that is one."""
    if new.dtype == old.dtype:
        return new
    converted = new.detach().to(old.dtype)
    return nn.Parameter(converted, requires_grad=old.requires_grad) if isinstance(old, nn.Parameter) else converted

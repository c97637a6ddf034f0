"""Turns what came back from the engine into the exceptions of dtorch.errors.

Native code calls these functions, by name, when an operator or a wait has to raise; each returns the exception.
"""

from __future__ import annotations

import builtins
import re
from collections.abc import Iterable
from typing import Any

import msgpack
import torch

from dtorch import _client
from dtorch.client import engine
from dtorch.errors import EngineError, InternalError, OutOfMemoryError, RemoteError, WorkerDied

#: A site's number carries this bit when the operator ran in the backward of the operator issued there (sites.h).
BACKWARD_BIT = 1 << 30

Frame = tuple[str, int, str]


def remote(frame: bytes) -> Exception:
    """An ERROR message: what an operator that the value depends on failed with."""
    return _from_error(_error_of(frame))


def at_call(frame: bytes) -> Exception:
    """An ERROR message in answer to ASK: PyTorch's own exception, raised at the call that is wrong."""
    error = _error_of(frame)
    kind, type_name, message = error[:3]
    if kind != "call":
        return _from_error(error)  # not this call's fault: what it reads has failed before
    if type_name == "LinAlgError":
        linalg: type[Exception] = torch._C.__dict__["_LinAlgError"]  # public in torch.linalg, but not to mypy
        return linalg(message)
    known = getattr(builtins, type_name, None)
    try:
        if isinstance(known, type) and issubclass(known, Exception):
            return known(message)
    except TypeError:  # one that is not made of a text (UnicodeDecodeError)
        pass
    return RuntimeError(f"{type_name}: {message}")  # a custom operator's own type, or one that would end the program


def too_large(n: int, most: int) -> Exception:
    """A tensor that no worker of this machine can hold."""
    return OutOfMemoryError(f"a tensor of {n} bytes cannot be made: the machine has {most} bytes of memory for it")


def worker_died(worker: int, why: str) -> Exception:
    """The worker that an operator needs is gone."""
    current = engine.current()
    known = current.dead_workers.get(worker) if current else None
    return WorkerDied(worker, known.status, known.output) if known else WorkerDied(worker, why, "")


def request_failed(worker: int, why: str) -> Exception:
    """A request ended without a reply: its worker or the controller died, or the engine was shut down."""
    current = engine.current()
    if current and current.death:
        return current.death
    if current and worker in current.dead_workers:
        return worker_died(worker, why)
    return EngineError(why)


def session_ended(why: str) -> Exception:
    """An operator on tensors of an engine that is over."""
    current = engine.current()
    if current and current.death:
        return current.death
    if not why:
        return EngineError(
            "the tensor belongs to an engine that was shut down; its value is gone. Fetch what you need with .cpu() "
            "before dtorch.shutdown()"
        )
    return EngineError(f"{why}; call dtorch.init() to start another engine")


def stack_of(site: int) -> list[Frame]:
    """The client's stack at a site, innermost first."""
    return _client.site(site & ~BACKWARD_BIT) if site else []


def own_frame(stack: list[Frame]) -> Frame | None:
    """The innermost frame outside torch and dtorch."""
    library = (_package_dir(torch), _package_dir(engine))
    for frame in stack:
        if not frame[0].startswith(library) and not frame[0].startswith("<frozen "):
            return frame
    return stack[0] if stack else None


def line_of(site: int) -> str:
    """The client's own line at a site, as 'FILE:LINE in FUNCTION', or an empty string when there is none."""
    own = own_frame(stack_of(site))
    return f"{own[0]}:{own[1]} in {own[2]}" if own else ""


def holders(rows: Iterable[tuple[int, str, str]]) -> list[str]:
    """Lines of text that tell what holds the memory: (bytes, tensor, client's line) each."""
    return [f"{size_text(n):>14}  {tensor}  made at {line}" for n, tensor, line in rows]


def size_text(n: int) -> str:
    """A number of bytes for people."""
    value = float(n)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024 or unit == "GiB":
            break
        value /= 1024
    return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"


def _package_dir(module: Any) -> str:
    name = module.__name__.partition(".")[0]
    path: str = __import__(name).__path__[0]
    return path + "/"


def _error_of(frame: bytes) -> list[Any]:
    error: list[Any] = msgpack.unpackb(frame, strict_map_key=False)[3]
    return error


def _from_error(error: list[Any]) -> Exception:
    kind, type_name, message, op, shapes, site, worker, held = error
    stack = stack_of(site)
    own = own_frame(stack)
    where = f'File "{own[0]}", line {own[1]}, in {own[2]}' if own else "a line that is not known"
    if own and site & BACKWARD_BIT:
        where = f"the backward of the operator at {where}"
    if kind == "peer":
        current = engine.current()
        for index, death in (current.dead_workers if current else {}).items():
            if message.startswith(f"worker {index} ") or message == str(death):
                return WorkerDied(index, death.status, death.output)
        if found := re.match(r"worker (\d+) ", message):  # we hear of the death itself a moment later
            return WorkerDied(int(found[1]), message, "")
    text = [f"{op}{shapes} failed on worker {worker}: {type_name}: {message}", f"  issued at {where}"]
    text += [f'    called from File "{f}", line {line}, in {name}' for f, line, name in _outer(stack, own)]
    if held:
        text.append("  the largest tensors on that worker then:")
        text += holders((size, tensor, line_of(made)) for size, tensor, made in held)
    if kind == "internal":
        return InternalError("\n".join(text))
    cls = OutOfMemoryError if kind == "memory" else RemoteError
    return cls(
        "\n".join(text),
        op=op,
        shapes=shapes,
        worker=worker,
        filename=own[0] if own else None,
        lineno=own[1] if own else None,
        stack=stack,
        remote_type=type_name,
        remote_message=message,
    )


def _outer(stack: list[Frame], own: Frame | None) -> list[Frame]:
    if own is None:
        return []
    after = stack[stack.index(own) + 1 :]
    library = (_package_dir(torch), _package_dir(engine), "<frozen ")
    return [f for f in after if not f[0].startswith(library)][:8]

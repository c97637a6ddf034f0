"""Every exception dtorch raises of its own, split by whose fault it is.

Wrong shapes and dtypes are not here: they raise PyTorch's own exception at the call. These are for what can only be
known later or elsewhere:

* :class:`RemoteError`: the *program's* mistake that only the worker could see (an index out of range);
* :class:`OutOfMemoryError`: the worker's memory did not suffice (also a ``MemoryError``);
* :class:`WorkerDied`, :class:`ControllerDied`: a process of ours is gone (a dead peer);
* :class:`EngineError`: set-up or life-cycle (``init`` refused, used after ``shutdown``, built for another torch);
* :class:`LoadError`: a file that was to be loaded is not what it should be;
* :class:`InternalError`: a bug of dtorch; please report it.
"""

from __future__ import annotations


class DtorchError(RuntimeError):
    """Base class of all of them."""


class EngineError(DtorchError):
    """The engine cannot start, or is asked for something its state does not allow."""


class InternalError(DtorchError):
    """An invariant of dtorch broke; not the program's fault."""


class RemoteError(DtorchError):
    """An operator failed on a worker; raised where a value that depends on it is asked for.

    Attributes: ``op`` (its name), ``shapes`` (the arguments, as text), ``worker`` (its index), ``filename`` and
    ``lineno`` (the client's own line that issued the op), ``stack`` (list of ``(filename, lineno, function)``,
    innermost first), ``remote_type`` (the exception's type on the worker) and ``remote_message``.
    """

    def __init__(
        self,
        message: str,
        *,
        op: str = "",
        shapes: str = "",
        worker: int = -1,
        filename: str | None = None,
        lineno: int | None = None,
        stack: list[tuple[str, int, str]] | None = None,
        remote_type: str = "",
        remote_message: str = "",
    ) -> None:
        super().__init__(message)
        self.op = op
        self.shapes = shapes
        self.worker = worker
        self.filename = filename
        self.lineno = lineno
        self.stack = stack or []
        self.remote_type = remote_type
        self.remote_message = remote_message


class OutOfMemoryError(RemoteError, MemoryError):
    """A worker could not allocate; it lives on, and the next operator works."""


class LoadError(DtorchError, ValueError):
    """A file could not be loaded: it is cut short, of another kind, at odds with itself, or cannot be read.

    Nothing was changed. A file that cannot even be opened raises OSError instead.
    """


class PeerDied(DtorchError):
    """A process of the engine ended. ``status`` is its exit status in words, ``output`` the last lines it printed."""

    def __init__(self, who: str, status: str, output: str) -> None:
        self.who = who
        self.status = status
        self.output = output
        tail = f"\nIts last output:\n{_indent(output)}" if output.strip() else "\nIt printed nothing."
        super().__init__(f"{who} died: {status}.{tail}")


class WorkerDied(PeerDied):
    """A worker ended; its tensors are lost, those on other workers are good. ``worker`` is its index."""

    def __init__(self, worker: int, status: str, output: str) -> None:
        self.worker = worker
        super().__init__(f"worker {worker}", status, output)


class ControllerDied(PeerDied):
    """The controller ended, and the workers with it; ``dtorch.shutdown()`` then ``init()`` starts afresh."""

    def __init__(self, status: str, output: str) -> None:
        super().__init__("the controller", status, output)


def _indent(text: str) -> str:
    return "\n".join(f"  | {line}" for line in text.rstrip().splitlines())

"""import_on_workers(): the program's modules that define custom operators, imported on the workers too.

A custom operator (``torch.library``, or a C++ extension) is known to the process that imported the module defining it.
The client has to have it for its schema, its gradient and its fake kernel; the worker, to run it. What is imported here
is remembered for the program's life: every engine that starts later imports it again.
"""

from __future__ import annotations

import importlib
import os
import sys
import threading
from types import ModuleType
from typing import Final

import msgpack

from dtorch import _client
from dtorch.client import engine

_lock: Final = threading.Lock()
_modules: Final[dict[str, str]] = {}  # name -> file, in the order of the calls; guarded by _lock


def import_on_workers(module: str) -> ModuleType:
    """Import a module here and on every worker, present and to come, for the custom operators that it defines.

    Call it where the program would write ``import my_ops``, before or after ``init``::

        my_ops = dtorch.import_on_workers("my_ops")

    From then on an operator of the module runs on the worker that has its tensors. Its fake kernel
    (``torch.library.register_fake``) runs here and tells the geometry of the results; without one the client waits for
    the worker at every call. Gradients (``register_autograd``) are the client's affair, as for every operator, and an
    operator that has only a composite kernel takes itself apart here. See docs/custom_operators.md.

    The worker searches the client's ``sys.path`` and has to find the very file that the client found.

    Args:
        module: the module's full name, as for ``importlib.import_module``. It must not be the script itself
            (``__main__``), and importing it must not use dtorch tensors.

    Returns the module. Waits for the workers when an engine runs; else ``init`` will. A worker that died is left out.

    Raises:
        ValueError: the module is ``__main__``.
        ImportError, or whatever the module raises: it cannot be imported here.
        RemoteError: it cannot be imported on a worker; says why and where. It is not remembered then.
    """
    if not isinstance(module, str):
        raise TypeError(f"import_on_workers() takes a module's name, a str, not {type(module).__name__}")
    if module == "__main__":
        raise ValueError(
            "import_on_workers('__main__'): workers cannot import the script that runs. Put the operators into a "
            "module of their own and name that"
        )
    found = importlib.import_module(module)
    origin = getattr(found, "__file__", None)
    file = os.path.abspath(origin) if isinstance(origin, str) else ""
    with _lock:
        _import(module, file)
        _modules[module] = file
    return found


def repeat() -> None:
    """Import on the engine's workers all that was imported before it started; what fails is not remembered."""
    with _lock:
        for module, file in list(_modules.items()):
            try:
                _import(module, file)
            except BaseException:
                del _modules[module]
                raise


def _import(module: str, file: str) -> None:
    current = engine.current()
    if current is None or current.is_over:
        return
    paths = [os.path.abspath(path) for path in sys.path]  # an empty entry means the current directory
    workers = [worker for worker in range(current.workers) if worker not in current.dead_workers]
    for reply in _client.import_on(workers, module, file, paths):
        for name, overload in msgpack.unpackb(reply)[3]:
            _client.run_on_workers(name, overload)

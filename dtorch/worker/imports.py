"""Importing a module of the program's on a worker, for the operators that it registers (the client's half is
``dtorch/client/imports.py``).

The module has to be the very one that the client imported: another of its name would register other kernels, and nobody
would notice. Hence the client's search path, and the comparison of the files.
"""

from __future__ import annotations

import importlib
import os
import sys
import traceback


def import_module(module: str, file: str, paths: list[str]) -> None:
    """Import ``module``, searching ``paths`` first, and check that it came from ``file`` (empty: from no file).

    Raises what the import raises, with the place in the module in a note, and ImportError when another module of that
    name was found.
    """
    sys.path[:] = [*paths, *(path for path in sys.path if path not in paths)]
    importlib.invalidate_caches()  # it may have been written a moment ago
    try:
        found = importlib.import_module(module)
    except BaseException as error:  # SystemExit too: a module that ends its process must not end the worker
        raise ImportError(f"{type(error).__name__}: {error}{_place(error)}") from error
    here = getattr(found, "__file__", None) or ""
    if file and os.path.realpath(here) != os.path.realpath(file):
        raise ImportError(f"the worker found it in {here or 'no file'}, and the client imported {file}")


def _place(error: BaseException) -> str:
    """The line of the program's own that raised it."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith("<frozen ")]
    frames = [f for f in frames if f.filename not in (__file__, importlib.__file__)]
    return f' (File "{frames[-1].filename}", line {frames[-1].lineno}, in {frames[-1].name})' if frames else ""

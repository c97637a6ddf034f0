"""Refuses to load native modules that were built for another torch or another Python, and says what mends it.

A module built for another torch fails, at best, with a missing symbol that names neither; at worst it crashes later.
"""

from __future__ import annotations

import sys
import sysconfig
from pathlib import Path


def check(torch_version: str | None = None) -> None:
    """Compare what the native modules were built for with what runs.

    Called before the first native module that links torch is imported. ``torch_version`` is the running torch's
    ``__version__``; without it torch is imported to ask.

    Raises:
        ImportError: nothing was built, or for another torch or Python; the message has the command that mends it.
    """
    try:
        from dtorch import _build
    except ImportError:
        raise ImportError(f"dtorch's native modules are not built. Build them with:\n    {_remedy()}") from None
    if torch_version is None:
        import torch

        torch_version = str(torch.__version__)
    if torch_version != _build.TORCH_VERSION:
        raise ImportError(
            f"dtorch was built for torch {_build.TORCH_VERSION}, but torch {torch_version} is installed. "
            f"Build dtorch anew with:\n    {_remedy()}"
        )
    python = str(sysconfig.get_config_var("SOABI"))
    if python != _build.PYTHON:
        raise ImportError(
            f"dtorch was built for {_build.PYTHON}, but this Python is {python}. "
            f"Build dtorch anew with:\n    {_remedy()}"
        )


def _remedy() -> str:
    """The command that rebuilds dtorch where this copy of it came from."""
    package = Path(__file__).resolve().parent
    if (package.parent / "native" / "build.py").is_file():  # a checkout, or an editable install of one
        return f"{sys.executable} {package.parent / 'native' / 'build.py'}"
    source = _installed_from() or "PATH_TO_DTORCH_SOURCE"
    return f"{sys.executable} -m pip install --force-reinstall --no-deps {source}"


def _installed_from() -> str | None:
    """The folder or address that pip installed this package from, as far as it wrote it down."""
    import json
    from importlib import metadata

    try:
        text = metadata.distribution("dtorch").read_text("direct_url.json")
    except metadata.PackageNotFoundError:
        return None
    url = json.loads(text)["url"] if text else None
    return url.removeprefix("file://") if isinstance(url, str) else None

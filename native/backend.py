"""The build backend that pip calls: setuptools', after a look at what the native build needs.

pip asks for the build's requirements before it resolves dependencies. Refusing there names a missing compiler or torch
at once, where the stock backend would let pip download torch first and fail afterwards.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from setuptools import build_meta
from setuptools.build_meta import (
    build_editable,
    build_sdist,
    get_requires_for_build_sdist,
)

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from native import build  # noqa: E402

__all__ = [
    "build_editable",
    "build_sdist",
    "build_wheel",
    "get_requires_for_build_editable",
    "get_requires_for_build_sdist",
    "get_requires_for_build_wheel",
    "prepare_metadata_for_build_editable",
    "prepare_metadata_for_build_wheel",
]

Config = Mapping[str, Any] | None


def get_requires_for_build_wheel(config_settings: Config = None) -> list[str]:
    build.check()
    return build_meta.get_requires_for_build_wheel(config_settings)


def get_requires_for_build_editable(config_settings: Config = None) -> list[str]:
    build.check()
    return build_meta.get_requires_for_build_editable(config_settings)


# Without build isolation pip does not ask for requirements; the metadata comes first there.
def prepare_metadata_for_build_wheel(metadata_directory: str, config_settings: Config = None) -> str:
    build.check()
    return build_meta.prepare_metadata_for_build_wheel(metadata_directory, config_settings)


def prepare_metadata_for_build_editable(metadata_directory: str, config_settings: Config = None) -> str:
    build.check()
    return build_meta.prepare_metadata_for_build_editable(metadata_directory, config_settings)


def build_wheel(wheel_directory: str, config_settings: Config = None, metadata_directory: str | None = None) -> str:
    # setuptools packs whatever an earlier build left there, deleted modules included.
    for old in (ROOT / "build").glob("lib*"):
        shutil.rmtree(old)
    return build_meta.build_wheel(wheel_directory, config_settings, metadata_directory)

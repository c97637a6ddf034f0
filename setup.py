"""Hands setuptools the native build of native/build.py; everything else is in setup.cfg."""

from __future__ import annotations

import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT))

from native import build  # noqa: E402


class BuildNative(build_ext):
    def build_extensions(self) -> None:
        self.native = build.build()
        build.place(*self.native, Path(self.build_lib, "dtorch"))

    def copy_extensions_to_source(self) -> None:
        build.place(*self.native, ROOT / "dtorch")


setup(
    cmdclass={"build_ext": BuildNative},
    ext_modules=[Extension(f"dtorch.{module.name}", []) for module in build.MODULES],
)

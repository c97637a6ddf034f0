"""Hands setuptools the native build of native/build.py and the packages; everything else is in setup.cfg."""

from __future__ import annotations

import sys
from pathlib import Path

from setuptools import Extension, find_packages, setup
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


# Scripts of the checkout that an installed dtorch has too, as folders of the package: ``dtorch bench`` runs the first,
# and they borrow models from the second.
SCRIPTS = {"dtorch.benchmarks": "benchmarks", "dtorch.examples": "examples"}

setup(
    packages=[*find_packages(include=["dtorch", "dtorch.*"]), *SCRIPTS],
    package_dir=SCRIPTS,
    cmdclass={"build_ext": BuildNative},
    ext_modules=[Extension(f"dtorch.{module.name}", []) for module in build.MODULES],
)

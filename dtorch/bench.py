"""``dtorch bench``: finds the benchmarks and runs one in a process of its own.

A benchmark is a script, ``bench_NAME.py``, whose docstring begins with a sentence that says what it measures. They lie
in ``benchmarks/`` of a checkout and, put there by setup.py, in ``dtorch/benchmarks/`` of an installed package. The
script takes this process's place, so nothing of ours is in memory when it measures.
"""

from __future__ import annotations

import ast
import os
import site
import sys
from pathlib import Path
from typing import NoReturn

PACKAGE = Path(__file__).resolve().parent


def folder() -> Path:
    """Where the benchmarks are; SystemExit where this copy of dtorch has none."""
    for place in (PACKAGE / "benchmarks", PACKAGE.parent / "benchmarks"):
        if (place / "_bench.py").is_file():
            return place
    raise SystemExit(
        f"dtorch bench: there are no benchmarks beside {PACKAGE}; install dtorch with pip, or get its source"
    )


def benchmarks() -> dict[str, Path]:
    """The scripts by name."""
    return {script.stem.removeprefix("bench_"): script for script in sorted(folder().glob("bench_*.py"))}


def sentence(script: Path) -> str:
    """What a benchmark measures: its docstring's first paragraph."""
    text = ast.get_docstring(ast.parse(script.read_text())) or ""
    return " ".join(text.partition("\n\n")[0].split())


def main(arguments: list[str]) -> int:
    """List the benchmarks, or become the one that is named; returns the exit status."""
    scripts = benchmarks()
    name, rest = (arguments[0], arguments[1:]) if arguments else ("--help", [])
    if name not in scripts:
        wanted_help = name in ("-h", "--help")
        out = sys.stdout if wanted_help else sys.stderr
        if not wanted_help:
            print(f"dtorch bench: there is no benchmark {name!r}", file=out)
        print("usage: dtorch bench NAME [FLAGS]; dtorch bench NAME --help tells the flags\n", file=out)
        for known, script in scripts.items():
            print(f"  {known:<15} {sentence(script)}", file=out)
        return 0 if wanted_help else 2
    sys.stdout.flush()
    return _become([sys.executable, str(scripts[name]), *rest])


def _become(command: list[str]) -> NoReturn:
    os.execve(command[0], command, _environment())


def _environment() -> dict[str, str]:
    """One in which the script finds this very dtorch."""
    home = str(PACKAGE.parent)
    known = [*site.getsitepackages(), site.getusersitepackages()]
    paths = [] if home in known else [home]
    paths += [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path and path != home]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)} if paths else dict(os.environ)

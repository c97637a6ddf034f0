"""The command ``dtorch``, also ``python -m dtorch``: its subcommands, each in a module of its own."""

from __future__ import annotations

import sys
from collections.abc import Callable

from dtorch import bench

#: name: (what it does, the function that gets the rest of the command line and returns the exit status)
COMMANDS: dict[str, tuple[str, Callable[[list[str]], int]]] = {
    "bench": ("run a benchmark beside plain PyTorch; without a name, list them", bench.main),
}


def main() -> int:
    """Run the subcommand that the command line names."""
    name, rest = (sys.argv[1], sys.argv[2:]) if len(sys.argv) > 1 else ("", [])
    if name in COMMANDS:
        return COMMANDS[name][1](rest)
    wanted_help = name in ("-h", "--help")
    out = sys.stdout if wanted_help else sys.stderr
    if name and not wanted_help:
        print(f"dtorch: there is no command {name!r}", file=out)
    print("usage: dtorch COMMAND ...\n", file=out)
    for command, (about, _) in COMMANDS.items():
        print(f"  {command:<10} {about}", file=out)
    return 0 if wanted_help else 2


if __name__ == "__main__":
    sys.exit(main())

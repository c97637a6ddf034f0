"""Giving a worker's stdout and stderr to the controller (whose half is ``dtorch/controller/output.py``)."""

from __future__ import annotations

import io
import os
import socket
import sys


def take_output(directory: str, name: str) -> None:
    """Make a connection to the controller's log this process's stdout and stderr, under ``name``.

    Everything is caught from here on, the last words of the C++ runtime included.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as log:
        log.connect(os.path.join(directory, "log"))
        log.sendall(name.encode() + b"\n")
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)

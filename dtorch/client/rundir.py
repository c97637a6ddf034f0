"""The directory that an engine's sockets lie in: made private, named after its owner, swept when the owner left it.

Its name is ``dtorch-<uid>-<client's pid>-<random>``. It has mode 0700, so that no other user can connect. Whoever is
the last to go removes it: the controller, or the client when the controller died. Only when both are killed at once is
it left, and the next engine of that user sweeps it.

A lock tells a directory in use from one that was left. The pid alone would not: containers that share a temporary
directory count their processes apart. The client holds the lock, and the kernel drops it with the client.
"""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import shutil
import stat
import tempfile
from typing import Final

from dtorch.errors import EngineError

#: The kernel's limit on the path of a Unix socket, without the closing zero.
_SOCKET_PATH_BYTES: Final = 107
#: What is put behind the directory's path at most: the fork server's socket.
_LONGEST_NAME: Final = "/pymp-12345678/listener-12345678"

_NAME: Final = re.compile(r"dtorch-(\d+)-(\d+)-[0-9a-f]+")


class RunDirectory:
    """One engine's directory, there until :meth:`remove`."""

    def __init__(self) -> None:
        base = _base()
        sweep(base)
        self.path = os.path.join(base, _new_name())
        os.mkdir(self.path, 0o700)
        self._lock = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            pass  # a file system without locks: the pid has to do

    def remove(self) -> None:
        """Remove it and all in it; the second time nothing happens."""
        if self._lock >= 0:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._lock)
            self._lock = -1


def sweep(base: str) -> list[str]:
    """Remove this user's directories in ``base`` whose client is gone; returns their paths."""
    swept: list[str] = []
    for name in os.listdir(base):
        match = _NAME.fullmatch(name)
        path = os.path.join(base, name)
        if match and int(match[1]) == os.getuid() and not _lives(int(match[2])) and _is_left(path):
            shutil.rmtree(path, ignore_errors=True)
            swept.append(path)
    return swept


def _new_name() -> str:
    return f"dtorch-{os.getuid()}-{os.getpid()}-{secrets.token_hex(4)}"


def _base() -> str:
    """Where to make it: the first folder that is ours to write in and whose path is short enough for a socket's."""
    candidates = [os.environ.get("XDG_RUNTIME_DIR", ""), tempfile.gettempdir(), "/tmp"]
    for base in candidates:
        longest = os.path.join(base, _new_name()) + _LONGEST_NAME
        if os.path.isabs(base) and os.access(base, os.W_OK | os.X_OK) and len(longest.encode()) <= _SOCKET_PATH_BYTES:
            return base
    raise EngineError(
        f"no folder for the engine's sockets: of {', '.join(c for c in candidates if c)} none is writable with a path "
        f"of at most {_SOCKET_PATH_BYTES - len(_new_name() + _LONGEST_NAME) - 1} bytes; set TMPDIR to one that is"
    )


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # another user's process has the number now
    return True


def _is_left(path: str) -> bool:
    """Whether it is a directory of ours that nobody has locked."""
    try:
        info = os.lstat(path)
        if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.getuid():
            return False
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass  # a file system without locks
    finally:
        os.close(fd)
    return True

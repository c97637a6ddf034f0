"""What the workers print: collected line by line, passed on to the user's stderr, the last lines kept.

Every worker connects to the Unix socket ``log``, names itself in a first line, and makes the connection its stdout and
stderr. So everything is caught, from ``print`` to the last words of the C++ runtime. The fork server, which is started
before it could connect anywhere, gets a pipe instead (:meth:`Output.add_pipe`).

Reading happens on the controller's loop and never waits. Writing to the user's stderr may wait for ever (a pipe that
nobody reads), so a thread of its own does it; when it falls behind, the oldest lines are dropped and counted.
"""

from __future__ import annotations

import os
import select
import socket
import struct
import sys
import threading
from collections import defaultdict, deque
from typing import Final, Protocol

#: Lines kept per source for the report of its death.
LAST_LINES: Final = 20
#: A line longer than this is cut, so that a source which never ends its line does not fill the memory.
LINE_BYTES: Final = 8 * 1024
#: Lines that may wait for the user's stderr.
BACKLOG_LINES: Final = 10_000

_UCRED: Final = struct.Struct("3i")  # pid, uid, gid: what SO_PEERCRED gives


class Output:
    """All sources of output. Used from the loop's thread only."""

    def __init__(self, path: str, poll: select.epoll, forward_fd: int | None) -> None:
        """Listen at ``path``; every descriptor is put into ``poll``; None as ``forward_fd`` keeps the lines away."""
        self._poll = poll
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(path)
        self._listener.listen(64)
        self._listener.setblocking(False)
        self._poll.register(self._listener, select.EPOLLIN)
        self._sources: dict[int, _Source] = {}
        self._last: defaultdict[str, deque[str]] = defaultdict(lambda: deque(maxlen=LAST_LINES))
        self._forward = _Forwarder(forward_fd) if forward_fd is not None else None

    def add_pipe(self, name: str, fd: int) -> None:
        """Collect from ``fd`` (now owned by this object) under ``name``."""
        os.set_blocking(fd, False)
        self._add(_Source(_Pipe(fd), name))

    def handles(self, fd: int) -> bool:
        return fd in self._sources or fd == self._listener.fileno()

    def ready(self, fd: int) -> None:
        """The loop found ``fd`` readable."""
        if fd == self._listener.fileno():
            self._accept()
        else:
            self._read(self._sources[fd])

    def last_lines(self, name: str) -> str:
        """The last lines of a source, all that it wrote before now included."""
        self._accept()
        for source in list(self._sources.values()):
            if source.name == name or source.name is None:
                self._read(source)
        return "\n".join(self._last[name])

    def flush(self, timeout: float) -> None:
        """Take in what has been written, and give the user's stderr ``timeout`` seconds to take it."""
        self._accept()
        for source in list(self._sources.values()):
            self._read(source)
        if self._forward:
            self._forward.finish(timeout)

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except BlockingIOError:
                return
            connection.setblocking(False)
            credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
            uid = _UCRED.unpack(credentials)[1]
            if uid != os.getuid():
                print(f"refused a process of user {uid} at the log socket", file=sys.stderr, flush=True)
                connection.close()
                continue
            self._add(_Source(connection, None))

    def _add(self, source: _Source) -> None:
        self._sources[source.fileno()] = source
        self._poll.register(source.fileno(), select.EPOLLIN)

    def _read(self, source: _Source) -> None:
        ended = source.read()
        for line in source.take_lines(ended):
            if source.name is None:
                source.name = line.decode(errors="replace")
                continue
            self._last[source.name].append(line.decode(errors="replace"))
            if self._forward:
                self._forward.put(b"[%s] %s\n" % (source.name.encode(), line))
        if ended:
            self._poll.unregister(source.fileno())
            del self._sources[source.fileno()]
            source.file.close()


class _File(Protocol):
    def fileno(self) -> int: ...
    def close(self) -> None: ...


class _Pipe:
    """A raw descriptor with the two methods of a socket that are needed here."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def fileno(self) -> int:
        return self._fd

    def close(self) -> None:
        os.close(self._fd)


class _Source:
    """One connection and its unfinished line. ``name`` is None until its first line, which names it, has come."""

    def __init__(self, file: _File, name: str | None) -> None:
        self.file = file
        self.name = name
        self._tail = b""

    def fileno(self) -> int:
        return self.file.fileno()

    def read(self) -> bool:
        """Take what is there, at most 1 MiB (more than a socket's buffer holds); True when the other end is closed."""
        for _ in range(16):
            try:
                data = os.read(self.fileno(), 64 * 1024)
            except BlockingIOError:
                return False
            except OSError:
                return True  # reset by a dying peer
            if not data:
                return True
            self._tail += data
        return False

    def take_lines(self, ended: bool) -> list[bytes]:
        *lines, self._tail = self._tail.split(b"\n")
        while len(self._tail) > LINE_BYTES:
            lines.append(self._tail[:LINE_BYTES])
            self._tail = self._tail[LINE_BYTES:]
        if ended and self._tail:
            lines.append(self._tail)
            self._tail = b""
        return lines


class _Forwarder:
    """The thread that writes to the user's stderr, the only one here that may wait."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._lines: deque[bytes] = deque()
        self._dropped = 0
        self._closing = False
        self._changed = threading.Condition()  # guards the three above
        self._thread = threading.Thread(target=self._run, name="dtorch-output", daemon=True)
        self._thread.start()

    def put(self, line: bytes) -> None:
        with self._changed:
            if len(self._lines) >= BACKLOG_LINES:
                self._lines.popleft()
                self._dropped += 1
            self._lines.append(line)
            self._changed.notify()

    def finish(self, timeout: float) -> None:
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join(timeout)

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._lines and not self._closing:
                    self._changed.wait()
                if not self._lines:
                    return
                data = b"".join(self._lines)
                self._lines.clear()
                if self._dropped:
                    data = b"[dtorch] %d lines dropped: stderr is not read fast enough\n" % self._dropped + data
                    self._dropped = 0
            try:
                while data:
                    data = data[os.write(self._fd, data) :]
            except OSError:
                return  # nobody can read it any more; put() keeps its bound

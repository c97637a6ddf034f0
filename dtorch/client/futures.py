"""TensorFuture: a value on its way from a worker to the client.

A future is a request's number and what to do when it is answered. The reply thread learns of an answer from the socket
and calls :func:`completed`; waiting in asyncio goes through ``loop.call_soon_threadsafe``, which wakes the loop by a
descriptor it watches. Nothing polls.

FUT-1  Callbacks run once each, in the order they were added: on the thread ``dtorch-callbacks`` or, for a value that
       is here already, on the calling thread. Never on the reply thread: a callback may use the device, and then it may
       have to wait for an answer.
FUT-2  Cancelling an ``await`` or running into a timeout leaves the future as it was: the value can still be got.
FUT-3  Dropping a future drops its value; an answer that comes later is thrown away.
"""

from __future__ import annotations

import asyncio
import os
import queue
import threading
import traceback
from collections.abc import Callable, Generator
from typing import Any

import torch

from dtorch import _client
from dtorch.client import engine

Callback = Callable[["TensorFuture"], object]

_lock = threading.Lock()
_waiting: dict[int, tuple[TensorFuture, list[Callback]]] = {}  # by request; guarded by _lock
_wakers: dict[int, list[Callable[[], object]]] = {}  # by request; guarded by _lock


class TensorFuture:
    """The future value of a tensor; made by ``Tensor.to_torch_async()``."""

    __slots__ = ("__weakref__", "_request", "_value")

    def __init__(self, request: int | None, value: torch.Tensor | None = None) -> None:
        self._request = request
        self._value = value

    def get(self, timeout: float | None = None) -> torch.Tensor:
        """Wait for the value, a CPU tensor of the tensor's shape and dtype (no gradient).

        Args:
            timeout: seconds to wait at most; None waits for as long as it takes.

        Raises:
            TimeoutError: it is not here yet; the future stays good.
            RemoteError: an operator it depends on failed; the message names the client's line.
            WorkerDied, ControllerDied, EngineError: it will never come.
        """
        if self._value is None:
            assert self._request is not None
            if not _client.wait(self._request, -1.0 if timeout is None else max(0.0, timeout)):
                raise TimeoutError(f"the value did not arrive within {timeout} s; it can still be awaited")
            self._value = _client.value(self._request)
        return self._value

    def is_ready(self) -> bool:
        """Whether get() would return (or raise) at once."""
        if self._value is not None:
            return True
        assert self._request is not None
        return _client.ready(self._request)

    def add_done_callback(self, callback: Callback) -> None:
        """Call ``callback(self)`` when the value is here or has failed (as concurrent.futures; see FUT-1)."""
        if self._value is None:
            assert self._request is not None
            with _lock:
                entry = _waiting.setdefault(self._request, (self, []))
                entry[1].append(callback)
            if not _client.watch(self._request):
                return
            with _lock:
                entry_now = _waiting.get(self._request)
                if entry_now is None or callback not in entry_now[1]:
                    return  # the reply thread was faster and has called it
                entry_now[1].remove(callback)
                if not entry_now[1]:
                    del _waiting[self._request]
        _call(callback, self)

    def _wake_when_done(self, wake: Callable[[], object]) -> None:
        """As add_done_callback, for our own use: ``wake`` never waits, so the reply thread may run it."""
        assert self._request is not None
        with _lock:
            _wakers.setdefault(self._request, []).append(wake)
        if _client.watch(self._request):
            with _lock:
                wakers = _wakers.get(self._request, [])
                if wake not in wakers:
                    return  # the reply thread was faster
                wakers.remove(wake)
                if not wakers:
                    del _wakers[self._request]
            wake()

    def __await__(self) -> Generator[Any, None, torch.Tensor]:
        if not self.is_ready():
            loop = asyncio.get_running_loop()
            arrived: asyncio.Future[None] = loop.create_future()

            def wake() -> None:
                if not arrived.done():
                    arrived.set_result(None)

            def done() -> None:
                try:
                    loop.call_soon_threadsafe(wake)
                except RuntimeError:
                    pass  # the loop is closed: nobody awaits any more

            self._wake_when_done(done)
            yield from arrived
        return self.get()

    def __del__(self) -> None:
        if self._request is not None:
            _client.forget(self._request)

    def __repr__(self) -> str:
        return f"<TensorFuture {'ready' if self.is_ready() else 'pending'}>"


def completed(requests: list[int]) -> None:
    """Wake who awaits the answered requests and have their callbacks run (on the reply thread)."""
    for request in requests:
        with _lock:
            wakers = _wakers.pop(request, [])
            entry = _waiting.pop(request, None)
        for wake in wakers:
            wake()
        if entry is not None:
            _callbacks.run(*entry)


class _CallbackThread:
    """The thread that runs callbacks; started by the first one."""

    def __init__(self) -> None:
        self._due: queue.SimpleQueue[tuple[TensorFuture, list[Callback]]] = queue.SimpleQueue()
        self._started = False  # touched under _lock

    def run(self, future: TensorFuture, callbacks: list[Callback]) -> None:
        self._due.put((future, callbacks))
        with _lock:
            if self._started:
                return
            self._started = True
        threading.Thread(target=self._loop, name="dtorch-callbacks", daemon=True).start()

    def _loop(self) -> None:
        while True:
            future, callbacks = self._due.get()
            for callback in callbacks:
                _call(callback, future)
            del future, callbacks  # not to hold the value until the next one


def _call(callback: Callback, future: TensorFuture) -> None:
    try:
        callback(future)
    except Exception:
        traceback.print_exc()  # as concurrent.futures: a callback's failure is not the value's


_callbacks = _CallbackThread()


def _after_fork() -> None:
    """A forked child has no such thread and none of the parent's futures."""
    global _lock, _callbacks
    _lock = threading.Lock()
    _callbacks = _CallbackThread()
    _waiting.clear()
    _wakers.clear()


os.register_at_fork(after_in_child=_after_fork)
engine.on_completed = completed

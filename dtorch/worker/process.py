"""What a worker does between the fork and the executor's loop.

It runs in a child of the fork server, which has imported everything already. The order matters: first the bond to the
parent (LIV-2), so that nothing later can leave it behind; then its output, so that everything later is heard of; then
threads and sockets, which must not exist before the fork.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import signal
import socket
from typing import Any

import msgpack
import torch
import zmq

from dtorch import posix, zmq_api
from dtorch._worker import run
from dtorch.protocol import VERSION, Message
from dtorch.worker import cuda
from dtorch.worker.imports import import_module
from dtorch.worker.output import take_output

#: The process that imported this module, which is the fork server; its children see their parent's pid here.
_FORK_SERVER = os.getpid()


def main(directory: str, worker: int, threads: int, device: str) -> None:
    """Be worker number ``worker`` until the controller says EXIT; the process ends when this returns.

    ``threads`` is the number of threads an operator may use on the CPU. ``device`` is "cpu" or "cuda".
    """
    bind(directory, worker)
    hooks: cuda.Hooks | None = None
    if device == "cuda":
        hooks = cuda.Hooks(worker)
        device = f"cuda:{hooks.device}"
    elif device != "cpu":
        raise ValueError(f"a worker for device {device!r} cannot be: it is 'cpu' or 'cuda'")
    work(directory, worker, threads, device, hooks)


def bind(directory: str, worker: int) -> None:
    """What comes first: the bond to the parent, the name, the output."""
    posix.die_with_parent(_FORK_SERVER)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    name = f"worker-{worker}"
    posix.set_name(f"dtorch-{name}")
    take_output(directory, name)
    faulthandler.enable()


def work(directory: str, worker: int, threads: int, device: str, hooks: Any) -> None:
    """Connect, and run the executor on a device of PyTorch's ("cuda:1"); ``hooks`` is None where that is the CPU."""
    torch.set_num_threads(threads)
    try:
        torch.set_num_interop_threads(1)
    except RuntimeError:
        pass  # torch allows it only before its pool exists; one that exists idles

    name = f"worker-{worker}"
    replies = _connect_replies(directory, name)
    context = zmq.Context()
    dealer = context.socket(zmq.DEALER)
    dealer.set_hwm(0)
    dealer.linger = 0
    dealer.setsockopt(zmq.IDENTITY, name.encode())
    dealer.connect(f"ipc://{directory}/workers")
    dealer.send(msgpack.packb([Message.WORKER_HELLO, VERSION, worker, os.getpid()]))
    parent = multiprocessing.parent_process()
    assert parent is not None, "a worker is made by multiprocessing"
    try:
        run(zmq_api.addresses(), dealer.underlying, worker, parent.sentinel, replies, import_module, device, hooks)
    except RuntimeError:
        dealer.linger = 1000  # ms: the client is to hear the reason
        raise
    finally:
        dealer.close()
        context.term()  # waits for what lingers
        if hooks is not None:
            hooks.close()


def _connect_replies(directory: str, name: str) -> int:
    """A descriptor of the direct way to the client (``native/client/direct.h``); -1 where the client offers none."""
    direct = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        direct.connect(os.path.join(directory, "replies"))
        direct.send(name.encode())
    except OSError:
        direct.close()
        return -1
    return direct.detach()

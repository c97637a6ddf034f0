"""A worker without torch, for tests of the controller: it notes what it receives and does what OPTION records say.

It is at once what the fork server preloads and what runs in a worker. A SYNC is answered with everything noted so far;
other records only count. OPTION (name, value) acts when it is executed:

    print value         write the line to stdout
    flood n             write n lines of 100 bytes
    exit n              end with that status
    signal n            be killed by that signal
    hang 0              answer nothing any more, EXIT included
    transfer [dest, payload]  send TRANSFER number 1 with that payload
    keep 0              do not answer INCOMING with TRANSFER_DONE
    progress n          say that n records were executed
    raw [frame, ...]    send these frames as they are

The variables FAKE_PRELOAD ("hang", "fail") and FAKE_GATE (a FIFO) hold up the fork server and the workers' HELLO.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
from typing import Any

import msgpack
import zmq

from dtorch import posix
from dtorch.protocol import VERSION, Message, Record
from dtorch.worker.output import take_output

posix.die_with_parent(os.getsid(0))
_FORK_SERVER = os.getpid()
if os.environ.get("FAKE_PRELOAD") == "hang":
    posix.set_name("fake-preload")
    signal.pause()
elif os.environ.get("FAKE_PRELOAD") == "fail":
    raise OSError("libfake.so: cannot open shared object file")


def main(directory: str, worker: int, threads: int, device: str) -> None:
    posix.die_with_parent(_FORK_SERVER)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    take_output(directory, f"worker-{worker}")
    faulthandler.disable()  # PYTHONFAULTHANDLER may have enabled it: a death would print more than its orders say
    if "FAKE_GATE" in os.environ:
        with open(os.environ["FAKE_GATE"]):
            pass
    context = zmq.Context()
    dealer = context.socket(zmq.DEALER)
    dealer.setsockopt(zmq.IDENTITY, f"worker-{worker}".encode())
    dealer.linger = 0
    dealer.connect(f"ipc://{directory}/workers")
    fake = Fake(dealer, worker)
    fake.send(Message.WORKER_HELLO, int(os.environ.get("FAKE_VERSION", VERSION)), worker, os.getpid())
    while fake.take(dealer.recv_multipart()):
        pass


class Fake:
    def __init__(self, dealer: zmq.Socket[bytes], worker: int) -> None:
        self.dealer = dealer
        self.worker = worker
        self.noted: list[Any] = []
        self.keep = False

    def send(self, kind: Message, *fields: object) -> None:
        self.dealer.send(msgpack.packb([int(kind), *fields]))

    def take(self, frames: list[bytes]) -> bool:
        """Handle one message; False after EXIT."""
        kind, *fields = msgpack.unpackb(frames[0])
        if kind == Message.EXIT:
            return False
        if kind != Message.BATCH:
            self.noted.append([Message(kind).name, *fields])
            is_segment = kind == Message.INCOMING and isinstance(fields[1], list) and len(fields[1]) == 5
            if is_segment and not self.keep:  # the tests put the source where the segment has a pid
                self.send(Message.TRANSFER_DONE, fields[1][4], fields[1][0], self.worker)
            return True
        first_seq, count, release_count = fields
        releases, records = (_unpack(frame) for frame in (frames[2], frames[1]))
        assert (len(records), len(releases)) == (count, release_count)
        self.noted += [["RELEASE", *r[2:]] for r in releases]
        for seq, record in enumerate(records, start=first_seq):
            self.execute(seq, record)
        return True

    def execute(self, seq: int, record: list[Any]) -> None:
        kind, worker, *fields = record
        assert worker == self.worker
        if kind == Record.SYNC:
            self.send(Message.DONE, fields[0], self.worker, [*self.noted, seq])
        elif kind == Record.OPTION:
            self.obey(*fields)
        else:
            self.noted.append([Record(kind).name, seq])

    def obey(self, name: str, value: Any) -> None:
        if name == "print":
            print(value)
        elif name == "flood":
            for number in range(value):
                print(f"{number:100}")
        elif name == "exit":
            sys.exit(value)
        elif name == "signal":
            os.kill(os.getpid(), value)
        elif name == "hang":
            print("hanging")
            while True:
                signal.pause()
        elif name == "transfer":
            dest, payload = value
            self.send(Message.TRANSFER, 1, self.worker, dest, payload)
        elif name == "keep":
            self.keep = True
        elif name == "progress":
            self.send(Message.PROGRESS, self.worker, value)
        elif name == "raw":
            self.dealer.send_multipart(value)
        else:
            raise AssertionError(name)


def _unpack(stream: bytes) -> list[Any]:
    unpacker = msgpack.Unpacker()
    unpacker.feed(stream)
    return list(unpacker)

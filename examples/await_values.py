"""Awaiting values: an asyncio program that does Python work while several workers compute.

    python examples/await_values.py --workers 2
    python examples/await_values.py --workers 2 --check     # the values equal eager PyTorch's, to the last bit

Two tasks per worker walk a matrix through a chain of multiplications. Issuing a chain takes no time; ``await`` on its
norm gives the event loop to the other tasks until the worker has the value. One of these tasks is pure Python: it
looks for primes, a slice at a time. Every line says how many slices were done between asking for a value and having
it: that is Python work and a worker's work at the same time. With ``--engine torch`` the count is zero: there a value
is computed before the next line of Python runs.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import Awaitable

import _engine
import torch


def value(tensor: torch.Tensor) -> Awaitable[torch.Tensor]:
    """Something to await that gives the tensor's value on the CPU."""
    if tensor.device.type == "dtorch":
        return tensor.to_torch_async()  # a TensorFuture; `await tensor` is the same

    async def ready() -> torch.Tensor:
        return tensor

    return ready()


class Primes:
    """Python work in slices of well under a millisecond."""

    def __init__(self) -> None:
        self.slices = 0
        self.overlapped = 0  # slices done while at least one walk waited for its worker
        self.waiting = 0  # walks that wait
        self.found: list[int] = []
        self._next = 2

    async def search(self) -> None:
        """Look for primes until cancelled; lets the other tasks run after every slice."""
        while True:
            for number in range(self._next, self._next + 50):
                if all(number % prime for prime in self.found if prime * prime <= number):
                    self.found.append(number)
            self._next += 50
            self.slices += 1
            self.overlapped += self.waiting > 0
            await asyncio.sleep(0)


class Walk:
    """A matrix that is multiplied, again and again, on one worker."""

    def __init__(self, number: int, device: torch.device, args: argparse.Namespace) -> None:
        generator = torch.Generator().manual_seed(args.seed + number)
        matrices = torch.randn(2, args.size, args.size, generator=generator)
        self.name = f"walk {number} on {device}"
        self.norms: list[float] = []
        self._state, self._step = (matrices / args.size**0.5).to(device)

    async def run(self, rounds: int, depth: int, primes: Primes, begin: float) -> torch.Tensor:
        """Walk on, look at the norm after each round, and return the last matrix, whose value nobody awaited yet."""
        for number in range(rounds):
            for _ in range(depth):
                self._state = torch.tanh(self._state @ self._step)  # issued, not computed
            before = primes.slices
            primes.waiting += 1
            norm = (await value(self._state.norm())).item()  # the other tasks run here
            primes.waiting -= 1
            self.norms.append(norm)
            took, slices = time.perf_counter() - begin, primes.slices - before
            print(f"{took:7.3f} s  {self.name}, round {number}: norm {norm:.6f}, {slices} slices of Python meanwhile")
            self._state = self._state / norm * self._state.shape[0] ** 0.5  # decides with the value how to go on
        return self._state


async def program(args: argparse.Namespace, devices: list[torch.device]) -> tuple[list[Walk], list[torch.Tensor]]:
    """Run two walks per device and the search for primes; returns the walks and their last matrices."""
    begin = time.perf_counter()
    primes = Primes()
    search = asyncio.create_task(primes.search())
    walks = [Walk(number, devices[number % len(devices)], args) for number in range(2 * len(devices))]
    ends = await asyncio.gather(*(walk.run(args.rounds, args.depth, primes, begin) for walk in walks))
    values = await asyncio.gather(*(value(end) for end in ends))  # from all workers at once
    search.cancel()
    print(f"{len(primes.found)} primes in {primes.slices} slices of Python, {primes.overlapped} while workers computed")
    return walks, values


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    _engine.add_arguments(parser)
    parser.add_argument("--size", type=int, default=256, help="rows and columns of the matrices")
    parser.add_argument("--depth", type=int, default=40, help="multiplications per round")
    parser.add_argument("--rounds", type=int, default=3, help="how often each walk asks for a value")
    args = parser.parse_args()
    _engine.start(args)
    devices = [_engine.device(args, worker) for worker in range(args.workers)]

    walks, values = asyncio.run(program(args, devices))
    if not args.check:
        return 0

    print("the same in eager PyTorch:")
    eager_walks, eager_values = asyncio.run(program(args, [torch.device(args.device)] * args.workers))
    allowed = _engine.tolerance(args)
    problems = []
    for ours, eager, matrix, eager_matrix in zip(walks, eager_walks, values, eager_values, strict=True):
        problems += [
            _engine.difference(f"norms of {ours.name}", torch.tensor(ours.norms), torch.tensor(eager.norms), allowed),
            _engine.difference(f"last matrix of {ours.name}", matrix.cpu(), eager_matrix.cpu(), allowed),
        ]
    return _engine.verdict(problems, f"{len(walks)} walks give the values of eager PyTorch")


if __name__ == "__main__":
    sys.exit(main())

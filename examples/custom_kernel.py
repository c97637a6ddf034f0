"""A kernel of one's own on the workers: a `torch.library` operator with a CuPy or Triton kernel and its gradient.

    python examples/custom_kernel.py                             # on the CPU, where the operator is made of PyTorch's
    python examples/custom_kernel.py --device cuda               # CuPy's RawKernel, or Triton's where CuPy is missing
    python examples/custom_kernel.py --device cuda --library triton
    python examples/custom_kernel.py --workers 2 --check         # values and gradients against eager PyTorch's

The operators are in `_kernels.py`, a module of their own. ``dtorch.import_on_workers`` imports it here and on the
workers by its name; nothing is pickled. Here the fake kernels tell shapes and dtypes, so the program runs ahead as with
any operator; the workers run the kernels.

Each worker trains a small SwiGLU network. ``--check`` does the same in eager PyTorch on the same device, with the same
operator (equal bits are expected, and wanted on the CPU; on a GPU the sums behind a gradient may be taken in another
order: 1e-4 of the largest value), and compares the operator and its gradient with PyTorch's own operators (1e-5 of it).
"""

from __future__ import annotations

import argparse
import sys

import _engine
import _kernels
import torch
from torch import nn
from torch.nn import functional as F


class SwiGLU(nn.Module):
    """Two linear layers, the gate between them, and a third."""

    def __init__(self, width: int, library: str) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(width, 2 * width), nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)
        self.library = library

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(_kernels.swiglu(self.gate(x), self.up(x), self.library))


def train(device: torch.device, number: int, args: argparse.Namespace) -> dict[str, torch.Tensor]:
    """Train a network to give its input back; returns losses, and the first layer with its last gradient."""
    torch.manual_seed(args.seed + number)
    network = SwiGLU(args.width, args.library).to(device)
    x = torch.randn(64, args.width).to(device)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    losses = []
    for _ in range(args.steps):
        optimizer.zero_grad()
        loss = F.mse_loss(network(x), x)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    gate = network.gate.weight
    return {"losses": torch.stack(losses), "weight": gate.detach(), "gradient": gate.grad}


def gradients(device: torch.device, composed: bool, args: argparse.Namespace) -> dict[str, torch.Tensor]:
    """The operator, or PyTorch's operators in its place, on numbers that do not fill a block; and both gradients."""
    generator = torch.Generator().manual_seed(args.seed)
    x, y = (torch.randn(1001, 7, generator=generator).to(device).requires_grad_() for _ in range(2))
    out = F.silu(x) * y if composed else _kernels.swiglu(x, y, args.library)
    out.square().sum().backward()
    return {"swiglu": out.detach(), "gradient by x": x.grad, "gradient by y": y.grad}


def in_eager(args: argparse.Namespace) -> tuple[dict[str, torch.Tensor], list[dict[str, torch.Tensor]]]:
    """What --check compares with: the gradients of PyTorch's operators, and the same networks, trained."""
    device = torch.device(args.device)
    return gradients(device, True, args), [train(device, number, args) for number in range(args.workers)]


def compare(ours: dict[str, torch.Tensor], eager: dict[str, torch.Tensor], tolerance: float, where: str) -> list[str]:
    """What differs by more than ``tolerance`` of the largest value."""
    found = (_engine.difference(f"{name} {where}", ours[name].cpu(), eager[name], tolerance) for name in eager)
    return [problem for problem in found if problem]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    _engine.add_arguments(parser)
    parser.add_argument("--library", choices=_kernels.LIBRARIES, default="auto", help="what CUDA kernels are made with")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--steps", type=int, default=10)
    args = parser.parse_args()
    _engine.start(args)
    if args.engine == "dtorch":
        import dtorch

        dtorch.import_on_workers("_kernels")

    devices = [_engine.device(args, worker) for worker in range(args.workers)]
    trained = [train(device, number, args) for number, device in enumerate(devices)]
    for device, values in zip(devices, trained, strict=True):
        print(f"losses on {device}:", " ".join(f"{loss:.4f}" for loss in values["losses"].tolist()))
    if not args.check:
        return 0

    wanted, eager = _engine.eager(args, in_eager, args)
    problems = compare(gradients(devices[0], False, args), wanted, 1e-5, "beside PyTorch's own")
    for device, ours, theirs in zip(devices, trained, eager, strict=True):
        problems += compare(ours, theirs, _engine.tolerance(args), f"on {device}")
    return _engine.verdict(problems, f"{args.workers} networks train as in eager PyTorch, the gradients are right")


if __name__ == "__main__":
    sys.exit(main())

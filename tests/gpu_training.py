"""Training programs for test_gpu.py, and what eager CUDA makes of them: ``python gpu_training.py FILE`` saves that.

PyTorch's autograd serves one kind of accelerator in a process, and where dtorch is imported that is dtorch. So eager
CUDA's gradients are computed by this file, in a process that does not import it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, Final

import torch
import torch.nn.functional as F
from same import Device, Program
from torch import nn


class Small(nn.Module):
    """A convolution, attention, norms and linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 16, 3, padding=1)
        self.batch_norm = nn.BatchNorm2d(16)
        self.norm = nn.LayerNorm(16)
        self.qkv = nn.Linear(16, 48)
        self.out = nn.Linear(16, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(F.gelu(self.batch_norm(self.conv(x))).flatten(2).transpose(1, 2))
        q, k, v = (part.unsqueeze(1) for part in self.qkv(x).chunk(3, -1))
        return self.out(F.scaled_dot_product_attention(q, k, v).squeeze(1).mean(1))


class Recurrent(nn.Module):
    """Layers of an LSTM and a GRU over an image's rows, and an RMS norm."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(36, 16, 2, batch_first=True)
        self.gru = nn.GRU(16, 16, batch_first=True)
        self.norm = nn.RMSNorm(16)
        self.out = nn.Linear(16, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.norm(self.gru(self.lstm(x.transpose(1, 2).flatten(2))[0])[0].mean(1)))


def _training(
    optimizer: Callable[..., torch.optim.Optimizer],
    dtype: torch.dtype | None = None,
    make: Callable[[], nn.Module] = Small,
) -> Program:
    def program(on: Device) -> list[torch.Tensor]:
        model = on.module(make)
        step = optimizer(model.parameters())
        kind = on.name.split(":")[0]
        scaler = torch.amp.GradScaler(kind, enabled=dtype == torch.float16)
        losses = []
        for _ in range(4):
            x, target = on(8, 3, 12, 12), on.indices(10, 8)
            step.zero_grad()
            with torch.autocast(kind, dtype=dtype or torch.bfloat16, enabled=dtype is not None):
                loss = F.cross_entropy(model(x), target)
            scaler.scale(loss).backward()
            scaler.step(step)
            scaler.update()
            losses.append(loss.detach())
        return [*losses, *model.parameters(), *(p.grad for p in model.parameters())]

    return program


def _sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


#: To be run with deterministic algorithms: without, PyTorch promises no bits for a convolution's gradient.
TRAININGS: Final[dict[str, Program]] = {
    "sgd": _training(_sgd),
    "adamw": _training(lambda p: torch.optim.AdamW(p, lr=1e-3)),
    "adamw_fused": _training(lambda p: torch.optim.AdamW(p, lr=1e-3, fused=True)),
    "autocast_bfloat16": _training(_sgd, torch.bfloat16),
    "autocast_float16": _training(_sgd, torch.float16),
    "recurrent": _training(_sgd, make=Recurrent),
    "recurrent_bfloat16": _training(_sgd, torch.bfloat16, Recurrent),
    "recurrent_float16": _training(_sgd, torch.float16, Recurrent),
}


def main(file: str) -> None:
    torch.use_deterministic_algorithms(True)
    torch.save({name: program(Device("cuda:0")) for name, program in TRAININGS.items()}, file)


if __name__ == "__main__":
    main(sys.argv[1])

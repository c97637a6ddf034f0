"""Comparing dtorch with eager PyTorch to the last bit: inputs made alike on any device, and results compared.

A test writes its program once, as a function of a :class:`Device`; :func:`same` runs it on the CPU and on a worker.
Eager has to use as many threads as the worker does, since some kernels' sums depend on it (``eager_threads``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch


class Device:
    """Makes inputs on one device; the calls of another one's in the same order give the same inputs there."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._generator = torch.Generator().manual_seed(1234)

    def __call__(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Normally distributed; for integers, numbers from -9 to 9."""
        if dtype == torch.bool:
            return self.put(torch.randint(0, 2, shape, generator=self._generator, dtype=torch.uint8).bool())
        if not dtype.is_floating_point and not dtype.is_complex:
            return self.put(torch.randint(-9, 10, shape, generator=self._generator).to(dtype))
        if dtype.is_complex:
            return self.put(torch.randn(shape, generator=self._generator, dtype=dtype))
        return self.put(torch.randn(shape, generator=self._generator).to(dtype))

    def indices(self, high: int, *shape: int) -> torch.Tensor:
        """Whole numbers from 0 to ``high`` - 1."""
        return self.put(torch.randint(0, high, shape, generator=self._generator))

    def parameter(self, *shape: int) -> torch.Tensor:
        return self(*shape).requires_grad_()

    def put(self, value: Any) -> torch.Tensor:
        """The tensor (or what makes one) on this device."""
        return torch.as_tensor(value).to(self.name)

    def module(self, make: Callable[[], torch.nn.Module]) -> Any:
        """A module with the same random weights on each device."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(4321)
            return make().to(self.name)


def bits(t: torch.Tensor) -> torch.Tensor:
    """A CPU tensor's bytes, so that NaNs and signed zeros compare as what they are."""
    return t.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)


def sparse_parts(t: torch.Tensor) -> dict[str, torch.Tensor]:
    """The dense tensors that a sparse one is made of."""
    t = t.detach()
    if t.layout == torch.sparse_coo:
        return {"indices": t._indices(), "values": t._values()}
    rows = t.layout in (torch.sparse_csr, torch.sparse_bsr)
    compressed, plain = (t.crow_indices(), t.col_indices()) if rows else (t.ccol_indices(), t.row_indices())
    return {"compressed indices": compressed, "plain indices": plain, "values": t.values()}


def assert_same(got: Any, want: Any, where: str = "the result") -> None:
    """``got`` (on a worker) has eager's structure, types, shapes, strides and bits."""
    if isinstance(want, torch.Tensor):
        assert isinstance(got, torch.Tensor), f"{where}: {type(got)}, not a tensor"
        assert got.device.type == "dtorch", f"{where} is on {got.device}"
        assert got.layout == want.layout, f"{where} is {got.layout}, eager's is {want.layout}"
        if want.layout != torch.strided:
            assert (got.dtype, got.shape, got.requires_grad) == (want.dtype, want.shape, want.requires_grad), where
            if want.layout == torch.sparse_coo:
                assert got.is_coalesced() == want.is_coalesced(), f"{where}: coalesced"
            assert_same(sparse_parts(got), sparse_parts(want), where)
            return
        seen = (got.dtype, tuple(got.shape), got.stride(), got.storage_offset(), got.is_conj(), got.is_neg())
        eager = (want.dtype, tuple(want.shape), want.stride(), want.storage_offset(), want.is_conj(), want.is_neg())
        assert seen == eager, f"{where}: dtype, shape, stride, offset, conj, neg are {seen}, eager's are {eager}"
        assert got.requires_grad == want.requires_grad, f"{where}: requires_grad is {got.requires_grad}"
        value = got.detach().cpu()
        assert (value.dtype, value.shape) == (want.dtype, want.shape), f"{where}: {value.dtype} {value.shape}"
        assert torch.equal(bits(value), bits(want)), f"{where}: {_difference(value, want.detach())}"
    elif isinstance(want, dict):
        assert set(got) == set(want), where
        for key in want:
            assert_same(got[key], want[key], f"{where}[{key!r}]")
    elif isinstance(want, (tuple, list)):
        assert isinstance(got, (tuple, list)) and len(got) == len(want), f"{where}: {got!r}, not {len(want)} values"
        for i, (g, w) in enumerate(zip(got, want, strict=True)):
            assert_same(g, w, f"{where}[{i}]")
    else:
        assert type(got) is type(want) and (got == want or got != got), f"{where}: {got!r}, not {want!r}"


def same(program: Callable[[Device], Any], worker: str = "dtorch") -> Any:
    """Run the program on the CPU and on a worker, compare, and return what the worker gave."""
    want = program(Device("cpu"))
    got = program(Device(worker))
    assert_same(got, want)
    return got


def _difference(value: torch.Tensor, want: torch.Tensor) -> str:
    """In which element two CPU tensors of one shape and dtype first differ, in words."""
    ours, eagers = (bits(t).view(t.numel(), -1) for t in (value, want))
    places = (ours != eagers).any(1).nonzero().flatten().tolist()
    got, eager = (t.resolve_conj().reshape(-1)[places[0]].item() for t in (value, want))
    return (
        f"bits differ in {len(places)} of {want.numel()} elements, first in {places[0]}: {got!r}, eager has {eager!r}"
    )


@contextmanager
def eager_threads(threads: int) -> Iterator[None]:
    """Let eager PyTorch use that many threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


#: What a test compares: a function of the device that its inputs are made on.
Program = Callable[[Device], Any]


def named(**programs: Program) -> pytest.MarkDecorator:
    """Run the test with each program, under its name."""
    return pytest.mark.parametrize("program", programs.values(), ids=programs.keys())

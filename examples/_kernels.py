"""Operators with kernels of one's own: ``silu(x) * y`` (SwiGLU) and its gradient, each one pass over memory on a GPU.

On CUDA the kernel is a CuPy `RawKernel`, or a Triton one, whichever is installed; elsewhere, PyTorch's own operators.
This module knows nothing of dtorch: the client imports it for schemas, fake kernels and gradient, and the workers, by
``dtorch.import_on_workers("_kernels")``, for the kernels. It imports CuPy or Triton only when a kernel is called, so
the client, which never calls one, needs neither.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

#: What `library` may be: "auto" takes the first that is installed, and PyTorch's operators where none is.
LIBRARIES = ("auto", "cupy", "triton", "torch")

# -- the operators: schema, CPU kernel, fake kernel, gradient


@torch.library.custom_op("dtorch_examples::swiglu", mutates_args=(), device_types="cpu")
def swiglu(x: Tensor, y: Tensor, library: str = "auto") -> Tensor:
    """``silu(x) * y``, elementwise; two float32 tensors of one shape."""
    _check(x, y)
    return F.silu(x.contiguous()) * y.contiguous()


@torch.library.custom_op("dtorch_examples::swiglu_backward", mutates_args=(), device_types="cpu")
def swiglu_backward(grad: Tensor, x: Tensor, y: Tensor, library: str = "auto") -> tuple[Tensor, Tensor]:
    """The gradients of `swiglu` by x and y."""
    grad, x, y = grad.contiguous(), x.contiguous(), y.contiguous()
    sigmoid = torch.sigmoid(x)
    return grad * y * sigmoid * (1 + x * (1 - sigmoid)), grad * x * sigmoid


@swiglu.register_fake
def _(x: Tensor, y: Tensor, library: str = "auto") -> Tensor:
    _check(x, y)
    return x.new_empty(x.shape)


def _check(x: Tensor, y: Tensor) -> None:
    torch._check(x.shape == y.shape, lambda: f"swiglu: shapes {tuple(x.shape)} and {tuple(y.shape)} differ")
    torch._check(x.dtype == y.dtype == torch.float32, lambda: "swiglu: float32 only")


@swiglu_backward.register_fake
def _(grad: Tensor, x: Tensor, y: Tensor, library: str = "auto") -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(x.shape)


def _keep(ctx: Any, inputs: tuple[Tensor, Tensor, str], output: Tensor) -> None:
    x, y, ctx.library = inputs
    ctx.save_for_backward(x, y)


def _gradient(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
    return *swiglu_backward(grad, *ctx.saved_tensors, ctx.library), None


swiglu.register_autograd(_gradient, setup_context=_keep)

# -- the kernels for CUDA


@swiglu.register_kernel("cuda")
def _(x: Tensor, y: Tensor, library: str = "auto") -> Tensor:
    _check(x, y)
    launch = _launcher(library)
    x, y = x.contiguous(), y.contiguous()
    if launch is None:
        return F.silu(x) * y
    out = x.new_empty(x.shape)
    launch("swiglu", x, y, out)
    return out


@swiglu_backward.register_kernel("cuda")
def _(grad: Tensor, x: Tensor, y: Tensor, library: str = "auto") -> tuple[Tensor, Tensor]:
    launch = _launcher(library)
    grad, x, y = grad.contiguous(), x.contiguous(), y.contiguous()
    if launch is None:
        sigmoid = torch.sigmoid(x)
        return grad * y * sigmoid * (1 + x * (1 - sigmoid)), grad * x * sigmoid
    dx, dy = x.new_empty(x.shape), x.new_empty(x.shape)
    launch("swiglu_backward", grad, x, y, dx, dy)
    return dx, dy


Launcher = Callable[..., None]


def _launcher(library: str) -> Launcher | None:
    """What starts a kernel: a function of its name and its tensors; None means PyTorch's operators."""
    if library not in LIBRARIES:
        raise ValueError(f"library={library!r}: one of {', '.join(LIBRARIES)}")
    if library == "auto":
        library = next((name for name in ("cupy", "triton") if importlib.util.find_spec(name)), "torch")
    return {"cupy": _launch_cupy, "triton": _launch_triton}.get(library)


CUDA_SOURCE = r"""
extern "C" __global__ void swiglu(const float* x, const float* y, float* out, long long n) {
  long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x;
  if (i < n) out[i] = x[i] / (1.0f + expf(-x[i])) * y[i];
}

extern "C" __global__ void swiglu_backward(const float* grad, const float* x, const float* y, float* dx, float* dy,
                                           long long n) {
  long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x;
  if (i < n) {
    float sigmoid = 1.0f / (1.0f + expf(-x[i]));
    dx[i] = grad[i] * y[i] * sigmoid * (1.0f + x[i] * (1.0f - sigmoid));
    dy[i] = grad[i] * x[i] * sigmoid;
  }
}
"""
THREADS = 256


@functools.cache
def _cupy_kernel(name: str) -> Any:
    import cupy

    return cupy.RawKernel(CUDA_SOURCE, name)


def _launch_cupy(name: str, *tensors: Tensor) -> None:
    """On PyTorch's device and current stream, which orders the kernel with PyTorch's own and with its allocator."""
    import cupy

    n = tensors[0].numel()
    if n:
        stream = cupy.cuda.ExternalStream(torch.cuda.current_stream(tensors[0].device).cuda_stream)
        with cupy.cuda.Device(tensors[0].get_device()), stream:
            arguments = (*(tensor.data_ptr() for tensor in tensors), n)
            _cupy_kernel(name)((-(-n // THREADS),), (THREADS,), arguments)


@functools.cache
def _triton_kernels() -> dict[str, Any]:
    from _kernels_triton import swiglu, swiglu_backward

    return {"swiglu": swiglu, "swiglu_backward": swiglu_backward}


def _launch_triton(name: str, *tensors: Tensor) -> None:
    """Triton takes PyTorch's current stream by itself, and the current device."""
    n = tensors[0].numel()
    if n:
        with torch.cuda.device(tensors[0].device):
            _triton_kernels()[name][(-(-n // 1024),)](*tensors, n, BLOCK=1024)

"""The kernels of `_kernels.py` in Triton, whose kernels have to lie in a file that can import it."""

import triton
import triton.language as tl


@triton.jit
def swiglu(x_ptr, y_ptr, out_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    x = tl.load(x_ptr + at, mask=inside)
    y = tl.load(y_ptr + at, mask=inside)
    tl.store(out_ptr + at, x * tl.sigmoid(x) * y, mask=inside)


@triton.jit
def swiglu_backward(grad_ptr, x_ptr, y_ptr, dx_ptr, dy_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    grad = tl.load(grad_ptr + at, mask=inside)
    x = tl.load(x_ptr + at, mask=inside)
    y = tl.load(y_ptr + at, mask=inside)
    sigmoid = tl.sigmoid(x)
    tl.store(dx_ptr + at, grad * y * sigmoid * (1 + x * (1 - sigmoid)), mask=inside)
    tl.store(dy_ptr + at, grad * x * sigmoid, mask=inside)

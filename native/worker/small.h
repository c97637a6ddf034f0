// Arithmetic on a few numbers without PyTorch's TensorIterator, whose set-up is most of the time of such an operator.
//
// SMALL-1  Equal bits: sums, differences, products and quotients are rounded once, by every kernel alike. What is not so
//          simple is left to PyTorch's own: other dtypes, broadcasts, strides, and a NaN in the result, whose bits depend on
//          how a kernel was compiled.
#pragma once

#include <ATen/core/Tensor.h>

namespace dtorch::worker {

enum class Arithmetic { None, Add, Sub, Mul, Div };

// `a` and `b` combined, in `out`'s memory if it is defined (it may be an argument of the same geometry), else in memory of
// its own. Undefined, and nothing written, where PyTorch's kernel shall do it.
at::Tensor small_arithmetic(Arithmetic what, const at::Tensor& a, const at::Tensor& b, const at::Tensor& out);

// How many it has done; of the executor's thread, as the calls.
uint64_t small_calls();

}  // namespace dtorch::worker

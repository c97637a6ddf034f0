// See small.h.
#include "worker/small.h"

#include <ATen/EmptyTensor.h>

#include <cstring>
#include <type_traits>

namespace dtorch::worker {

namespace {

constexpr int64_t kMost = 64;  // elements; beyond, PyTorch's vector loops have caught up

// Whole numbers overflow as unsigned ones do, in PyTorch's kernels too.
template <class T>
T combine(Arithmetic what, T a, T b) {
  using U = typename std::conditional_t<std::is_integral_v<T>, std::make_unsigned<T>, std::type_identity<T>>::type;
  auto x = static_cast<U>(a), y = static_cast<U>(b);
  switch (what) {
    case Arithmetic::Add: return static_cast<T>(x + y);
    case Arithmetic::Sub: return static_cast<T>(x - y);
    case Arithmetic::Mul: return static_cast<T>(x * y);
    default: return a / b;
  }
}

template <class T>
bool run(Arithmetic what, const void* a, const void* b, void* results, int64_t n) {
  const T *x = static_cast<const T*>(a), *y = static_cast<const T*>(b);
  T* z = static_cast<T*>(results);
  bool ordinary = true;
  for (int64_t i = 0; i < n; ++i) {
    z[i] = combine(what, x[i], y[i]);
    ordinary = ordinary && z[i] == z[i];
  }
  return ordinary;
}

bool run(at::ScalarType dtype, Arithmetic what, const void* a, const void* b, void* results, int64_t n) {
  switch (dtype) {
    case at::kFloat: return run<float>(what, a, b, results, n);
    case at::kDouble: return run<double>(what, a, b, results, n);
    case at::kLong: return what != Arithmetic::Div && run<int64_t>(what, a, b, results, n);
    default: return false;
  }
}

// Whether a tensor lies partly in the memory that is written: PyTorch refuses that.
bool overlaps(const at::Tensor& t, const void* out, size_t nbytes) {
  auto *from = static_cast<const char*>(t.const_data_ptr()), *to = static_cast<const char*>(out);
  return from != to && from < to + nbytes && to < from + nbytes;
}

uint64_t calls = 0;

}  // namespace

uint64_t small_calls() { return calls; }

at::Tensor small_arithmetic(Arithmetic what, const at::Tensor& a, const at::Tensor& b, const at::Tensor& out) {
  const auto *x = a.unsafeGetTensorImpl(), *y = b.unsafeGetTensorImpl();
  int64_t n = x->numel();
  if (n == 0 || n > kMost || x->dtype() != y->dtype() || x->sizes() != y->sizes() || !x->is_contiguous() || !y->is_contiguous())
    return {};
  size_t nbytes = static_cast<size_t>(n) * a.element_size();
  if (out.defined() && (overlaps(a, out.const_data_ptr(), nbytes) || overlaps(b, out.const_data_ptr(), nbytes))) return {};
  alignas(8) std::byte results[kMost * 8];
  if (!run(a.scalar_type(), what, a.const_data_ptr(), b.const_data_ptr(), results, n)) return {};
  at::Tensor made = out;
  if (!made.defined()) made = at::detail::empty_cpu(x->sizes(), a.scalar_type());
  std::memcpy(made.mutable_data_ptr(), results, nbytes);
  ++calls;
  return made;
}

}  // namespace dtorch::worker

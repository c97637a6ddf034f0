// Composites that the client decides on itself: linear and matmul as one record, where autograd has no part in it, and
// group_norm, which asks whether it runs on the CPU.
//
// Both are composites: on the client they fall apart into transposes, views and an addmm or bmm, each a dispatch. When no
// gradient is wanted the worker can take them whole, and its composite does what eager's would. When one is wanted, or
// when the composite's choices depend on flags that the worker does not see (matmul folds a batch by requires_grad), they
// fall apart here, exactly as in eager, with eager's own backward.
//
// The kernels stand at AutogradPrivateUse1, because a composite operator that has a kernel at PrivateUse1 only would be
// given a backward of its own (linear_backward), whose bits are not those of eager's.
#include "client/device.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/group_norm_native.h>
#include <ATen/ops/linear_native.h>
#include <ATen/ops/linear_ops.h>
#include <ATen/ops/matmul_native.h>
#include <ATen/ops/matmul_ops.h>
#include <ATen/ops/native_group_norm_ops.h>
#include <torch/library.h>

#include "client/unboxed.h"

namespace dtorch {

namespace {

// A plain tensor of ours that autograd, forward-mode AD and Python subclasses have nothing to do with.
bool plain(const at::Tensor& t) {
  return is_ours(t) && !t.unsafeGetTensorImpl()->is_python_dispatch() && !t.is_conj() && !t.is_neg() &&
         !t._fw_grad(/*level=*/0).defined() && c10::isFloatingType(t.scalar_type());
}

bool wants_grad(const at::Tensor& t) { return at::GradMode::is_enabled() && t.requires_grad(); }

// With contiguous operands the worker's linear is one addmm or mm, whatever requires_grad says.
bool linear_whole(const at::Tensor& x, const at::Tensor& w, const std::optional<at::Tensor>& b) {
  if (!plain(x) || !plain(w) || wants_grad(x) || wants_grad(w)) return false;
  if (b && b->defined() && (!plain(*b) || wants_grad(*b) || b->dim() != 1)) return false;
  return x.dim() >= 2 && w.dim() == 2 && x.is_contiguous() && w.is_contiguous();
}

at::Tensor linear(const at::Tensor& x, const at::Tensor& w, const std::optional<at::Tensor>& b) {
  if (Inferring::active() || !linear_whole(x, w, b)) return at::native::linear(x, w, b);
  at::AutoDispatchBelowADInplaceOrView below;
  return Unboxed<at::_ops::linear>::call(x, w, b);
}

// Two batches of matrices are expanded and multiplied as batches; nothing is folded.
bool matmul_whole(const at::Tensor& a, const at::Tensor& b) {
  return plain(a) && plain(b) && !a.requires_grad() && !b.requires_grad() && a.dim() >= 3 && b.dim() >= 3;
}

at::Tensor matmul(const at::Tensor& a, const at::Tensor& b) {
  if (Inferring::active() || !matmul_whole(a, b)) return at::native::matmul(a, b);
  at::AutoDispatchBelowADInplaceOrView below;
  return Unboxed<at::_ops::matmul>::call(a, b);
}

// Eager's group_norm keeps channels_last on the CPU, and only there; elsewhere it makes its input contiguous.
at::Tensor group_norm(const at::Tensor& x, int64_t groups, const std::optional<at::Tensor>& weight,
                      const std::optional<at::Tensor>& bias, double eps, bool cudnn) {
  auto format = x.dim() >= 2 ? x.suggest_memory_format() : at::MemoryFormat::Contiguous;
  if (format == at::MemoryFormat::Contiguous || groups <= 0 || x.size(1) % groups != 0)
    return at::native::group_norm(x, groups, weight, bias, eps, cudnn);
  auto contiguous = [](const std::optional<at::Tensor>& t) { return t && t->defined() ? t->contiguous() : at::Tensor(); };
  int64_t n = x.size(0), c = x.size(1), rest = n * c == 0 ? 0 : x.numel() / (n * c);
  return std::get<0>(at::_ops::native_group_norm::call(x.contiguous(format), contiguous(weight), contiguous(bias), n, c, rest,
                                                       groups, eps));
}

}  // namespace

void register_whole_kernels() {
  // In inference mode the autograd keys are skipped, hence both places.
  for (auto key : {c10::DispatchKey::AutogradPrivateUse1, c10::DispatchKey::PrivateUse1}) {
    auto* m = new torch::Library(torch::Library::IMPL, "aten", key, __FILE__, __LINE__);  // kept for good
    m->impl("linear", TORCH_FN(linear));
    m->impl("matmul", TORCH_FN(matmul));
    m->impl("group_norm", TORCH_FN(group_norm));
  }
}

}  // namespace dtorch

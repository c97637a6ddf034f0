// Composites that the client decides on itself: linear and matmul as one record, where autograd has no part in it, and those
// that ask whether they run on the CPU, group_norm and dropout.
//
// linear and matmul: on the client they fall apart into transposes, views and an addmm or bmm, each a dispatch. When no
// gradient is wanted the worker can take them whole, and its composite does what eager's would. When one is wanted, or
// when the composite's choices depend on flags that the worker does not see (matmul folds a batch by requires_grad), they
// fall apart here, exactly as in eager, with eager's own backward.
//
// The kernels stand at AutogradPrivateUse1, because a composite operator that has a kernel at PrivateUse1 only would be
// given a backward of its own (linear_backward), whose bits are not those of eager's.
#include "client/device.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/grad_mode.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/dropout_native.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/group_norm_native.h>
#include <ATen/ops/linear_native.h>
#include <ATen/ops/linear_ops.h>
#include <ATen/ops/matmul_native.h>
#include <ATen/ops/matmul_ops.h>
#include <ATen/ops/native_group_norm_backward_ops.h>
#include <ATen/ops/native_group_norm_ops.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include "client/unboxed.h"

namespace dtorch {

namespace {

// A plain tensor of ours that autograd, forward-mode AD and Python subclasses have nothing to do with.
bool plain(const at::Tensor& t) {
  return is_ours(t) && t.layout() == at::kStrided && !t.unsafeGetTensorImpl()->is_python_dispatch() && !t.is_conj() && !t.is_neg() &&
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

// native_group_norm of a channels_last input, with the gradient that eager has on the CPU: PyTorch's own formula keeps the
// layout of input and gradient there, and makes them contiguous on any other device, which gives other bits.
struct ChannelsLastGroupNorm : torch::autograd::Function<ChannelsLastGroupNorm> {
  static at::Tensor forward(torch::autograd::AutogradContext* ctx, const at::Tensor& x, const std::optional<at::Tensor>& w,
                            const std::optional<at::Tensor>& b, int64_t groups, double eps) {
    at::AutoDispatchBelowADInplaceOrView below;
    at::Tensor weight = w.value_or(at::Tensor()), bias = b.value_or(at::Tensor());
    auto [y, mean, rstd] = normalised(x, weight, bias, groups, eps);
    ctx->save_for_backward({x, weight, bias, mean, rstd});
    ctx->saved_data["groups"] = groups;
    ctx->saved_data["eps"] = eps;
    return y;
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* ctx, torch::autograd::variable_list grads) {
    auto saved = ctx->get_saved_variables();
    const auto &x = saved[0], &weight = saved[1], &bias = saved[2];
    int64_t groups = ctx->saved_data["groups"].toInt();
    if (!grads[0].defined()) return {{}, {}, {}, {}, {}};
    std::array<bool, 3> wanted{};
    for (size_t i = 0, edge = 0; i < 3; ++i)  // a weight that is left out has no edge in the graph
      if (saved[i].defined()) wanted[i] = ctx->needs_input_grad(edge++);
    if (at::GradMode::is_enabled()) {  // create_graph=True: PyTorch's own formula is then the same for all devices
      torch::autograd::variable_list inputs, found, all(5);
      for (size_t i = 0; i < 3; ++i)
        if (wanted[i]) inputs.push_back(saved[i]);
      auto y = std::get<0>(normalised(x, weight, bias, groups, ctx->saved_data["eps"].toDouble()));
      found = torch::autograd::grad({y}, inputs, {grads[0]}, /*retain_graph=*/true, /*create_graph=*/true);
      for (size_t i = 0, k = 0; i < 3; ++i)
        if (wanted[i]) all[i] = found[k++];
      return all;
    }
    auto [n, c, rest] = extents(x);
    auto [gx, gw, gb] = at::_ops::native_group_norm_backward::call(grads[0].contiguous(x.suggest_memory_format()), x, saved[3],
                                                                   saved[4], weight, n, c, rest, groups, wanted);
    return {gx, gw, gb, {}, {}};
  }

  static std::tuple<int64_t, int64_t, int64_t> extents(const at::Tensor& x) {
    int64_t n = x.size(0), c = x.size(1);
    return {n, c, n * c == 0 ? 0 : x.numel() / (n * c)};
  }
  static std::tuple<at::Tensor, at::Tensor, at::Tensor> normalised(const at::Tensor& x, const at::Tensor& weight,
                                                                   const at::Tensor& bias, int64_t groups, double eps) {
    auto [n, c, rest] = extents(x);
    return at::_ops::native_group_norm::call(x, weight, bias, n, c, rest, groups, eps);
  }
};

// Eager's group_norm keeps channels_last on the CPU, and only there; for CUDA it makes its input contiguous.
at::Tensor group_norm(const at::Tensor& x, int64_t groups, const std::optional<at::Tensor>& weight,
                      const std::optional<at::Tensor>& bias, double eps, bool cudnn) {
  if (Session::get().accelerated()) return at::native::group_norm(x.contiguous(), groups, weight, bias, eps, cudnn);
  auto format = x.dim() >= 2 ? x.suggest_memory_format() : at::MemoryFormat::Contiguous;
  if (format == at::MemoryFormat::Contiguous || groups <= 0 || x.size(1) % groups != 0)
    return at::native::group_norm(x, groups, weight, bias, eps, cudnn);
  auto contiguous = [](const std::optional<at::Tensor>& t) { return t && t->defined() ? t->contiguous() : at::Tensor(); };
  auto given = [](const at::Tensor& t) { return t.defined() ? std::optional<at::Tensor>(t) : std::nullopt; };
  auto input = x.contiguous(format);
  at::Tensor w = contiguous(weight), b = contiguous(bias);
  auto forward_mode = [](const at::Tensor& t) { return t.defined() && t._fw_grad(/*level=*/0).defined(); };
  auto learns = [](const at::Tensor& t) { return t.defined() && wants_grad(t); };
  if ((learns(input) || learns(w) || learns(b)) && !forward_mode(input) && !forward_mode(w) && !forward_mode(b))
    return ChannelsLastGroupNorm::apply(input, given(w), given(b), groups, eps);
  return std::get<0>(ChannelsLastGroupNorm::normalised(input, w, b, groups, eps));
}

// Elsewhere than on the CPU dropout is one operator, whose gradient rounds twice where the composite's rounds once: in 16 bits
// that shows.
at::Tensor dropout(const at::Tensor& x, double p, bool train) {
  if (Session::get().accelerated() || !train || p <= 0 || p >= 1 || x.sym_numel() == 0 || !c10::isReducedFloatingType(x.scalar_type()))
    return at::native::dropout(x, p, train);
  return x * at::empty_like(x).bernoulli_(1 - p).div_(1 - p);
}

}  // namespace

void register_whole_kernels() {
  // In inference mode the autograd keys are skipped, hence both places.
  for (auto key : {c10::DispatchKey::AutogradPrivateUse1, c10::DispatchKey::PrivateUse1}) {
    auto* m = new torch::Library(torch::Library::IMPL, "aten", key, __FILE__, __LINE__);  // kept for good
    m->impl("linear", TORCH_FN(linear));
    m->impl("matmul", TORCH_FN(matmul));
    m->impl("group_norm", TORCH_FN(group_norm));
    m->impl("dropout", TORCH_FN(dropout));
  }
}

}  // namespace dtorch

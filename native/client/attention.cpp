// scaled_dot_product_attention: which backend computes it.
//
// PyTorch's composite asks for a choice and then calls the chosen backend's operator, whose name says its device. On CPU
// workers the choice is eager's for the CPU. On accelerators the worker chooses, once for arguments of one geometry; the
// composite knows fused operators of other devices than CUDA by one name only, so its kernel here calls CUDA's own, which the
// worker has, and its backward those operators' backward. Under torch.func and torch.compile attention is PyTorch's composite.
#include "client/device.h"

#include <ATen/native/transformers/attention.h>
#include <ATen/native/transformers/sdp_utils_cpp.h>
#include <ATen/ops/_fused_sdp_choice_ops.h>
#include <ATen/ops/_scaled_dot_product_cudnn_attention_backward_ops.h>
#include <ATen/ops/_scaled_dot_product_cudnn_attention_ops.h>
#include <ATen/ops/_scaled_dot_product_efficient_attention_backward_ops.h>
#include <ATen/ops/_scaled_dot_product_efficient_attention_ops.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_backward_ops.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_ops.h>
#include <ATen/ops/constant_pad_nd.h>
#include <torch/library.h>

#include <cmath>

#include "client/issue.h"

namespace dtorch {

namespace {

using at::Tensor;
using c10::SymInt;
using MaybeTensor = const std::optional<Tensor>&;
using Backend = at::SDPBackend;

Backend chosen(const Tensor& q, const Tensor& k, const Tensor& v, MaybeTensor mask, double dropout, bool causal,
               std::optional<double> scale, bool gqa) {
  if (!is_plain(q) || !is_plain(k) || !is_plain(v) || (mask && mask->defined() && !is_plain(*mask))) return Backend::math;
  static const OpInfo& choice = op_info("aten::_fused_sdp_choice", "");
  torch::jit::Stack stack;
  torch::jit::push(stack, q, k, v, mask, dropout, causal, scale, gqa);
  issue_boxed(choice, &stack);
  return static_cast<Backend>(stack[0].toInt());
}

}  // namespace

// Named, for PyTorch's stub asks for it too (below).
int64_t sdp_choice(const Tensor& q, const Tensor& k, const Tensor& v, MaybeTensor mask, double dropout, bool causal,
                   std::optional<double> scale, bool gqa) {
  if (!Session::get().accelerated())
    return at::_ops::_fused_sdp_choice::redispatch(c10::DispatchKeySet(c10::DispatchKey::CPU), q, k, v, mask, dropout, causal,
                                                   scale, gqa);
  auto backend = chosen(q, k, v, mask, dropout, causal, scale, gqa);
  bool fused = backend == Backend::flash_attention || backend == Backend::efficient_attention || backend == Backend::cudnn_attention;
  return static_cast<int64_t>(fused ? Backend::overrideable : backend);
}

namespace {

// Flash attention takes heads of a multiple of eight. Zeros change neither the scores nor, cut off again, the results.
int64_t missing(const Tensor& t) { return (8 - t.size(-1) % 8) % 8; }
Tensor padded(const Tensor& t, int64_t n) { return n ? at::constant_pad_nd(t, {0, n}) : t; }
Tensor cut(const Tensor& t, int64_t size) { return t.defined() && t.size(-1) != size ? t.narrow(-1, 0, size) : t; }

double scale_of(const Tensor& q, std::optional<double> scale) {
  return scale.value_or(1.0 / std::sqrt(static_cast<double>(q.size(-1))));
}

// One for every score, rows aligned as the memory-efficient kernel wants them.
Tensor bias_of(MaybeTensor bias, const Tensor& q, const Tensor& k) {
  if (!bias || !bias->defined()) return {};
  constexpr int64_t kAligned = 16;
  Tensor b = *bias;
  int64_t n = b.dim() ? b.size(-1) : 1;
  if (n > 1 && n % kAligned) b = at::constant_pad_nd(b, {0, kAligned - n % kAligned}).narrow(-1, 0, n);
  return b.expand({q.size(0), q.size(1), q.size(2), k.size(2)});
}

// cuDNN cannot take -inf: PyTorch makes this of a boolean mask for it, and the other of one for everything else.
Tensor finite(MaybeTensor bias) {
  constexpr double kMasked = -65504.0;
  return bias && bias->defined() ? bias->clamp_min(kMasked) : Tensor();
}

bool wants_grad(const Tensor& t) { return at::GradMode::is_enabled() && t.defined() && t.requires_grad(); }

// cuDNN gives the bias no gradient.
Backend backend_for(const Tensor& q, const Tensor& k, const Tensor& v, MaybeTensor bias, double dropout, bool causal,
                    std::optional<double> scale) {
  bool gqa = q.dim() > 2 && q.size(-3) != k.size(-3);
  auto backend = chosen(q, k, v, bias, dropout, causal, scale, gqa);
  bool bias_too = backend == Backend::cudnn_attention && bias && wants_grad(*bias);
  return bias_too ? Backend::efficient_attention : backend;
}

using Fused = std::tuple<Tensor, Tensor, Tensor, Tensor, SymInt, SymInt, Tensor, Tensor, Tensor>;

// The backward tells the backend by the length of the queries that the forward gave: flash attention's, cuDNN's negated, or 0.
Fused fused(const Tensor& q, const Tensor& k, const Tensor& v, MaybeTensor bias, double dropout, bool causal, bool debug,
            std::optional<double> scale) {
  TORCH_CHECK(!debug, "dtorch: attention gives no debug mask");
  bool sums_wanted = wants_grad(q) || wants_grad(k) || wants_grad(v) || (bias && wants_grad(*bias));
  switch (backend_for(q, k, v, bias, dropout, causal, scale)) {
    case Backend::flash_attention: {
      auto n = missing(q);
      auto all = at::_ops::_scaled_dot_product_flash_attention::call(padded(q, n), padded(k, n), padded(v, missing(v)), dropout,
                                                                     causal, /*return_debug_mask=*/false, scale_of(q, scale));
      std::get<0>(all) = cut(std::get<0>(all), v.size(-1));
      return all;
    }
    case Backend::cudnn_attention: {
      auto all = at::_ops::_scaled_dot_product_cudnn_attention::call(q, k, v, finite(bias), sums_wanted, dropout, causal,
                                                                     /*return_debug_mask=*/false, scale);
      std::get<4>(all) = -q.sym_size(2);
      return all;
    }
    default: {
      auto [out, sums, seed, offset] = at::_ops::_scaled_dot_product_efficient_attention::call(q, k, v, bias_of(bias, q, k),
                                                                                               sums_wanted, dropout, causal, scale);
      return {out, sums, {}, {}, 0, 0, seed, offset, {}};
    }
  }
}

std::tuple<Tensor, Tensor, Tensor, Tensor> fused_backward(const Tensor& grad, const Tensor& q, const Tensor& k, const Tensor& v,
                                                          const Tensor& bias, std::array<bool, 4> wanted, const Tensor& out,
                                                          const Tensor& sums, const Tensor& cum_q, const Tensor& cum_k, SymInt max_q,
                                                          SymInt max_k, double dropout, bool causal, const Tensor& seed,
                                                          const Tensor& offset, std::optional<double> scale) {
  if (max_q > 0) {
    int64_t n = missing(q), m = missing(v);
    auto [gq, gk, gv] = at::_ops::_scaled_dot_product_flash_attention_backward::call(
        padded(grad, m), padded(q, n), padded(k, n), padded(v, m), padded(out, m), sums, cum_q, cum_k, max_q, max_k, dropout, causal,
        seed, offset, scale_of(q, scale));
    return {cut(gq, q.size(-1)), cut(gk, k.size(-1)), cut(gv, v.size(-1)), {}};
  }
  auto given = bias.defined() ? std::optional<Tensor>(bias) : std::nullopt;
  if (max_q < 0) {
    auto [gq, gk, gv] = at::_ops::_scaled_dot_product_cudnn_attention_backward::call(
        grad, q, k, v, out, sums, seed, offset, finite(given), cum_q, cum_k, -max_q, max_k, dropout, causal, scale);
    return {gq, gk, gv, {}};
  }
  wanted[3] = wanted[3] && bias.defined();
  auto [gq, gk, gv, gb] = at::_ops::_scaled_dot_product_efficient_attention_backward::call(
      grad, q, k, v, bias_of(given, q, k), out, sums, seed, offset, dropout, wanted, causal, scale);
  if (wanted[3]) gb = gb.sum_to_size(bias.sizes());
  return {gq, gk, gv, wanted[3] ? gb : Tensor()};
}

}  // namespace

void register_attention() {
  auto* m = new torch::Library(torch::Library::IMPL, "aten", c10::DispatchKey::PrivateUse1, __FILE__, __LINE__);  // kept for good
  m->impl("_fused_sdp_choice", TORCH_FN(sdp_choice));
  m->impl("_scaled_dot_product_fused_attention_overrideable", TORCH_FN(fused));
  m->impl("_scaled_dot_product_fused_attention_overrideable_backward", TORCH_FN(fused_backward));
}

}  // namespace dtorch

namespace at::native {
REGISTER_PRIVATEUSE1_DISPATCH(_fused_sdp_choice_stub, &dtorch::sdp_choice)
}

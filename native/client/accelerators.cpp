// What PyTorch's composites do on CUDA and on no other device: batch norm and bilinear samples by cuDNN, RMS norm as one operator.
//
// The composites go by the device's name, which is another one here. While the workers have accelerators, what they call for
// CUDA is called for dtorch. Whether something is cuDNN's the worker says, once for arguments of one geometry.
#include <ATen/native/GridSamplerUtils.h>
#include <ATen/ops/_batch_norm_impl_index_native.h>
#include <ATen/ops/cudnn_batch_norm_ops.h>
#include <ATen/ops/cudnn_grid_sampler_ops.h>
#include <ATen/ops/grid_sampler_native.h>
#include <torch/library.h>

#include <algorithm>
#include <memory>

#include "client/cudnn_rnn.h"
#include "client/device.h"
#include "client/issue.h"
#include "common/batch_norm.h"

namespace dtorch {

namespace {

using at::Tensor;
using MaybeTensor = const std::optional<Tensor>&;

bool by_cudnn(const Tensor& input, const Tensor& weight, const Tensor& bias, MaybeTensor mean, MaybeTensor var, bool training,
              double eps) {
  static const OpInfo& choice = op_info("dtorch::batch_norm_by_cudnn", "");
  torch::jit::Stack stack;
  torch::jit::push(stack, input, weight, bias, mean, var, training, eps);
  issue_boxed(choice, &stack);
  return stack[0].toInt() != 0;
}

// What does not fit is left to the composite, which says so; what is wrapped or traced (is_plain) is left to it, too.
bool fits(const Tensor& input, std::initializer_list<const std::optional<Tensor>*> of_channels) {
  if (!is_plain(input) || input.dim() < 2 || input.numel() == 0) return false;
  return std::all_of(of_channels.begin(), of_channels.end(), [&](auto* t) {
    return !*t || !(*t)->defined() || (is_plain(**t) && (*t)->device() == input.device() && (*t)->numel() == input.size(1));
  });
}

std::tuple<Tensor, Tensor, Tensor, Tensor, int64_t> batch_norm(const Tensor& input, MaybeTensor weight, MaybeTensor bias,
                                                               MaybeTensor mean, MaybeTensor var, bool training, double momentum,
                                                               double eps, bool cudnn_enabled) {
  bool affine = weight && weight->defined() && bias && bias->defined();
  if (!Session::get().accelerated() || !affine || !fits(input, {&weight, &bias, &mean, &var}) ||
      !by_cudnn(input, *weight, *bias, mean, var, training, eps))
    return at::native::_batch_norm_impl_index(input, weight, bias, mean, var, training, momentum, eps, cudnn_enabled);
  auto contiguous = [](MaybeTensor t) { return t && t->defined() ? t->contiguous() : Tensor(); };
  auto [out, save_mean, save_var, reserve] =
      at::_ops::cudnn_batch_norm::call(input.contiguous(input.suggest_memory_format()), weight->contiguous(), contiguous(bias),
                                       contiguous(mean), contiguous(var), training, momentum, eps);
  return {out, save_mean, save_var, reserve, 1};  // 1: PyTorch's number for cuDNN
}

// cuDNN's sampler has one mode and at most 1024 channels.
Tensor grid_sampler(const Tensor& input, const Tensor& grid, int64_t mode, int64_t padding, bool align_corners) {
  using at::native::GridSamplerInterpolation, at::native::GridSamplerPadding;
  auto fits = [](const Tensor& t) {
    return is_plain(t) && t.dim() == 4 && at::native::canUse32BitIndexMath(t) &&
           (t.scalar_type() == at::kFloat || t.scalar_type() == at::kHalf || t.scalar_type() == at::kDouble);
  };
  bool cudnns = Session::get().accelerated() && mode == static_cast<int64_t>(GridSamplerInterpolation::Bilinear) &&
                padding == static_cast<int64_t>(GridSamplerPadding::Zeros) && align_corners && fits(input) && fits(grid) &&
                input.size(1) <= 1024 && cudnn_takes(input) && cudnn_takes(grid);
  return cudnns ? at::_ops::cudnn_grid_sampler::call(input, grid)
                : at::native::grid_sampler(input, grid, mode, padding, align_corners);
}

void issue(const c10::OperatorHandle& op, torch::jit::Stack* stack) { issue_boxed(op_info(op), stack); }

}  // namespace

void register_accelerators() {
  using torch::Library;
  static auto* own = new Library(Library::FRAGMENT, "dtorch", std::nullopt, __FILE__, __LINE__);  // kept for good, all of them
  own->def(kBatchNormByCudnn);
  // In inference mode the autograd keys are skipped, hence both places.
  for (auto key : {c10::DispatchKey::AutogradPrivateUse1, c10::DispatchKey::PrivateUse1}) {
    auto* m = new Library(Library::IMPL, "aten", key, __FILE__, __LINE__);
    m->impl("_batch_norm_impl_index", TORCH_FN(batch_norm));
    m->impl("grid_sampler", TORCH_FN(grid_sampler));
  }
}

// A kernel of ours makes autograd take the operator's own gradient, and not its parts'.
void serve_accelerators(bool accelerated) {
  static auto& kernels = *new std::unique_ptr<torch::Library>;
  serve_cells(!accelerated);
  if (!accelerated) return kernels.reset();
  if (kernels) return;
  kernels = std::make_unique<torch::Library>(torch::Library::IMPL, "aten", c10::DispatchKey::PrivateUse1, __FILE__, __LINE__);
  kernels->impl("_fused_rms_norm", torch::CppFunction::makeFromBoxedFunction<&issue>());
}

}  // namespace dtorch

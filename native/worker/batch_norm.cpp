// The operator of native/common/batch_norm.h.
#include "common/batch_norm.h"

#include <ATen/native/Normalization.h>
#include <torch/library.h>

#include "worker/operators.h"

namespace dtorch::worker {

namespace {

using Maybe = const std::optional<at::Tensor>&;

int64_t by_cudnn(const at::Tensor& input, const at::Tensor& weight, const at::Tensor& bias, Maybe mean, Maybe var, bool training,
                 double eps) {
  auto backend = at::native::_select_batch_norm_backend(input, weight, bias, mean.value_or(at::Tensor()),
                                                        var.value_or(at::Tensor()), training, eps);
  return backend == at::native::BatchNormBackend::Cudnn;
}

}  // namespace

// As register_nested(), not when the module is loaded.
void register_batch_norm() {
  using torch::Library;
  static auto* fragment = new Library(Library::FRAGMENT, "dtorch", std::nullopt, __FILE__, __LINE__);  // kept for good
  fragment->def(kBatchNormByCudnn);
  static auto* kernels = new Library(Library::IMPL, "dtorch", c10::DispatchKey::CompositeExplicitAutograd, __FILE__, __LINE__);
  kernels->impl("batch_norm_by_cudnn", TORCH_FN(by_cudnn));
}

}  // namespace dtorch::worker

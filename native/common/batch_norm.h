// The operator by which a worker says how it computes batch norm, by PyTorch's own rule for its device: 1 by cuDNN, else 0.
// The rule looks at types, sizes and switches, and at no value.
#pragma once

namespace dtorch {

constexpr const char* kBatchNormByCudnn =
    "batch_norm_by_cudnn(Tensor input, Tensor weight, Tensor bias, Tensor? running_mean, Tensor? running_var, bool training, "
    "float eps) -> int";

}  // namespace dtorch

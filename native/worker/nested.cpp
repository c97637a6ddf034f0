// The operator of native/common/nested.h. Nested tensors live within one call: the store has dense ones only.
#include "common/nested.h"

#include <ATen/EmptyTensor.h>
#include <ATen/ops/_nested_from_padded.h>
#include <ATen/ops/_transformer_encoder_layer_fwd.h>
#include <ATen/ops/to_padded_tensor_ops.h>
#include <torch/library.h>

#include "worker/operators.h"

namespace dtorch::worker {

namespace {

using Mask = const std::optional<at::Tensor>&;

at::Tensor encoder_layer(const at::Tensor& padded, c10::IntArrayRef lengths, int64_t embed_dim, int64_t heads,
                         const at::Tensor& qkv_weight, const at::Tensor& qkv_bias, const at::Tensor& proj_weight,
                         const at::Tensor& proj_bias, bool use_gelu, bool norm_first, double eps,
                         const at::Tensor& norm_weight_1, const at::Tensor& norm_bias_1, const at::Tensor& norm_weight_2,
                         const at::Tensor& norm_bias_2, const at::Tensor& ffn_weight_1, const at::Tensor& ffn_bias_1,
                         const at::Tensor& ffn_weight_2, const at::Tensor& ffn_bias_2, Mask mask,
                         std::optional<int64_t> mask_type) {
  at::Tensor sizes = at::detail::empty_cpu({static_cast<int64_t>(lengths.size()), 2}, at::kLong);
  auto* rows = sizes.mutable_data_ptr<int64_t>();
  for (size_t i = 0; i < lengths.size(); ++i) {
    rows[2 * i] = lengths[i];
    rows[2 * i + 1] = padded.size(2);
  }
  auto nested = at::_nested_from_padded(padded, sizes, /*fuse_transform_0213=*/false);
  auto out = at::_transformer_encoder_layer_fwd(nested, embed_dim, heads, qkv_weight, qkv_bias, proj_weight, proj_bias, use_gelu,
                                                norm_first, eps, norm_weight_1, norm_bias_1, norm_weight_2, norm_bias_2,
                                                ffn_weight_1, ffn_bias_1, ffn_weight_2, ffn_bias_2, mask, mask_type);
  return at::_ops::to_padded_tensor::call(out, 0.0, padded.sym_sizes());
}

}  // namespace

// Not when the module is loaded: a client that loads this module beside its own has the operator already.
void register_nested() {
  using torch::Library;
  static auto* fragment = new Library(Library::FRAGMENT, "dtorch", std::nullopt, __FILE__, __LINE__);  // kept for good
  fragment->def(kEncoderLayer);
  static auto* kernels = new Library(Library::IMPL, "dtorch", c10::DispatchKey::CompositeExplicitAutograd, __FILE__, __LINE__);
  kernels->impl("encoder_layer_of_lengths", TORCH_FN(encoder_layer));
}

}  // namespace dtorch::worker

// The operator that nn.TransformerEncoder's padded batches need of a worker, beyond PyTorch's own (native/client/nested.cpp
// says what for): _transformer_encoder_layer_fwd of the first `lengths[i]` rows of each padded[i], as a nested tensor, and
// its result padded with zeros to the size of `padded`.
#pragma once

namespace dtorch {

constexpr const char* kEncoderLayer =
    "encoder_layer_of_lengths(Tensor padded, int[] lengths, int embed_dim, int num_heads, Tensor qkv_weight, Tensor qkv_bias, "
    "Tensor proj_weight, Tensor proj_bias, bool use_gelu, bool norm_first, float eps, Tensor norm_weight_1, "
    "Tensor norm_bias_1, Tensor norm_weight_2, Tensor norm_bias_2, Tensor ffn_weight_1, Tensor ffn_bias_1, "
    "Tensor ffn_weight_2, Tensor ffn_bias_2, Tensor? mask=None, int? mask_type=None) -> Tensor";

}  // namespace dtorch

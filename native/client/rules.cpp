// Geometry rules, by hand, for frequent operators whose kernels are not structured: the CPU kernel's own layout, in a
// microsecond. Needed where shapes never repeat (decoding grows its key/value cache each token), because asking the worker
// would make the client wait. tests/test_geometry.py compares every rule with what the worker gives.
#include <unordered_map>

#include "client/geometry.h"

namespace dtorch {

namespace {

void add(Entry& e, at::ScalarType dtype, c10::IntArrayRef sizes, c10::IntArrayRef strides) {
  e.outs.push_back(make_spec(dtype, sizes, strides));
}

const at::Tensor& tensor(const c10::IValue& v) { return v.toTensor(); }

// A result of the CPU's flash kernel: [B, T, H, ...] in memory, seen as [B, H, T, ...].
void add_heads_inside(Entry& e, at::ScalarType dtype, int64_t b, int64_t h, int64_t t, std::optional<int64_t> d) {
  if (d) add(e, dtype, {b, h, t, *d}, {t * h * *d, *d, h * *d, 1});
  else add(e, dtype, {b, h, t}, {t * h, 1, h});
}

// (query, key, value, dropout_p, is_causal, attn_mask, scale) -> (output, logsumexp)
bool flash_attention(at::ArrayRef<c10::IValue> args, Entry& e) {
  const auto &q = tensor(args[0]), &v = tensor(args[2]);
  if (q.dim() != 4 || v.dim() != 4 || q.size(3) != v.size(3)) return false;
  for (int64_t n : q.sizes())
    if (n == 0) return false;
  auto dtype = q.scalar_type();
  auto statistics = dtype == at::kDouble ? at::kDouble : at::kFloat;
  add_heads_inside(e, dtype, q.size(0), q.size(1), q.size(2), q.size(3));
  add_heads_inside(e, statistics, q.size(0), q.size(1), q.size(2), std::nullopt);
  return true;
}

// (weight, indices, padding_idx, scale_grad_by_freq, sparse) -> rows of weight
bool embedding(at::ArrayRef<c10::IValue> args, Entry& e) {
  const auto &weight = tensor(args[0]), &indices = tensor(args[1]);
  if (weight.dim() != 2 || (indices.scalar_type() != at::kLong && indices.scalar_type() != at::kInt)) return false;
  Dims sizes(indices.sizes().begin(), indices.sizes().end());
  sizes.push_back(weight.size(1));
  add(e, weight.scalar_type(), sizes, row_major(sizes));
  return true;
}

}  // namespace

Rule find_rule(const std::string& name, const std::string& overload) {
  static const std::unordered_map<std::string, Rule> rules{
      {"aten::_scaled_dot_product_flash_attention_for_cpu.", flash_attention},
      {"aten::embedding.", embedding},
  };
  auto it = rules.find(name + "." + overload);
  return it == rules.end() ? nullptr : it->second;
}

}  // namespace dtorch

// Geometry rules, by hand, for frequent operators whose kernels are not structured: the CPU kernel's own layout, in a
// microsecond. Needed where shapes never repeat (decoding grows its key/value cache each token), because asking the worker
// would make the client wait. tests/test_geometry.py compares every rule with what the worker gives.
#include <ATen/ExpandUtils.h>

#include <cmath>
#include <unordered_map>

#include "client/geometry.h"

namespace dtorch {

namespace {

void add(Entry& e, at::ScalarType dtype, c10::IntArrayRef sizes, c10::IntArrayRef strides) {
  e.outs.push_back(make_spec(dtype, sizes, strides));
}

const at::Tensor& tensor(const c10::IValue& v) { return v.toTensor(); }

// Strides of empty_like(t).
Dims like(const at::Tensor& t) {
  if (t.is_non_overlapping_and_dense()) return Dims(t.strides().begin(), t.strides().end());
  auto strides = at::infer_dense_strides(t.sizes(), t.strides());
  return Dims(strides.begin(), strides.end());
}

// (query, key, value, dropout_p, is_causal, attn_mask, scale) -> (output, logsumexp)
bool flash_attention(at::ArrayRef<c10::IValue> args, Entry& e) {
  const auto &q = tensor(args[0]), &v = tensor(args[2]);
  if (q.dim() != 4 || v.dim() != 4 || q.size(3) != v.size(3)) return false;
  for (int64_t n : q.sizes())
    if (n == 0) return false;
  auto dtype = q.scalar_type();
  auto statistics = dtype == at::kDouble ? at::kDouble : at::kFloat;
  add(e, dtype, q.sizes(), like(q));
  int64_t b = q.size(0), h = q.size(1), t = q.size(2);
  add(e, statistics, {b, h, t}, {t * h, 1, h});  // [B, T, H] in memory
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

// (input, weight, bias) as whole.cpp sends it: contiguous in, contiguous out
bool linear(at::ArrayRef<c10::IValue> args, Entry& e) {
  const auto &x = tensor(args[0]), &w = tensor(args[1]);
  if (x.dim() < 2 || w.dim() != 2 || !x.is_contiguous() || x.size(-1) != w.size(1) || x.scalar_type() != w.scalar_type())
    return false;
  if (args[2].isTensor() && tensor(args[2]).defined()) {
    const auto& b = tensor(args[2]);
    if (b.dim() != 1 || b.size(0) != w.size(0) || b.scalar_type() != x.scalar_type()) return false;
  }
  Dims sizes(x.sizes().begin(), x.sizes().end());
  sizes.back() = w.size(0);
  add(e, x.scalar_type(), sizes, row_major(sizes));
  return true;
}

// (a, b), both batches of matrices
bool matmul(at::ArrayRef<c10::IValue> args, Entry& e) {
  const auto &a = tensor(args[0]), &b = tensor(args[1]);
  if (a.dim() < 3 || b.dim() < 3 || a.size(-1) != b.size(-2) || a.scalar_type() != b.scalar_type()) return false;
  size_t n = static_cast<size_t>(std::max(a.dim(), b.dim()));
  Dims sizes(n);
  for (size_t i = 0; i + 2 < n; ++i) {
    int64_t back = static_cast<int64_t>(n - i);
    int64_t p = back <= a.dim() ? a.size(-back) : 1, q = back <= b.dim() ? b.size(-back) : 1;
    if (p != q && p != 1 && q != 1) return false;
    sizes[i] = p == 1 ? q : p;
  }
  sizes[n - 2] = a.size(-2);
  sizes[n - 1] = b.size(-1);
  for (int64_t v : sizes)
    if (v == 0) return false;
  add(e, a.scalar_type(), sizes, row_major(sizes));
  return true;
}

// (start, end, step, out): an empty out= becomes as long as the range, as torch.arange calls it
bool arange(at::ArrayRef<c10::IValue> args, Entry& e) {
  const auto& out = tensor(args[3]);
  if (out.dim() != 1 || out.size(0) != 0 || out.storage_offset() != 0) return false;
  auto start = args[0].toScalar(), end = args[1].toScalar(), step = args[2].toScalar();
  int64_t n;
  if (start.isIntegral(false) && end.isIntegral(false) && step.isIntegral(false) && c10::isIntegralType(out.scalar_type(), false)) {
    int64_t a = start.toLong(), b = end.toLong(), s = step.toLong();
    constexpr int64_t kSafe = int64_t{1} << 60;
    if (s == 0 || (b - a) / s < 0 || std::abs(a) > kSafe || std::abs(b) > kSafe || (s > 0 ? b < a : b > a)) return false;
    n = (b - a + s - (s > 0 ? 1 : -1)) / s;
  } else {
    if (start.isComplex() || end.isComplex() || step.isComplex() || c10::isIntegralType(out.scalar_type(), true)) return false;
    double a = start.toDouble(), b = end.toDouble(), s = step.toDouble();
    double length = std::ceil((b - a) / s);
    if (!(length >= 0 && length < 1e15)) return false;
    n = static_cast<int64_t>(length);
  }
  e.returns.push_back({ReturnSpec::Kind::Alias, 3, 1});
  e.rewrites.push_back({3, Dims{n}, Dims{n ? 1 : out.stride(0)}});  // of the right size already: its stride stays
  return true;
}

// (condition, self, other): elementwise on contiguous tensors and numbers
bool where(at::ArrayRef<c10::IValue> args, Entry& e) {
  Dims sizes;
  for (const auto& v : args) {
    const auto& t = tensor(v);
    if (!t.is_contiguous()) return false;
    auto together = at::infer_size(sizes, t.sizes());
    sizes.assign(together.begin(), together.end());
  }
  const auto &a = tensor(args[1]), &b = tensor(args[2]);
  if (tensor(args[0]).scalar_type() != at::kBool || a.scalar_type() != b.scalar_type()) return false;
  add(e, a.scalar_type(), sizes, row_major(sizes));
  return true;
}

// A tensor that an optional argument gives, or null.
const at::Tensor* given(const c10::IValue& v) { return v.isTensor() && tensor(v).defined() ? &tensor(v) : nullptr; }

bool plain_float(const at::Tensor& t) {
  auto d = t.scalar_type();
  return (d == at::kFloat || d == at::kDouble || d == at::kBFloat16) && t.numel() > 0;
}

// A weight or bias that fits: absent, or of this type and these sizes.
bool fits(const at::Tensor* t, at::ScalarType dtype, c10::IntArrayRef sizes) {
  return !t || (t->scalar_type() == dtype && t->sizes() == sizes);
}

bool row_major_throughout(const at::Tensor& t) {
  return t.is_contiguous() && t.suggest_memory_format() == at::MemoryFormat::Contiguous;
}

// (input, normalized_shape, weight, bias, eps) -> (output, mean, rstd)
bool layer_norm(at::ArrayRef<c10::IValue> args, Entry& e) {
  const auto& x = tensor(args[0]);
  auto shape = args[1].toIntVector();
  auto n = static_cast<int64_t>(shape.size());
  auto dtype = x.scalar_type();
  if (n == 0 || n > x.dim() || !plain_float(x) || x.sizes().slice(static_cast<size_t>(x.dim() - n)) != c10::IntArrayRef(shape) ||
      !fits(given(args[2]), dtype, shape) || !fits(given(args[3]), dtype, shape))
    return false;
  Dims statistics(x.sizes().begin(), x.sizes().end());
  for (size_t i = statistics.size() - shape.size(); i < statistics.size(); ++i) statistics[i] = 1;
  add(e, dtype, x.sizes(), row_major(x.sizes()));
  add(e, dtype, statistics, row_major(statistics));
  add(e, dtype, statistics, row_major(statistics));
  return true;
}

// (input, weight, bias, N, C, HxW, groups, eps) -> (output, mean, rstd)
bool group_norm(at::ArrayRef<c10::IValue> args, Entry& e) {
  const auto& x = tensor(args[0]);
  int64_t batch = args[3].toInt(), channels = args[4].toInt(), positions = args[5].toInt(), groups = args[6].toInt();
  auto dtype = x.scalar_type();
  if (!plain_float(x) || !row_major_throughout(x) || groups < 1 || channels % groups || x.dim() < 2 || x.size(0) != batch ||
      x.size(1) != channels || x.numel() != batch * channels * positions || !fits(given(args[1]), dtype, {channels}) ||
      !fits(given(args[2]), dtype, {channels}))
    return false;
  add(e, dtype, x.sizes(), row_major(x.sizes()));
  for (int i = 0; i < 2; ++i) add(e, dtype, {batch, groups}, {groups, 1});
  return true;
}

// (input, weight, bias, stride, padding, dilation, transposed, output_padding, groups); row-major in, row-major out
bool convolution(at::ArrayRef<c10::IValue> args, Entry& e) {
  const auto &x = tensor(args[0]), &w = tensor(args[1]);
  if (args[6].toBool() || !plain_float(x) || x.dim() < 3 || w.dim() != x.dim() || w.scalar_type() != x.scalar_type() ||
      w.numel() == 0 || !row_major_throughout(x) || !row_major_throughout(w))
    return false;
  auto stride = args[3].toIntVector(), padding = args[4].toIntVector(), dilation = args[5].toIntVector();
  int64_t groups = args[8].toInt();
  size_t spatial = static_cast<size_t>(x.dim()) - 2;
  for (int64_t p : args[7].toIntVector())
    if (p < 0) return false;
  if (spatial > 3 || stride.size() != spatial || padding.size() != spatial || dilation.size() != spatial || groups < 1 ||
      x.size(1) != w.size(1) * groups || w.size(0) % groups || !fits(given(args[2]), x.scalar_type(), {w.size(0)}))
    return false;
  Dims sizes{x.size(0), w.size(0)};
  for (size_t i = 0; i < spatial; ++i) {
    auto d = static_cast<int64_t>(i) + 2;
    if (stride[i] < 1 || dilation[i] < 1 || padding[i] < 0) return false;
    int64_t kernel = dilation[i] * (w.size(d) - 1) + 1, room = x.size(d) + 2 * padding[i] - kernel;
    if (room < 0) return false;
    sizes.push_back(room / stride[i] + 1);
  }
  add(e, x.scalar_type(), sizes, row_major(sizes));
  return true;
}

}  // namespace

Rule find_rule(const std::string& name, const std::string& overload) {
  static const std::unordered_map<std::string, Rule> rules{
      {"aten::_scaled_dot_product_flash_attention_for_cpu.", flash_attention},
      {"aten::embedding.", embedding},
      {"aten::arange.start_out", arange},
      {"aten::linear.", linear},
      {"aten::matmul.", matmul},
      {"aten::where.self", where},
      {"aten::native_layer_norm.", layer_norm},
      {"aten::native_group_norm.", group_norm},
      {"aten::convolution.", convolution},
  };
  auto it = rules.find(name + "." + overload);
  return it == rules.end() ? nullptr : it->second;
}

}  // namespace dtorch

// See sparse_parts.h.
#include "common/sparse_parts.h"

#include <ATen/SparseCsrTensorImpl.h>
#include <ATen/SparseTensorImpl.h>
#include <ATen/ops/all.h>
#include <ATen/ops/aminmax.h>
#include <ATen/ops/diff.h>
#include <ATen/ops/ge.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/TensorOptions.h>

#include <algorithm>
#include <string>

namespace dtorch {

namespace {

constexpr size_t kHeadLength = 4;

at::SparseTensorImpl* coo(const at::Tensor& t) { return static_cast<at::SparseTensorImpl*>(t.unsafeGetTensorImpl()); }
at::SparseCsrTensorImpl* compressed(const at::Tensor& t) {
  return static_cast<at::SparseCsrTensorImpl*>(t.unsafeGetTensorImpl());
}

}  // namespace

Sparse take_apart(const at::Tensor& t) {
  Sparse s{t.layout(), Dims(t.sizes().begin(), t.sizes().end())};
  if (s.layout == at::kSparse) {
    s.coalesced = coo(t)->coalesced();
    s.parts = {coo(t)->indices(), coo(t)->values()};
  } else {
    s.parts = {compressed(t)->compressed_indices(), compressed(t)->plain_indices(), compressed(t)->values()};
  }
  return s;
}

void replace_parts(const at::Tensor& t, const Sparse& s) {
  if (s.layout != at::kSparse) return compressed(t)->set_member_tensors(s.parts[0], s.parts[1], s.parts[2], s.sizes);
  const auto& indices = s.parts[0];
  coo(t)->raw_resize_(indices.size(0), static_cast<int64_t>(s.sizes.size()) - indices.size(0), s.sizes);
  coo(t)->set_indices_and_values_unsafe(indices, s.parts[1]);
  coo(t)->set_coalesced(s.coalesced);
}

namespace {

void check_range(const at::Tensor& indices, int64_t size, const char* what) {
  if (indices.numel() == 0) return;
  auto [least, most] = indices.aminmax();
  int64_t low = least.item().toLong(), high = most.item().toLong();
  TORCH_CHECK_INDEX(low >= 0 && high < size, "index ", low < 0 ? low : high, " of a sparse tensor is out of bounds for ", what,
                    " with size ", size);
}

}  // namespace

void check_indices(const Sparse& s) {
  if (s.layout == at::kSparse) {
    for (int64_t d = 0; d < s.parts[0].size(0); ++d)
      check_range(s.parts[0].select(0, d), s.sizes[static_cast<size_t>(d)], ("dimension " + std::to_string(d)).c_str());
    return;
  }
  const at::Tensor &compressed = s.parts[0], &plain = s.parts[1], &values = s.parts[2];
  int64_t batch = compressed.dim() - 1, n = plain.size(-1);
  bool rows = s.layout == at::kSparseCsr || s.layout == at::kSparseBsr;
  bool blocks = s.layout == at::kSparseBsr || s.layout == at::kSparseBsc;
  int64_t size = s.sizes[static_cast<size_t>(batch) + (rows ? 1 : 0)];
  if (blocks) size /= std::max<int64_t>(values.size(batch + (rows ? 2 : 1)), 1);
  check_range(plain, size, rows ? "the columns" : "the rows");
  check_range(compressed, n + 1, "its compressed indices");
  TORCH_CHECK_INDEX(compressed.size(-1) < 2 || compressed.diff().ge(0).all().item().toBool(),
                    "the compressed indices of a sparse tensor decrease");
}

at::Tensor put_together(const Sparse& s) {
  const auto& values = s.parts.back();
  c10::DeviceGuard guard(values.device());  // it makes empty parts first, on the current device
  auto keys = c10::DispatchKeySet(c10::computeDispatchKey(values.scalar_type(), s.layout, values.device()));
  auto t = s.layout == at::kSparse
               ? at::detail::make_tensor<at::SparseTensorImpl>(keys, values.dtype())
               : at::detail::make_tensor<at::SparseCsrTensorImpl>(keys, values.device(), s.layout, values.dtype());
  replace_parts(t, s);
  return t;
}

void put_sparse_head(Buffer& b, const Sparse& s) {
  mp::put_array(b, kHeadLength + s.parts.size());
  mp::put_int(b, static_cast<int64_t>(s.layout));
  mp::put_array(b, s.sizes.size());
  for (int64_t n : s.sizes) mp::put_int(b, n);
  mp::put_bool(b, s.coalesced);
  mp::put_int(b, s.same);
}

Sparse read_sparse_head(mp::Reader& in, size_t length) {
  Sparse s;
  s.layout = static_cast<c10::Layout>(in.integer());
  if (parts_in(s.layout) == 0 || length != kHeadLength + parts_in(s.layout))
    throw mp::FormatError("a sparse tensor has " + std::to_string(length) + " fields");
  for (size_t i = in.array(); i-- > 0;) s.sizes.push_back(in.integer());
  s.coalesced = in.boolean();
  s.same = in.integer();
  s.parts.resize(parts_in(s.layout));
  return s;
}

}  // namespace dtorch

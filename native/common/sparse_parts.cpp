// See sparse_parts.h.
#include "common/sparse_parts.h"

#include <ATen/SparseCsrTensorImpl.h>
#include <ATen/SparseTensorImpl.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/TensorOptions.h>

namespace dtorch {

namespace {

constexpr size_t kHeadLength = 3;

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
}

Sparse read_sparse_head(mp::Reader& in, size_t length) {
  Sparse s;
  s.layout = static_cast<c10::Layout>(in.integer());
  if (parts_in(s.layout) == 0 || length != kHeadLength + parts_in(s.layout))
    throw mp::FormatError("a sparse tensor has " + std::to_string(length) + " fields");
  for (size_t i = in.array(); i-- > 0;) s.sizes.push_back(in.integer());
  s.coalesced = in.boolean();
  s.parts.resize(parts_in(s.layout));
  return s;
}

}  // namespace dtorch

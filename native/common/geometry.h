// A tensor's geometry as it stands in records and replies (protocol.py: geometry), written and read here alone, and
// tensors made of memory that came from elsewhere.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Allocator.h>
#include <c10/core/StorageImpl.h>
#include <c10/core/TensorImpl.h>
#include <c10/util/SmallVector.h>

#include "common/msgpack.h"
#include "common/protocol.h"

namespace dtorch {

using Dims = c10::SmallVector<int64_t, 5>;

struct Geometry {
  at::ScalarType dtype = at::kFloat;
  Dims sizes, strides;
  int64_t offset = 0;
  int flags = 0;  // kFlagConj, kFlagNeg
};

inline Dims row_major(c10::IntArrayRef sizes) {
  Dims strides(sizes.size());
  int64_t step = 1;
  for (size_t i = sizes.size(); i-- > 0;) {
    strides[i] = step;
    step *= std::max<int64_t>(sizes[i], 1);
  }
  return strides;
}

// [dtype, sizes], [dtype, sizes, strides] or [dtype, sizes, strides or nil, offset, flags]: what can be left out is.
inline void put_geometry(Buffer& b, at::ScalarType dtype, c10::IntArrayRef sizes, c10::IntArrayRef strides, int64_t offset = 0,
                         int flags = 0) {
  bool dense = true;
  int64_t step = 1;
  for (size_t i = sizes.size(); i-- > 0 && dense;) {
    dense = strides[i] == step;
    step *= std::max<int64_t>(sizes[i], 1);
  }
  bool tail = offset != 0 || flags != 0;
  mp::put_array(b, tail ? 5 : dense ? 2 : 3);
  b.push(static_cast<uint8_t>(dtype));
  mp::put_array(b, sizes.size());
  for (int64_t v : sizes) mp::put_int(b, v);
  if (dense && !tail) return;
  if (dense) {
    mp::put_nil(b);
  } else {
    mp::put_array(b, strides.size());
    for (int64_t v : strides) mp::put_int(b, v);
  }
  if (!tail) return;
  mp::put_int(b, offset);
  mp::put_int(b, flags);
}

inline Geometry read_geometry(mp::Reader& in) {
  Geometry g;
  size_t fields = in.array();
  g.dtype = static_cast<at::ScalarType>(in.integer());
  for (size_t i = in.array(); i-- > 0;) g.sizes.push_back(in.integer());
  if (fields > 2 && !in.try_nil())
    for (size_t i = in.array(); i-- > 0;) g.strides.push_back(in.integer());
  else
    g.strides = row_major(g.sizes);
  if (fields > 3) g.offset = in.integer();
  if (fields > 4) g.flags = static_cast<int>(in.integer());
  return g;
}

// How a storage is named first (STO-2) whose first tensor is a result of this geometry: by that geometry, but without what
// is lazy about it, and as a whole where the result does not start at the storage's beginning. Client and worker agree on it.
inline Geometry first_of(const Geometry& g) {
  Geometry first{g.dtype, g.sizes, g.strides};
  if (g.offset == 0) return first;
  int64_t last = g.offset;
  bool empty = false;
  for (size_t i = 0; i < g.sizes.size(); ++i) {
    empty = empty || g.sizes[i] == 0;
    last += (g.sizes[i] - 1) * g.strides[i];
  }
  first.sizes = {empty ? 0 : last + 1};
  first.strides = {1};
  return first;
}

inline Geometry geometry_of(const at::Tensor& t) {
  return {t.scalar_type(), Dims(t.sizes().begin(), t.sizes().end()), Dims(t.strides().begin(), t.strides().end()),
          t.storage_offset(), (t.is_conj() ? kFlagConj : 0) | (t.is_neg() ? kFlagNeg : 0)};
}

// A CPU tensor on n bytes that somebody else made; `data`'s deleter gives them back. Resizable, as any tensor is.
inline at::Tensor adopt(c10::DataPtr data, size_t n, const Geometry& g) {
  c10::Storage storage(c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), static_cast<int64_t>(n),
                                                             std::move(data), c10::GetAllocator(c10::DeviceType::CPU),
                                                             /*resizable=*/true));
  auto t = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(c10::DispatchKey::CPU),
                                                    c10::scalarTypeToTypeMeta(g.dtype));
  t.unsafeGetTensorImpl()->set_sizes_and_strides(g.sizes, g.strides);
  return t;
}

}  // namespace dtorch

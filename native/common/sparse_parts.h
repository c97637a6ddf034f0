// Sparse tensors taken apart into dense ones, and put together again.
//
// No storage holds a sparse tensor. On the client it is PyTorch's own sparse tensor over dense dtorch tensors; on the wire it
// is those parts (protocol.py: `sparse`); a worker puts one together for the time of a call.
#pragma once

#include <ATen/core/Tensor.h>

#include "common/geometry.h"

namespace dtorch {

struct Sparse {
  c10::Layout layout = at::kSparse;
  Dims sizes;
  bool coalesced = false;                    // COO only
  int64_t same = -1;                         // on the wire: which of the record's sparse tensors before it is; -1: none
  c10::SmallVector<at::Tensor, 3> parts{};  // COO: indices, values; compressed: compressed indices, plain indices, values
};

// How many parts a tensor of that layout has; 0: the layout is not sparse.
constexpr size_t parts_in(c10::Layout layout) {
  switch (layout) {
    case at::kSparse: return 2;
    case at::kSparseCsr:
    case at::kSparseCsc:
    case at::kSparseBsr:
    case at::kSparseBsc: return 3;
    default: return 0;
  }
}
inline bool is_sparse(const at::Tensor& t) { return t.defined() && parts_in(t.layout()) != 0; }

Sparse take_apart(const at::Tensor& t);
// Throws IndexError where an index points outside the tensor: PyTorch's kernels on the CPU do not look.
void check_indices(const Sparse& s);
at::Tensor put_together(const Sparse& s);
// Gives a sparse tensor of the same layout these parts.
void replace_parts(const at::Tensor& t, const Sparse& s);

// The head of a sparse tensor on the wire; its parts follow.
void put_sparse_head(Buffer& b, const Sparse& s);
// Reads what put_sparse_head wrote, after the array's own length.
Sparse read_sparse_head(mp::Reader& in, size_t length);
// An array of that length is a tensor on a storage, not a sparse one.
constexpr size_t kViewLength = 2;

}  // namespace dtorch

// What an operator's results will look like, without running it: the geometry cache and meta inference.
//
// A miss runs the operator on meta tensors of the same geometry through PyTorch's dispatcher (many metas are Python and
// cost up to a millisecond, hence the cache). Where the meta is missing or raises, the worker is asked: it knows, and if
// the call is wrong it answers with PyTorch's own error.
//
// GEO-1  A cached answer depends on nothing but the key (encode.h).
// GEO-2  The cache holds at most kCacheEntries; when full the older half goes (two generations).
#pragma once

#include <ATen/core/ivalue.h>
#include <ATen/core/stack.h>

#include <memory>
#include <vector>

#include "client/encode.h"

namespace dtorch {

struct OutSpec {
  at::ScalarType dtype;
  Dims sizes, strides;
  std::vector<uint8_t> wire;  // the geometry as it stands in a record
};

struct ReturnSpec {
  enum class Kind : uint8_t { New, List, Alias, None } kind;
  int index;  // New, List: first of `outs`; Alias: argument
  int count;  // List
};

struct Rewrite {
  int arg;  // an out= argument that the operator resizes
  Dims sizes, strides;
};

struct Entry {
  bool ask = false;
  c10::SmallVector<OutSpec, 1> outs;
  c10::SmallVector<ReturnSpec, 1> returns;
  std::vector<Rewrite> rewrites;
};
using EntryPtr = std::shared_ptr<const Entry>;

// The cached entry for a key, or null.
const Entry* find_geometry(const OpInfo& info, const Buffer& key);
// Runs meta inference on boxed arguments and remembers the answer.
const Entry* infer_geometry(const OpInfo& info, const Buffer& key, at::ArrayRef<c10::IValue> args);

struct GeometryStats {
  uint64_t misses = 0, asks = 0, miss_ns = 0, entries = 0;
};
GeometryStats geometry_stats();

OutSpec make_spec(at::ScalarType dtype, c10::IntArrayRef sizes, c10::IntArrayRef strides);

}  // namespace dtorch

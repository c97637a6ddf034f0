// Reads an operator's arguments off a record, boxed or typed. The twin of client/encode.h.
#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/IListRef.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/function_schema.h>
#include <ATen/core/ivalue.h>
#include <ATen/core/stack.h>

#include "common/geometry.h"
#include "common/store.h"

namespace dtorch {

// Operators whose kernels do other work, and give other results, where gradients are enabled.
inline bool reads_grad_mode(std::string_view name) {
  return name == "aten::mkldnn_rnn_layer" || name == "aten::_sparse_mm_reduce_impl";
}

c10::complex<double> read_complex(mp::Reader& in);

// A tensor of that geometry on a storage, with the keys of its device's dense tensors.
at::Tensor tensor_on(c10::Storage storage, c10::DispatchKeySet keys, const Geometry& g);
// A tensor on the storage of a store's tensor.
at::Tensor view_of(const at::Tensor& first, const Geometry& g);

// The storages that some of an operator's arguments name, by the arguments' places in order; no tensor is touched.
std::vector<uint64_t> storages_of(const c10::FunctionSchema& schema, const std::vector<int>& arguments, mp::Reader record);

// The places of an operator's arguments that are tensors or lists of them.
std::vector<int> tensor_arguments(const c10::FunctionSchema& schema);

struct Generators {
  // The generator of a number, of the device that this process computes on; 0 is its default one. Made at its SEED.
  at::Generator& get(uint32_t number);
  ska::flat_hash_map<uint32_t, at::Generator> made;
};

// What a decoded operator read; a poisoned argument is met here first.
class Decoder {
 public:
  Decoder(mp::Reader& in, Store& store, Generators& generators) : in_(in), store_(store), generators_(generators) {}

  at::Tensor tensor();                 // undefined for nil, and for a poisoned storage (see poison())
  c10::Scalar scalar();
  Dims ints();
  at::Generator generator();
  // By the schema's type.
  c10::IValue ivalue(const c10::Type& type);

  mp::Reader& in() { return in_; }
  const CausePtr& poison() const { return poison_; }
  // Some argument is a conjugate or negative view, or sparse: the operator is not its kernel for dense tensors.
  bool needs_dispatch() const { return needs_dispatch_; }

 private:
  at::Tensor cpu_tensor(std::string_view bytes);
  at::Tensor sparse(size_t length);

  mp::Reader& in_;
  Store& store_;
  Generators& generators_;
  CausePtr poison_;
  std::vector<at::Tensor> sparse_;  // the record's, each once
  bool needs_dispatch_ = false;
};

}  // namespace dtorch

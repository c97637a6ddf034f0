// Running one operator on the worker: from an OP or ASK record to stored results.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

#include <optional>
#include <ostream>
#include <vector>

#include "common/decode.h"
#include "common/sparse_parts.h"

namespace dtorch::worker {

struct Operator {
  explicit Operator(const c10::OperatorHandle& h);

  c10::OperatorHandle handle;
  std::string name;                // with overload, for messages
  std::vector<int> writes;         // arguments that its schema says it writes
  std::vector<int> mutates;        // the same and those it writes in silence, in order
  // How it can put its one result into the memory of an argument that dies with it: pointwise operators only.
  enum class Donation { None, Out, InPlace };  // by the out= overload; by the in-place one, where the first argument dies
  Donation donation = Donation::None;
  std::optional<c10::OperatorHandle> twin;     // that overload
  bool custom = false;             // not PyTorch's own: what it gives is not taken on trust
  bool reads_grad_mode = false;    // see OpInfo: to be run with gradients enabled where the client has them so
  std::vector<bool> result_alias;  // per result: it is a written argument
  std::vector<uint8_t> tensors;    // for the trace, which fills it (trace.cpp)
  // Unboxed twin (hot.cpp): decodes, calls, and appends the new tensors; null for most operators. With `donor`, a tensor
  // that nothing else will read, the result goes there unless an argument is a view of it.
  using Unboxed = void (*)(Decoder&, const at::Tensor* donor, std::vector<at::Tensor>& made);
  Unboxed unboxed = nullptr;
};

Operator::Unboxed find_unboxed(const std::string& name, const std::string& overload);

// Decodes the arguments and calls the operator boxed. `made` gets the new tensors in order; `stack` holds all results.
// A poisoned argument leaves both empty (see Decoder::poison). `donor` as for Operator::Unboxed.
// `written`, when given, gets the arguments the operator writes, as they are after the call.
void call_boxed(const Operator& op, Decoder& d, torch::jit::Stack& stack, const at::Tensor* donor,
                std::vector<at::Tensor>& made, std::vector<c10::IValue>* written = nullptr);

// Whether only the store holds the tensor's storage: no view of it is among the decoded arguments, no reader has it.
inline bool sole(const at::Tensor& t) { return t.unsafeGetTensorImpl()->unsafe_storage().use_count() == 1; }

// "Tensor[float32, (2, 3)]".
void describe(std::ostream& out, at::ScalarType dtype, c10::IntArrayRef sizes);

// "(Tensor[float32, (2, 3)], 1, None)" for error messages, read from the record.
std::string describe_arguments(const Operator& op, mp::Reader args, Store& store);

// Throws NotImplementedError for a sparse, nested, quantized or opaque result, or one on another device: it has no place in
// the store. (A sparse one is given to the client by its parts: records.cpp, ask.)
void require_plain(const Operator& op, const at::Tensor& made);

// The tensor as the client predicted it: same bytes, its strides; throws when sizes or dtype differ.
at::Tensor conform(const Operator& op, at::Tensor made, const Geometry& predicted);

// Make known the operators that workers have beyond PyTorch's own; once, in a worker.
void register_nested();      // common/nested.h
void register_batch_norm();  // batch_norm.cpp: whether it is cuDNN's

}  // namespace dtorch::worker

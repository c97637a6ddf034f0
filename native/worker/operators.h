// Running one operator on the worker: from an OP or ASK record to stored results.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

#include <vector>

#include "worker/decode.h"

namespace dtorch::worker {

struct Operator {
  explicit Operator(const c10::OperatorHandle& h);

  c10::OperatorHandle handle;
  std::string name;                // with overload, for messages
  std::vector<int> writes;         // arguments it writes
  std::vector<bool> result_alias;  // per result: it is a written argument
  // Unboxed twin (hot.cpp): decodes, calls, and appends the new tensors; null for most operators.
  using Unboxed = void (*)(Decoder&, std::vector<at::Tensor>& made);
  Unboxed unboxed = nullptr;
};

Operator::Unboxed find_unboxed(const std::string& name, const std::string& overload);

// Decodes the arguments and calls the operator boxed. `made` gets the new tensors in order; `stack` holds all results.
// A poisoned argument leaves both empty (see Decoder::poison).
// `written`, when given, gets the arguments the operator writes, as they are after the call.
void call_boxed(const Operator& op, Decoder& d, torch::jit::Stack& stack, std::vector<at::Tensor>& made,
                std::vector<c10::IValue>* written = nullptr);

// The storages that the operator writes, read from the record without touching a tensor.
std::vector<uint64_t> written_storages(const Operator& op, mp::Reader args);

// "(Tensor[float32, (2, 3)], 1, None)" for error messages, read from the record.
std::string describe_arguments(const Operator& op, mp::Reader args, Store& store);

// Throws NotImplementedError for a sparse, nested, quantized or opaque result: it has no place in the store.
void require_plain(const Operator& op, const at::Tensor& made);

// The tensor as the client predicted it: same bytes, its strides; throws when sizes or dtype differ.
at::Tensor conform(const Operator& op, at::Tensor made, const Geometry& predicted);

}  // namespace dtorch::worker

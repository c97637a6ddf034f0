// Issuing an operator: from encoded arguments to a record on the wire and result tensors in the caller's hand.
#pragma once

#include <ATen/SDPBackend.h>
#include <ATen/core/stack.h>

#include "client/geometry.h"

namespace dtorch {

// The boxed path: takes the operator's arguments off the stack and puts its results on it.
void issue_boxed(const OpInfo& info, torch::jit::Stack* stack);

// After encoding: the storages named belong to the running session; without any, an engine runs (the default one is started).
void check_running(Scratch& s);

// What an operator writes must be ours: a CPU number may stand among the arguments, but not take a result.
void check_written(const OpInfo& info, const at::Tensor& t);
void check_written(const OpInfo& info, const c10::IValue& v);

// PyTorch's determinism switch as a number: off, on, or 2 where it only warns.
int deterministic_mode();

// The order in which attention's backends are tried, three bits each; 0 where it is PyTorch's usual one, for which a worker's
// PyTorch may have its GPU's (cuDNN first on Hopper).
constexpr int kAttentionOrderBits = 3 * at::num_sdp_backends;
uint32_t attention_order();

// Writes the record; `outs` are the new tensors in the entry's order.
void emit(const OpInfo& info, Scratch& s, const Entry& entry, at::ArrayRef<at::Tensor> outs);

// Sends the operator as a question, waits for what came of it, and puts that on the stack in the place of the arguments.
// Unless `dynamic`, the next call with the same key need not ask.
void ask(const OpInfo& info, Scratch& s, torch::jit::Stack* stack, at::ArrayRef<c10::IValue> args, bool dynamic);

// The new tensors an entry promises.
inline at::Tensor make_out(int worker, const OutSpec& spec) { return make_result(worker, spec.geometry); }

// Appends [ALLOC, ...] when a storage named for the first time is still lazy. Must precede the record that names it.
void materialise(Session::Writer& w, StorageCtx* ctx);

// Checks that a storage belongs to the running session.
void check_alive(const StorageCtx* ctx);

// Moves a CPU tensor to a worker (value.cpp); used for CPU index tensors.
at::Tensor upload(const at::Tensor& cpu, int worker);

}  // namespace dtorch

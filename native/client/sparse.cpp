// Sparse tensors on the client: PyTorch's own SparseTensorImpl and SparseCsrTensorImpl, over dense dtorch tensors.
//
// What only makes, looks at or takes apart such a tensor is done here, by the very kernels that eager PyTorch has for the CPU:
// they work on the dense parts, by operators. All else is one record for the worker, which puts the tensor together and
// calls eager's kernel (common/sparse_parts.h). How many elements a result has is in the data, so the client waits for it; an
// operator that only writes dense tensors (the step of a sparse optimizer) is sent and not waited for, once it was seen to
// fit arguments of that geometry.
#include "common/sparse_parts.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <mutex>
#include <string>
#include <string_view>
#include <unordered_set>

#include "client/device.h"
#include "client/encode.h"
#include "client/issue.h"

namespace dtorch {

namespace {

using c10::DispatchKey;

// Eager's CPU kernels of these ask nothing of the CPU.
const std::unordered_set<std::string_view> kHere = {
    "_coalesced_", "_dimI", "_dimV", "_indices", "_nnz", "_sparse_coo_tensor_with_dims",
    "_sparse_coo_tensor_with_dims_and_tensors", "_values", "clone", "copy_", "copy_sparse_to_sparse_", "dense_dim",
    "empty.memory_format", "empty_like", "indices", "is_coalesced", "resize_as_sparse_", "sparse_dim", "sparse_resize_",
    "sparse_resize_and_clear_", "values", "permute", "unsqueeze", "view_as_complex", "view_as_real", "zeros.out", "zero_",
    "is_pinned", "_pin_memory", "crow_indices", "col_indices", "ccol_indices", "row_indices"};

// The device that an operator's tensors are on, or that it is to make one on.
std::optional<c10::Device> device_of(at::ArrayRef<c10::IValue> args) {
  std::optional<c10::Device> device;
  for (const auto& v : args) {
    if (v.isTensor() && is_ours(v.toTensor())) return v.toTensor().device();
    if (v.isDevice()) device = v.toDevice();
  }
  return device;
}

void check_alive(at::ArrayRef<c10::IValue> args) {
  for (const auto& v : args)
    if (v.isTensor() && is_sparse(v.toTensor()) && is_ours(v.toTensor()))
      for (const auto& part : take_apart(v.toTensor()).parts)
        if (is_ours(part)) dtorch::check_alive(ctx_of(part));
}

// PyTorch would give a compressed tensor the parts of another device's.
bool of_one_device(const at::Tensor& self, const at::Tensor& from) { return self.device().type() == from.device().type(); }

template <DispatchKey Key>
void here(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  check_alive(torch::jit::last(*stack, op.schema().arguments().size()));
  c10::OptionalDeviceGuard guard(device_of(torch::jit::last(*stack, op.schema().arguments().size())));
  op.redispatchBoxed(c10::DispatchKeySet(Key), stack);
}

// Calls that a worker was seen to accept, by their keys (encode.h).
class Accepted {
 public:
  bool has(std::string_view key) {
    std::lock_guard lock(mu_);
    return keys_.count(std::string(key)) != 0;
  }
  void add(std::string_view key) {
    std::lock_guard lock(mu_);
    if (keys_.size() >= kMost) keys_.clear();
    keys_.emplace(key);
  }

 private:
  static constexpr size_t kMost = 4096;
  std::mutex mu_;
  std::unordered_set<std::string> keys_;
};

bool only_writes_dense(const OpInfo& info, at::ArrayRef<c10::IValue> args) {
  for (const auto& r : info.returns)
    if (r.kind != OpInfo::Result::Alias) return false;
  for (int i : info.writes) {
    const auto& v = args[static_cast<size_t>(i)];
    bool resizable = info.handle.schema().arguments()[static_cast<size_t>(i)].kwarg_only();
    if (resizable || !v.isTensor() || is_sparse(v.toTensor())) return false;
  }
  return !info.writes.empty();
}

void there(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  static auto* accepted = new Accepted;
  if (Inferring::active()) throw Uninferable(true);
  const auto& info = op_info(op);
  auto args = torch::jit::last(*stack, info.n_args);
  for (int i : info.writes) check_written(info, args[static_cast<size_t>(i)]);
  ScratchLease s(info);
  Encoder encode(*s, info);
  for (size_t i = 0; i < info.n_args; ++i) encode.ivalue(args[i], i);
  check_running(*s);
  std::string_view key(reinterpret_cast<const char*>(s->key.data()), s->key.size());
  bool sends = only_writes_dense(info, args);
  if (!sends || !accepted->has(key)) {
    ask(info, *s, stack, args, /*dynamic=*/true);
    count_ask();
    if (sends) accepted->add(key);
    return;
  }
  emit(info, *s, Entry(), {});
  std::vector<c10::IValue> results;
  for (const auto& r : info.returns) results.push_back(args[static_cast<size_t>(r.arg)]);
  torch::jit::drop(*stack, info.n_args);
  for (auto& r : results) stack->push_back(std::move(r));
}

template <DispatchKey Ours, DispatchKey Eagers>
void register_layout() {
  using torch::CppFunction;
  using torch::Library;
  auto* m = new Library(Library::IMPL, "aten", Ours, __FILE__, __LINE__);  // kept for good
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const auto& name : dispatcher.getAllOpNames()) {
    auto op = dispatcher.findSchema(name);
    if (!op || name.name.compare(0, 6, "aten::") != 0 || !op->hasKernelForDispatchKey(Eagers)) continue;
    std::string full = name.name.substr(6) + (name.overload_name.empty() ? "" : "." + name.overload_name);
    m->impl(full.c_str(), kHere.count(full) ? CppFunction::makeFromBoxedFunction<&here<Eagers>>()
                                            : CppFunction::makeFromBoxedFunction<&there>());
  }
  if (Ours == DispatchKey::SparseCsrPrivateUse1) m->impl("_has_compatible_shallow_copy_type", TORCH_FN(of_one_device));
  auto* any = new Library(Library::IMPL, "_", Ours, __FILE__, __LINE__);
  any->fallback(CppFunction::makeFromBoxedFunction<&there>());
}

}  // namespace

void register_sparse() {
  register_layout<DispatchKey::SparsePrivateUse1, DispatchKey::SparseCPU>();
  register_layout<DispatchKey::SparseCsrPrivateUse1, DispatchKey::SparseCsrCPU>();
}

}  // namespace dtorch

// Kernels on sparse tensors: the CPU's, on copies of their parts. PyTorch's own fallback takes dense tensors only.
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty_strided.h>
#include <torch/library.h>

#include "common/sparse_parts.h"
#include "device.h"

namespace accelerator {

namespace {

template <class Move>
at::Tensor moved(const at::Tensor& t, const Move& move) {
  if (!t.defined()) return t;
  if (!dtorch::is_sparse(t)) return move(t);
  auto s = dtorch::take_apart(t);
  for (auto& part : s.parts) part = move(part);
  return dtorch::put_together(s);
}

at::Tensor to_cpu(const at::Tensor& t) {
  return moved(t, [](const at::Tensor& part) { return part.is_cpu() ? part : part.cpu(); });
}
at::Tensor to_device(const at::Tensor& t) {
  return moved(t, [](const at::Tensor& part) {
    auto made = at::empty_strided(part.sizes(), part.strides(), part.options().device(kDevice));
    return made.copy_(part);
  });
}

void write_back(const at::Tensor& there, const at::Tensor& here) {
  if (dtorch::is_sparse(there)) dtorch::replace_parts(there, dtorch::take_apart(to_device(here)));
  else there.resize_(here.sizes()).copy_(here);
}

void on_the_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  launch();
  InKernel in;
  const auto& schema = op.schema();
  size_t n = schema.arguments().size();
  std::vector<std::pair<at::Tensor, at::Tensor>> written;  // on the device, and its copy here
  for (size_t i = 0; i < n; ++i) {
    auto& v = (*stack)[stack->size() - n + i];
    const auto* alias = schema.arguments()[i].alias_info();
    auto take = [&](const at::Tensor& t) {
      auto here = to_cpu(t);
      if (alias && alias->isWrite()) written.emplace_back(t, here);
      return here;
    };
    if (v.isTensor()) {
      v = take(v.toTensor());
    } else if (v.isTensorList()) {
      auto list = v.toTensorVector();
      for (auto& t : list) t = take(t);
      v = list;
    } else if (v.isDevice()) {
      v = c10::Device(c10::DeviceType::CPU);
    }
  }
  op.callBoxed(*stack);
  auto give = [&](const at::Tensor& t) {
    for (auto& [there, here] : written)
      if (here.is_same(t)) return there;
    return t.defined() ? to_device(t) : t;
  };
  for (auto& [there, here] : written) write_back(there, here);
  for (auto& v : *stack) {
    if (v.isTensor()) {
      v = give(v.toTensor());
    } else if (v.isTensorList()) {
      auto list = v.toTensorVector();
      for (auto& t : list) t = give(t);
      v = list;
    }
  }
}

TORCH_LIBRARY_IMPL(_, SparsePrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&on_the_cpu>()); }
TORCH_LIBRARY_IMPL(_, SparseCsrPrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&on_the_cpu>()); }
TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  for (const char* name : {"_to_sparse", "_to_sparse.sparse_dim", "_to_sparse_csr", "_to_sparse_csc", "_to_sparse_bsr",
                           "_to_sparse_bsc", "sparse_mask"})
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&on_the_cpu>());
}

}  // namespace

}  // namespace accelerator

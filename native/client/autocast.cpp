// torch.autocast("dtorch", ...): the operators that run in the lower precision, in float32, or in their widest input's.
//
// Workers are CPUs, so the lists are those of torch.autocast("cpu"), and read off the dispatcher: every operator that has a
// kernel there gets one here. What a kernel does is one of three policies; two of them are listed, the rest is float32.
#include "client/device.h"

#include <ATen/autocast_mode.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

#include <string>
#include <unordered_set>

#include "client/storage.h"

namespace dtorch {

namespace {

const std::unordered_set<std::string>& lower_precision() {
  static const std::unordered_set<std::string> names{
      "conv1d",      "conv2d",  "conv3d",   "conv_tbc",     "conv_transpose1d", "conv_transpose2d",
      "conv_transpose3d",       "_convolution",             "mm",               "bmm",
      "matmul",      "linear",  "addmm",    "addbmm",       "baddbmm",          "linalg_vecdot",
      "prelu",       "_addmm_activation",   "mkldnn_rnn_layer",                 "_native_multi_head_attention",
      "scaled_dot_product_attention"};
  return names;
}
const std::unordered_set<std::string>& promoted() {
  static const std::unordered_set<std::string> names{"stack", "cat", "index_copy"};
  return names;
}

bool takes_part(const at::Tensor& t) {
  return t.defined() && is_ours(t) && t.is_floating_point() && t.scalar_type() != at::kDouble;
}

// Applies f to every tensor among the arguments, in place.
template <class F>
void each_tensor(torch::jit::Stack* stack, size_t n, const F& f) {
  for (size_t i = stack->size() - n; i < stack->size(); ++i) {
    auto& v = (*stack)[i];
    if (v.isTensor()) {
      v = f(v.toTensor());
    } else if (v.isTensorList()) {
      auto list = v.toTensorVector();
      for (auto& t : list) t = f(t);
      v = std::move(list);
    }
  }
}

void run_in(at::ScalarType dtype, const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  c10::impl::ExcludeDispatchKeyGuard once(c10::DispatchKeySet(c10::DispatchKey::AutocastPrivateUse1));
  each_tensor(stack, op.schema().arguments().size(), [dtype](const at::Tensor& t) {
    return takes_part(t) ? at::autocast::cached_cast(dtype, t, kDevice) : t;
  });
  op.callBoxed(stack);
}

void in_lower_precision(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  run_in(at::autocast::get_autocast_dtype(kDevice), op, stack);
}

void in_float32(const c10::OperatorHandle& op, torch::jit::Stack* stack) { run_in(at::kFloat, op, stack); }

void in_widest(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  auto widest = at::autocast::get_autocast_dtype(kDevice);
  each_tensor(stack, op.schema().arguments().size(), [&widest](const at::Tensor& t) {
    if (takes_part(t) && t.scalar_type() == at::kFloat) widest = at::kFloat;
    return t;
  });
  run_in(widest, op, stack);
}

}  // namespace

void register_autocast() {
  constexpr auto key = c10::DispatchKey::AutocastPrivateUse1;
  auto* any = new torch::Library(torch::Library::IMPL, "_", key, __FILE__, __LINE__);  // both are kept for good
  any->fallback(torch::CppFunction::makeFallthrough());
  auto* m = new torch::Library(torch::Library::IMPL, "aten", key, __FILE__, __LINE__);
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const auto& name : dispatcher.getAllOpNames()) {
    if (name.name.compare(0, 6, "aten::") != 0) continue;
    auto op = dispatcher.findSchema(name);
    if (!op || !op->hasKernelForDispatchKey(c10::DispatchKey::AutocastCPU)) continue;
    std::string base = name.name.substr(6);
    std::string full = base + (name.overload_name.empty() ? "" : "." + name.overload_name);
    if (lower_precision().count(base)) m->impl(full.c_str(), torch::CppFunction::makeFromBoxedFunction<&in_lower_precision>());
    else if (promoted().count(base)) m->impl(full.c_str(), torch::CppFunction::makeFromBoxedFunction<&in_widest>());
    else m->impl(full.c_str(), torch::CppFunction::makeFromBoxedFunction<&in_float32>());
  }
}

}  // namespace dtorch

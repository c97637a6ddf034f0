// torch.autocast("dtorch", ...): the operators that run in the lower precision, in float32, or in their widest input's.
//
// What torch.autocast("cpu") does where the workers are CPUs, and what torch.autocast("cuda") does where they are GPUs. The
// CPU's operators are read off the dispatcher: every one that has a kernel there gets one here; two policies are listed, the
// rest is float32. The GPUs' are PyTorch's own lists for any accelerator.
#include "client/device.h"

#include <ATen/autocast_mode.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

#include <map>
#include <string>
#include <unordered_set>
#include <utility>

#include "client/session.h"
#include "client/storage.h"

namespace dtorch {

namespace {

// `Sums` run in float32 unless they are told another dtype.
enum class Policy { None, Lower, Float32, Sums, Widest, Refused };
constexpr size_t kPolicies = 6;

const std::unordered_set<std::string>& lower_on_cpu() {
  static const std::unordered_set<std::string> names{
      "conv1d",      "conv2d",  "conv3d",   "conv_tbc",     "conv_transpose1d", "conv_transpose2d",
      "conv_transpose3d",       "_convolution",             "mm",               "bmm",
      "matmul",      "linear",  "addmm",    "addbmm",       "baddbmm",          "linalg_vecdot",
      "prelu",       "_addmm_activation",   "mkldnn_rnn_layer",                 "_native_multi_head_attention",
      "scaled_dot_product_attention"};
  return names;
}
const std::unordered_set<std::string>& widest_on_cpu() {
  static const std::unordered_set<std::string> names{"stack", "cat", "index_copy"};
  return names;
}

Policy on_cpu(const c10::OperatorHandle& op, const std::string& base) {
  if (!op.hasKernelForDispatchKey(c10::DispatchKey::AutocastCPU)) return Policy::None;
  return lower_on_cpu().count(base) ? Policy::Lower : widest_on_cpu().count(base) ? Policy::Widest : Policy::Float32;
}

// By "name" or "name, overload".
const std::map<std::string, Policy>& on_gpu() {
#define DTORCH_LOWER(...) {#__VA_ARGS__, Policy::Lower},
#define DTORCH_FLOAT32(...) {#__VA_ARGS__, Policy::Float32},
#define DTORCH_SUMS(...) {#__VA_ARGS__, Policy::Sums},
#define DTORCH_WIDEST(...) {#__VA_ARGS__, Policy::Widest},
  static const std::map<std::string, Policy> all{
      AT_FORALL_LOWER_PRECISION_FP(DTORCH_LOWER) AT_FORALL_FP32(DTORCH_FLOAT32) AT_FORALL_FP32_SET_OPT_DTYPE(DTORCH_SUMS)
          AT_FORALL_PROMOTE(DTORCH_WIDEST){"norm, Scalar", Policy::Float32},
      {"norm, ScalarOpt_dim", Policy::Float32},
      {"binary_cross_entropy", Policy::Refused}};
#undef DTORCH_LOWER
#undef DTORCH_FLOAT32
#undef DTORCH_SUMS
#undef DTORCH_WIDEST
  return all;
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

void in_widest(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  auto widest = at::autocast::get_autocast_dtype(kDevice);
  each_tensor(stack, op.schema().arguments().size(), [&widest](const at::Tensor& t) {
    if (takes_part(t) && t.scalar_type() == at::kFloat) widest = at::kFloat;
    return t;
  });
  run_in(widest, op, stack);
}

void sum_in_float32(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  c10::impl::ExcludeDispatchKeyGuard once(c10::DispatchKeySet(c10::DispatchKey::AutocastPrivateUse1));
  const auto& args = op.schema().arguments();
  size_t first = stack->size() - args.size();
  const auto& x = (*stack)[first];
  if (x.isTensor() && is_ours(x.toTensor()) && x.toTensor().is_floating_point())
    for (size_t i = 0; i < args.size(); ++i)
      if (args[i].name() == "dtype" && (*stack)[first + i].isNone()) (*stack)[first + i] = static_cast<int64_t>(at::kFloat);
  op.callBoxed(stack);
}

template <Policy Cpu, Policy Gpu>
void kernel(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  switch (Session::get().accelerated() ? Gpu : Cpu) {
    case Policy::Lower: return run_in(at::autocast::get_autocast_dtype(kDevice), op, stack);
    case Policy::Float32: return run_in(at::kFloat, op, stack);
    case Policy::Sums: return sum_in_float32(op, stack);
    case Policy::Widest: return in_widest(op, stack);
    case Policy::Refused:
      TORCH_CHECK(false, "dtorch: torch.nn.functional.", std::string_view(op.schema().name()).substr(6), " is unsafe to autocast on "
                  "GPUs: probabilities that came out of a lower precision are rounded to 0 and 1. Leave the sigmoid to the loss "
                  "(binary_cross_entropy_with_logits, nn.BCEWithLogitsLoss), or turn autocast off around it (enabled=False) and "
                  "give it float32");
    case Policy::None: break;  // what it is made of may have a policy
  }
  op.redispatchBoxed(keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, c10::DispatchKey::AutocastPrivateUse1), stack);
}

template <size_t... I>
torch::CppFunction kernel_of(Policy cpu, Policy gpu, std::index_sequence<I...>) {
  using Make = torch::CppFunction (*)();
  static constexpr Make all[] = {
      [] { return torch::CppFunction::makeFromBoxedFunction<&kernel<static_cast<Policy>(I / kPolicies), static_cast<Policy>(I % kPolicies)>>(); }...};
  return all[static_cast<size_t>(cpu) * kPolicies + static_cast<size_t>(gpu)]();
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
    if (!op) continue;
    std::string base = name.name.substr(6);
    auto listed = on_gpu().find(base + (name.overload_name.empty() ? "" : ", " + name.overload_name));
    Policy cpu = on_cpu(*op, base), gpu = listed == on_gpu().end() ? Policy::None : listed->second;
    if (cpu == Policy::None && gpu == Policy::None) continue;
    std::string full = base + (name.overload_name.empty() ? "" : "." + name.overload_name);
    m->impl(full.c_str(), kernel_of(cpu, gpu, std::make_index_sequence<kPolicies * kPolicies>{}));
  }
}

}  // namespace dtorch

// torch.autocast("dtorch", ...): the operators that run in the lower precision, in float32, or in their widest input's.
//
// The lists are PyTorch's own (ATen/autocast_mode.h), as every device that registers through PrivateUse1 uses them.
#include "client/device.h"

#include <ATen/ATen.h>
#include <ATen/autocast_mode.h>
#include <torch/library.h>

namespace at {
namespace autocast {

void register_dtorch(torch::Library& m) {
#define DTORCH_LOWER(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
#define DTORCH_FP32(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)
#define DTORCH_FP32_SET(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32_set_opt_dtype)
#define DTORCH_PROMOTE(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, promote)
  AT_FORALL_LOWER_PRECISION_FP(DTORCH_LOWER)
  AT_FORALL_FP32(DTORCH_FP32)
  AT_FORALL_FP32_SET_OPT_DTYPE(DTORCH_FP32_SET)
  AT_FORALL_PROMOTE(DTORCH_PROMOTE)
  AT_FORALL_DIFFERENT_REDISPATCH_SIGNATURE(KERNEL_DIFFERENT_REDISPATCH_SIGNATURE_PRIVATEUSEONE)
  KERNEL_PRIVATEUSEONE(binary_cross_entropy, fp32)  // as on the CPU
}

}  // namespace autocast
}  // namespace at

namespace dtorch {

void register_autocast() {
  auto* any = new torch::Library(torch::Library::IMPL, "_", c10::DispatchKey::AutocastPrivateUse1, __FILE__, __LINE__);
  any->fallback(torch::CppFunction::makeFallthrough());
  auto* m = new torch::Library(torch::Library::IMPL, "aten", c10::DispatchKey::AutocastPrivateUse1, __FILE__, __LINE__);
  at::autocast::register_dtorch(*m);
}

}  // namespace dtorch

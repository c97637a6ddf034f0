// histc of whole numbers, which every accelerator has and the CPU has not. Programs ask for the device and count floats on
// the CPU alone (transformers' experts do), so here the numbers are counted as float64, which holds them exactly.
#include "client/device.h"

#include <ATen/ops/_to_copy.h>
#include <ATen/ops/histc_ops.h>
#include <torch/library.h>

#include "client/issue.h"

namespace dtorch {

namespace {

bool whole_numbers(const at::Tensor& t) { return c10::isIntegralType(t.scalar_type(), /*includeBool=*/false); }

at::Tensor histc(const at::Tensor& self, int64_t bins, const at::Scalar& min, const at::Scalar& max) {
  static const OpInfo& op = op_info("aten::histc", "");
  torch::jit::Stack stack{whole_numbers(self) ? self.to(at::kDouble) : self, bins, min, max};
  issue_boxed(op, &stack);
  auto counts = stack[0].toTensor();
  return whole_numbers(self) ? counts.to(self.scalar_type()) : counts;
}

at::Tensor& histc_out(const at::Tensor& self, int64_t bins, const at::Scalar& min, const at::Scalar& max, at::Tensor& out) {
  if (whole_numbers(self)) {
    auto counts = histc(self, bins, min, max);
    return out.resize_(counts.sizes()).copy_(counts);
  }
  static const OpInfo& op = op_info("aten::histc", "out");
  torch::jit::Stack stack{self, bins, min, max, out};
  issue_boxed(op, &stack);
  return out;
}

}  // namespace

void register_counts() {
  auto* m = new torch::Library(torch::Library::IMPL, "aten", c10::DispatchKey::PrivateUse1, __FILE__, __LINE__);  // kept for good
  m->impl("histc", TORCH_FN(histc));
  m->impl("histc.out", TORCH_FN(histc_out));
}

}  // namespace dtorch

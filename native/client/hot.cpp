// Unboxed kernels for the operators that programs call most: one template (unboxed.h), one line an operator. An operator
// belongs here when it is frequent and small enough for the boxing (about a microsecond) to show.
#include "client/device.h"
#include "client/unboxed.h"

#include <ATen/ops/_softmax_ops.h>
#include <ATen/ops/add_ops.h>
#include <ATen/ops/addcdiv_ops.h>
#include <ATen/ops/addcmul_ops.h>
#include <ATen/ops/addmm_ops.h>
#include <ATen/ops/baddbmm_ops.h>
#include <ATen/ops/bmm_ops.h>
#include <ATen/ops/cat_ops.h>
#include <ATen/ops/clone_ops.h>
#include <ATen/ops/cos_ops.h>
#include <ATen/ops/div_ops.h>
#include <ATen/ops/embedding_ops.h>
#include <ATen/ops/eq_ops.h>
#include <ATen/ops/exp_ops.h>
#include <ATen/ops/gelu_ops.h>
#include <ATen/ops/lerp_ops.h>
#include <ATen/ops/mean_ops.h>
#include <ATen/ops/mm_ops.h>
#include <ATen/ops/mul_ops.h>
#include <ATen/ops/native_layer_norm_ops.h>
#include <ATen/ops/neg_ops.h>
#include <ATen/ops/pow_ops.h>
#include <ATen/ops/relu_ops.h>
#include <ATen/ops/rsqrt_ops.h>
#include <ATen/ops/sigmoid_ops.h>
#include <ATen/ops/silu_ops.h>
#include <ATen/ops/sin_ops.h>
#include <ATen/ops/sqrt_ops.h>
#include <ATen/ops/sub_ops.h>
#include <ATen/ops/sum_ops.h>
#include <ATen/ops/tanh_ops.h>
#include <ATen/ops/where_ops.h>
#include <ATen/ops/zero_ops.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu_ops.h>
#include <torch/library.h>


namespace dtorch {

namespace {

template <class Op>
void hot(torch::Library& m) {
  std::string name = std::string(Op::name).substr(6);
  if (Op::overload_name[0]) name += std::string(".") + Op::overload_name;
  m.impl(name.c_str(), torch::CppFunction(TORCH_FN(Unboxed<Op>::call)));
}

}  // namespace

void register_hot_kernels() {
  static auto* m = new torch::Library(torch::Library::IMPL, "aten", c10::DispatchKey::PrivateUse1, __FILE__, __LINE__);
  hot<at::_ops::add_Tensor>(*m);
  hot<at::_ops::add__Tensor>(*m);
  hot<at::_ops::sub_Tensor>(*m);
  hot<at::_ops::mul_Tensor>(*m);
  hot<at::_ops::mul_Scalar>(*m);
  hot<at::_ops::mul__Tensor>(*m);
  hot<at::_ops::div_Tensor>(*m);
  hot<at::_ops::div__Tensor>(*m);
  hot<at::_ops::add_Scalar>(*m);
  hot<at::_ops::addcmul>(*m);
  hot<at::_ops::addcmul_>(*m);
  hot<at::_ops::addcdiv>(*m);
  hot<at::_ops::addcdiv_>(*m);
  hot<at::_ops::lerp__Scalar>(*m);
  hot<at::_ops::neg>(*m);
  hot<at::_ops::exp>(*m);
  hot<at::_ops::sin>(*m);
  hot<at::_ops::cos>(*m);
  hot<at::_ops::sqrt>(*m);
  hot<at::_ops::rsqrt>(*m);
  hot<at::_ops::tanh>(*m);
  hot<at::_ops::relu>(*m);
  hot<at::_ops::sigmoid>(*m);
  hot<at::_ops::silu>(*m);
  hot<at::_ops::gelu>(*m);
  hot<at::_ops::pow_Tensor_Scalar>(*m);
  hot<at::_ops::eq_Scalar>(*m);
  hot<at::_ops::eq_Tensor>(*m);
  hot<at::_ops::where_self>(*m);
  hot<at::_ops::mm>(*m);
  hot<at::_ops::bmm>(*m);
  hot<at::_ops::addmm>(*m);
  hot<at::_ops::baddbmm>(*m);
  hot<at::_ops::mean_dim>(*m);
  hot<at::_ops::sum_dim_IntList>(*m);
  hot<at::_ops::_softmax>(*m);
  hot<at::_ops::native_layer_norm>(*m);
  hot<at::_ops::embedding>(*m);
  hot<at::_ops::clone>(*m);
  hot<at::_ops::zero_>(*m);
  hot<at::_ops::cat>(*m);
  hot<at::_ops::_scaled_dot_product_flash_attention_for_cpu>(*m);
}

}  // namespace dtorch

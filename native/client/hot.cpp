// Unboxed kernels for the operators that programs call most: one template, one line an operator.
//
// They do what the boxed kernel does without packing the arguments into a stack; only a geometry miss boxes them. An
// operator belongs here when it is frequent and small enough for the boxing (about a microsecond) to show.
#include "client/device.h"

#include <ATen/core/boxing/impl/boxing.h>
#include <ATen/ops/_softmax_ops.h>
#include <ATen/ops/_to_copy_ops.h>
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
#include <ATen/ops/index_ops.h>
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

#include "client/issue.h"

namespace dtorch {

namespace {

template <class T>
struct Results;

// What an entry's new tensors become in the operator's own return type.
template <>
struct Results<at::Tensor> {
  static at::Tensor make(int worker, const Entry& e, at::Tensor* outs) {
    outs[0] = make_out(worker, e.outs[0]);
    return outs[0];
  }
  static constexpr size_t count = 1;
};
template <class... T>
struct Results<std::tuple<T...>> {
  static constexpr size_t count = sizeof...(T);
  static std::tuple<T...> make(int worker, const Entry& e, at::Tensor* outs) {
    for (size_t i = 0; i < count; ++i) outs[i] = make_out(worker, e.outs[i]);
    return pick(outs, std::index_sequence_for<T...>{});
  }
  template <size_t... I>
  static std::tuple<T...> pick(at::Tensor* outs, std::index_sequence<I...>) {
    return {outs[I]...};
  }
};

template <class First, class... Rest>
auto& first_argument(First& first, Rest&...) {
  return first;
}

template <class Op, class Signature = typename Op::schema>
struct Hot;

template <class Op, class R, class... A>
struct Hot<Op, R(A...)> {
  static const OpInfo& info() {
    static const OpInfo& i = op_info(Op::name, Op::overload_name);
    return i;
  }

  static torch::jit::Stack box(A... args) {
    torch::jit::Stack stack;
    torch::jit::push(stack, args...);
    return stack;
  }

  static R call(A... args) {
    const auto& op = info();
    if (__builtin_expect(Inferring::active(), 0)) {
      auto stack = box(args...);
      issue_boxed(op, &stack);
      if constexpr (std::is_same_v<R, at::Tensor&>) return first_argument(args...);
      else return c10::impl::PopResult<R>::call(stack);
    }
    ensure_running();
    ScratchLease s(op);
    Encoder encode(*s, op);
    (encode.arg(args), ...);
    if (s->worker < 0) s->worker = worker_of(std::nullopt);
    const Entry* entry = find_geometry(op, s->key);
    if (__builtin_expect(!entry, 0)) {
      Issuing issuing;
      const auto stack = box(args...);
      entry = infer_geometry(op, s->key, stack);
    }
    if constexpr (std::is_same_v<R, at::Tensor&>) {  // in place: the first argument comes back
      if (entry->ask) {
        auto stack = box(args...);
        issue_boxed(op, &stack);
      } else {
        emit(op, *s, *entry, {});
      }
      return first_argument(args...);
    } else {
      if (entry->ask || entry->outs.size() != Results<R>::count) {
        auto stack = box(args...);
        issue_boxed(op, &stack);
        return c10::impl::PopResult<R>::call(stack);
      }
      at::Tensor outs[Results<R>::count];
      R result = Results<R>::make(s->worker, *entry, outs);
      emit(op, *s, *entry, at::ArrayRef<at::Tensor>(outs, Results<R>::count));
      return result;
    }
  }
};

template <class Op>
void hot(torch::Library& m) {
  std::string name = std::string(Op::name).substr(6);
  if (Op::overload_name[0]) name += std::string(".") + Op::overload_name;
  m.impl(name.c_str(), torch::CppFunction(TORCH_FN(Hot<Op>::call)));
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

// Unboxed calls of the operators that programs run most: one template, one line an operator. The boxed call works for
// every operator; these save it the stack and the type-driven decoding.
#include "common/device.h"
#include "worker/operators.h"
#include "worker/small.h"

#include <ATen/ops/_softmax_ops.h>
#include <ATen/ops/add_ops.h>
#include <ATen/ops/addcdiv_ops.h>
#include <ATen/ops/addcmul_ops.h>
#include <ATen/ops/addmm_ops.h>
#include <ATen/ops/bmm_ops.h>
#include <ATen/ops/clone_ops.h>
#include <ATen/ops/copy_ops.h>
#include <ATen/ops/cos_ops.h>
#include <ATen/ops/div_ops.h>
#include <ATen/ops/exp_ops.h>
#include <ATen/ops/gelu_ops.h>
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

#include <unordered_map>

namespace dtorch::worker {

namespace {

// How an argument is held between decoding and the call, by the type the operator takes.
template <class T>
struct Held;

template <>
struct Held<at::Tensor> {
  at::Tensor v;
  explicit Held(Decoder& d) : v(d.tensor()) {}
  at::Tensor& get() { return v; }
};
template <>
struct Held<std::optional<at::Tensor>> {
  std::optional<at::Tensor> v;
  explicit Held(Decoder& d) {
    auto t = d.tensor();
    if (t.defined()) v = std::move(t);
  }
  std::optional<at::Tensor>& get() { return v; }
};
template <>
struct Held<c10::Scalar> {
  c10::Scalar v;
  explicit Held(Decoder& d) : v(d.scalar()) {}
  c10::Scalar& get() { return v; }
};
template <class T>
struct Plain {
  T v;
  T get() { return v; }
};
template <>
struct Held<bool> : Plain<bool> {
  explicit Held(Decoder& d) : Plain{d.in().boolean()} {}
};
template <>
struct Held<int64_t> : Plain<int64_t> {
  explicit Held(Decoder& d) : Plain{d.in().integer()} {}
};
template <>
struct Held<double> : Plain<double> {
  explicit Held(Decoder& d) : Plain{d.in().real()} {}
};
template <>
struct Held<std::optional<at::ScalarType>> : Plain<std::optional<at::ScalarType>> {
  explicit Held(Decoder& d) {
    if (!d.in().try_nil()) v = static_cast<at::ScalarType>(d.in().integer());
  }
};
template <>
struct Held<std::optional<at::MemoryFormat>> : Plain<std::optional<at::MemoryFormat>> {
  explicit Held(Decoder& d) {
    if (!d.in().try_nil()) v = static_cast<at::MemoryFormat>(d.in().integer());
  }
};
template <>
struct Held<at::OptionalIntArrayRef> {
  bool some;
  Dims v;
  explicit Held(Decoder& d) : some(!d.in().try_nil()) {
    if (some) v = d.ints();
  }
  at::OptionalIntArrayRef get() { return some ? at::OptionalIntArrayRef(c10::IntArrayRef(v)) : at::OptionalIntArrayRef(); }
};
template <>
struct Held<c10::SymIntArrayRef> {
  Dims v;
  explicit Held(Decoder& d) : v(d.ints()) {}
  c10::SymIntArrayRef get() { return c10::fromIntArrayRefSlow(v); }
};
template <>
struct Held<std::string_view> {
  std::string_view v;
  explicit Held(Decoder& d) : v(d.in().str()) {}
  std::string_view get() { return v; }
};

void keep(std::vector<at::Tensor>& made, at::Tensor&& t) { made.push_back(std::move(t)); }
template <class... T>
void keep(std::vector<at::Tensor>& made, std::tuple<T...>&& t) {
  std::apply([&made](auto&&... each) { (made.push_back(std::move(each)), ...); }, std::move(t));
}

// Operators that a few numbers do not need PyTorch for (small.h).
template <class Op>
constexpr Arithmetic kSmall = Arithmetic::None;
template <> constexpr Arithmetic kSmall<at::_ops::add_Tensor> = Arithmetic::Add;
template <> constexpr Arithmetic kSmall<at::_ops::add__Tensor> = Arithmetic::Add;
template <> constexpr Arithmetic kSmall<at::_ops::sub_Tensor> = Arithmetic::Sub;
template <> constexpr Arithmetic kSmall<at::_ops::mul_Tensor> = Arithmetic::Mul;
template <> constexpr Arithmetic kSmall<at::_ops::mul__Tensor> = Arithmetic::Mul;
template <> constexpr Arithmetic kSmall<at::_ops::div_Tensor> = Arithmetic::Div;
template <> constexpr Arithmetic kSmall<at::_ops::div__Tensor> = Arithmetic::Div;

// The number that the second tensor is multiplied with first, in sums and differences.
inline bool plain(const c10::Scalar& alpha) { return alpha.isIntegral(false) ? alpha.toLong() == 1 : alpha.equal(1.0); }

// `Into` is the overload with out=, or the in-place one where there is no other; void for an operator that is not
// pointwise.
template <class Op, class Into, class Signature = typename Op::schema>
struct Hot;

template <class Op, class Into, class R, class... A>
struct Hot<Op, Into, R(A...)> {
  static void run(Decoder& d, const at::Tensor* donor, std::vector<at::Tensor>& made) {
    d.in().array();
    // Braces: the arguments are decoded in the order they stand in.
    std::tuple<Held<std::decay_t<A>>...> held{Held<std::decay_t<A>>(d)...};
    if (d.poison()) return;
    // All tensors are this device's, without autograd: the key is known. A conjugate view or a sparse tensor needs the
    // dispatcher's own choice.
    const c10::DispatchKeySet keys = computing.keys;
    if constexpr (kSmall<Op> != Arithmetic::None) {
      const at::Tensor &a = std::get<0>(held).v, &b = std::get<1>(held).v;
      bool simple = !d.needs_dispatch() && on_host();
      if constexpr (sizeof...(A) > 2) simple = simple && plain(std::get<2>(held).v);
      at::Tensor out;
      if constexpr (std::is_reference_v<R>) out = a;
      else if (donor && sole(*donor)) out = *donor;
      if (simple) {
        if (auto t = small_arithmetic(kSmall<Op>, a, b, out); t.defined()) {
          if constexpr (!std::is_reference_v<R>) made.push_back(std::move(t));
          return;
        }
      }
    }
    std::apply(
        [&](auto&... h) {
          if constexpr (std::is_reference_v<R>) {
            d.needs_dispatch() ? Op::call(h.get()...) : Op::redispatch(keys, h.get()...);
          } else {
            if constexpr (!std::is_void_v<Into>) {
              if (donor && sole(*donor) && !d.needs_dispatch()) {
                at::Tensor out = *donor;
                if constexpr (std::is_invocable_v<decltype(&Into::redispatch), c10::DispatchKeySet, A..., at::Tensor&>)
                  Into::redispatch(keys, h.get()..., out);
                else
                  Into::redispatch(keys, h.get()...);
                return made.push_back(std::move(out));
              }
            }
            keep(made, d.needs_dispatch() ? Op::call(h.get()...) : Op::redispatch(keys, h.get()...));
          }
        },
        held);
  }
};

using Table = std::unordered_map<std::string, Operator::Unboxed>;

template <class Op, class Into = void>
void hot(Table& t) {
  t.emplace(std::string(Op::name) + "." + Op::overload_name, &Hot<Op, Into>::run);
}

}  // namespace

Operator::Unboxed find_unboxed(const std::string& name, const std::string& overload) {
  static const Table table = [] {
    Table t;
    hot<at::_ops::add_Tensor, at::_ops::add_out>(t);
    hot<at::_ops::add__Tensor>(t);
    hot<at::_ops::sub_Tensor, at::_ops::sub_out>(t);
    hot<at::_ops::mul_Tensor, at::_ops::mul_out>(t);
    hot<at::_ops::mul__Tensor>(t);
    hot<at::_ops::div_Tensor, at::_ops::div_out>(t);
    hot<at::_ops::div__Tensor>(t);
    hot<at::_ops::addcmul, at::_ops::addcmul_out>(t);
    hot<at::_ops::addcmul_>(t);
    hot<at::_ops::addcdiv, at::_ops::addcdiv_out>(t);
    hot<at::_ops::addcdiv_>(t);
    hot<at::_ops::neg, at::_ops::neg_out>(t);
    hot<at::_ops::exp, at::_ops::exp_out>(t);
    hot<at::_ops::sin, at::_ops::sin_out>(t);
    hot<at::_ops::cos, at::_ops::cos_out>(t);
    hot<at::_ops::sqrt, at::_ops::sqrt_out>(t);
    hot<at::_ops::rsqrt, at::_ops::rsqrt_out>(t);
    hot<at::_ops::tanh, at::_ops::tanh_out>(t);
    hot<at::_ops::relu, at::_ops::relu_>(t);
    hot<at::_ops::sigmoid, at::_ops::sigmoid_out>(t);
    hot<at::_ops::silu, at::_ops::silu_out>(t);
    hot<at::_ops::gelu, at::_ops::gelu_out>(t);
    hot<at::_ops::pow_Tensor_Scalar, at::_ops::pow_Tensor_Scalar_out>(t);
    hot<at::_ops::mm>(t);
    hot<at::_ops::bmm>(t);
    hot<at::_ops::addmm>(t);
    hot<at::_ops::mean_dim>(t);
    hot<at::_ops::sum_dim_IntList>(t);
    hot<at::_ops::_softmax>(t);
    hot<at::_ops::native_layer_norm>(t);
    hot<at::_ops::clone>(t);
    hot<at::_ops::copy_>(t);
    return t;
  }();
  auto it = table.find(name + "." + overload);
  return it == table.end() ? nullptr : it->second;
}

}  // namespace dtorch::worker

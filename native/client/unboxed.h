// Unboxed kernels from one template: what the boxed kernel does without packing the arguments into a stack. Only a
// geometry miss boxes them.
#pragma once

#include <ATen/core/boxing/impl/boxing.h>

#include "client/issue.h"

namespace dtorch {

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
struct Unboxed;

template <class Op, class R, class... A>
struct Unboxed<Op, R(A...)> {
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
    ScratchLease s(op);
    Encoder encode(*s, op);
    (encode.arg(args), ...);
    check_running(*s);
    if constexpr (std::is_same_v<R, at::Tensor&>) check_written(op, first_argument(args...));
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

}  // namespace dtorch

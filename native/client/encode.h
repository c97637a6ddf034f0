// Turns an operator's arguments into three things in one pass: the record's bytes, the geometry key, and the storages
// it names. Boxed and unboxed kernels share it.
//
// The key holds everything that can change the geometry of the results and nothing else: tensors by dtype, sizes and
// strides; integers, floats and lists by value; Scalars by type (operator.h: scalar_by_type).
#pragma once

#include <ATen/core/ivalue.h>
#include <ATen/core/List.h>
#include <ATen/core/IListRef.h>
#include <c10/core/Scalar.h>

#include "client/operator.h"
#include "client/storage.h"
#include "common/msgpack.h"

namespace dtorch {

// Buffers of one operator call, reused by the thread's next call.
struct Scratch {
  Buffer record;  // the argument array
  Buffer key;
  c10::SmallVector<StorageCtx*, 8> refs;  // storages named; alive because the arguments are
  int worker = -1;
};

// The thread's scratch; nested calls (an operator issued while another is being inferred) get their own.
class ScratchLease {
 public:
  explicit ScratchLease(const OpInfo& info);
  ~ScratchLease();
  Scratch* operator->() { return s_; }
  Scratch& operator*() { return *s_; }

 private:
  Scratch* s_;
};

// A tensor as an argument: an id, or [id, geometry].
void put_tensor(Buffer& b, const at::TensorImpl* t, const StorageCtx* ctx);

class Encoder {
 public:
  Encoder(Scratch& s, const OpInfo& info) : s_(s), info_(info) { mp::put_array(s.record, info.n_args); }

  void arg(const at::Tensor& t);
  void arg(const c10::Scalar& v);
  void arg(int64_t v) { key('i', v), mp::put_int(s_.record, v); }
  void arg(bool v) { key('b', v), mp::put_bool(s_.record, v); }
  void arg(double v);
  void arg(const c10::SymInt& v) { arg(v.guard_int(__FILE__, __LINE__)); }
  void arg(std::string_view v);
  void arg(c10::IntArrayRef v);
  void arg(c10::SymIntArrayRef v);
  void arg(c10::ArrayRef<double> v);
  void arg(const at::ITensorListRef& v);
  void arg(at::TensorList v);
  void arg(const c10::List<std::optional<at::Tensor>>& v);
  void arg(c10::ScalarType v) { arg(static_cast<int64_t>(v)); }
  void arg(c10::MemoryFormat v) { arg(static_cast<int64_t>(v)); }
  void arg(c10::Layout v) { arg(static_cast<int64_t>(v)); }
  void arg(c10::Device v);
  void arg(const at::Generator& g);
  template <size_t N>
  void arg(std::array<bool, N> v) {
    key('B', static_cast<int64_t>(N));
    mp::put_array(s_.record, N);
    for (bool b : v) arg(b);
  }
  template <class T>
  void arg(const std::optional<T>& v) {
    v ? arg(*v) : nil();
  }
  template <class T>
  void arg(const at::OptionalArrayRef<T>& v) {
    v ? arg(*v) : nil();
  }
  // A boxed argument; `index` is its place in the schema.
  void ivalue(const c10::IValue& v, size_t index);
  void nil() { s_.key.push('n'), mp::put_nil(s_.record); }

 private:
  void key(char tag, int64_t v) {
    uint8_t* p = s_.key.reserve(9);
    *p = static_cast<uint8_t>(tag);
    std::memcpy(p + 1, &v, 8);
    s_.key.advance(9);
  }
  void cpu_tensor(const at::Tensor& t);
  void sparse(const at::Tensor& t);
  // Names the tensor in the record, and its storage in the scratch.
  void name(const at::Tensor& t);
  [[noreturn]] void mismatch(const at::Tensor& t);

  Scratch& s_;
  const OpInfo& info_;
  c10::SmallVector<const at::TensorImpl*, 1> sparse_;  // the record's sparse tensors, each once
};

}  // namespace dtorch

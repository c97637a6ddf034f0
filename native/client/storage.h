// A client tensor's storage: an id, the worker that holds the bytes, and a fake address.
//
// A storage has no bytes here. Its DataPtr carries a StorageCtx whose deleter tells the worker that the client holds it
// no longer. A storage is `lazy` until an operator names it: `empty()` sends nothing, and a result is made by the
// operator's own record. Tensors are plain TensorImpls; views share the StorageImpl as everywhere in PyTorch.
//
// STO-1  Addresses are unique, non-null and never overlap, so alias checks by address (torch.save, safetensors) hold.
// STO-2  A tensor whose geometry equals its storage's first geometry is named by the storage id alone; any other by id
//        and geometry. The worker keeps the same first geometry.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Allocator.h>

#include <cstdint>

#include "client/contents.h"
#include "client/session.h"
#include "common/geometry.h"

namespace dtorch {

struct StorageCtx {
  uint64_t id = 0;
  uint64_t last_seq = 0;    // the last record on its worker that names it (SES-2); guarded by Session::mu_
  uint32_t generation = 0;  // of the session it belongs to
  int16_t worker = 0;
  bool lazy = true;         // no record has named it yet
  size_t nbytes = 0;
  uint32_t site = 0;        // where an empty tensor was made, for what fails when it is allocated
  Geometry first;
  ContentsPtr contents;     // what the client can tell of it, or null; guarded by Session::mu_ (contents.h)
};

constexpr auto kDevice = c10::DeviceType::PrivateUse1;

// The context of a dtorch tensor's storage; throws when the tensor has none (a foreign PrivateUse1 storage).
StorageCtx* ctx_of(const c10::StorageImpl* storage);
inline StorageCtx* ctx_of(const at::Tensor& t) { return ctx_of(t.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl()); }

inline bool is_ours(const at::Tensor& t) { return t.defined() && t.device().type() == kDevice; }

// Ours and nothing else: no wrapper of torch.func's or of a subclass, and no tensor that is traced.
inline bool is_plain(const at::Tensor& t) {
  using c10::DispatchKey;
  constexpr c10::DispatchKeySet wrapped(
      {DispatchKey::Python, DispatchKey::FuncTorchBatched, DispatchKey::FuncTorchGradWrapper, DispatchKey::Functionalize});
  return is_ours(t) && t.has_storage() && !t.key_set().has_any(wrapped);
}

// True when `t` has its storage's first geometry and no conjugate or negative bit (STO-2).
bool is_first(const at::TensorImpl* t, const StorageCtx* ctx);

// A new tensor on a worker with a storage of its own, not yet known to the worker.
at::Tensor make_tensor(int worker, at::ScalarType dtype, c10::IntArrayRef sizes, c10::IntArrayRef strides);
at::Tensor make_tensor(int worker, at::ScalarType dtype, c10::IntArrayRef sizes);  // row-major

// The same as an operator's result, which may be lazily conjugated or negated and start anywhere in its storage.
at::Tensor make_result(int worker, const Geometry& g);

// Bytes from the storage's start to the last element.
size_t storage_bytes(c10::IntArrayRef sizes, c10::IntArrayRef strides, int64_t offset, size_t itemsize);

// Grows or shrinks a storage (untyped_storage().resize_, resize_, out= arguments); `tell_worker` when the worker does
// not do it by itself.
void resize_storage(c10::StorageImpl* storage, size_t nbytes, bool tell_worker);

// Starts the default engine if none runs; throws when it was shut down by a fork or another session's tensor is used.
void ensure_running();
int current_worker();
void set_current_worker(int worker);
// The worker of a device: its index, or the current one. Throws when there is no such worker.
int worker_of(std::optional<c10::Device> device);

c10::Allocator* allocator();

}  // namespace dtorch

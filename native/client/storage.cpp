// See storage.h.
#include "client/storage.h"

#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/StorageImpl.h>
#include <c10/core/TensorImpl.h>

#include <algorithm>
#include <atomic>
#include <map>
#include <string>
#include <utility>

#include "client/python_error.h"
#include "client/value.h"
#include "common/machine.h"

namespace dtorch {

namespace {

std::atomic<uint64_t> next_address{uint64_t{1} << 47};  // above every real user-space address (STO-1)
DTORCH_TLS int current = 0;

// Addresses come in blocks per thread, as ids do.
uint64_t new_address(uint64_t span) {
  constexpr uint64_t kBlock = uint64_t{1} << 30;
  DTORCH_TLS uint64_t next = 0, end = 0;
  if (span > kBlock / 16) return next_address.fetch_add(span, std::memory_order_relaxed);
  if (end - next < span) {
    next = next_address.fetch_add(kBlock, std::memory_order_relaxed);
    end = next + kBlock;
  }
  return std::exchange(next, next + span);
}

void release_storage(void* p) {
  auto* ctx = static_cast<StorageCtx*>(p);
  if (!ctx->lazy) Session::get().release(ctx->id, ctx->worker, ctx->last_seq, ctx->generation);
  delete ctx;
}

c10::DataPtr make_data(StorageCtx* ctx, size_t nbytes, int worker) {
  uint64_t span = (nbytes + 511) / 512 * 512 + 512;
  auto address = new_address(span);
  return {reinterpret_cast<void*>(address), ctx, &release_storage,
          c10::Device(kDevice, static_cast<c10::DeviceIndex>(worker))};
}

StorageCtx* new_ctx(int worker) {
  auto& session = Session::get();
  auto* ctx = new StorageCtx;
  ctx->id = session.new_storage_id();
  ctx->generation = session.generation();
  ctx->worker = static_cast<int16_t>(worker);
  return ctx;
}

// What torch.accelerator and torch.UntypedStorage(n, device="dtorch") ask of a device's allocator.
struct Allocator final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t n) override {
    ensure_running();
    int worker = current_worker();
    auto* ctx = new_ctx(worker);
    ctx->first.dtype = at::kByte;
    ctx->first.sizes = {static_cast<int64_t>(n)};
    ctx->first.strides = {1};
    ctx->nbytes = n;
    return make_data(ctx, n, worker);
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void*, const void*, size_t) const override {
    TORCH_CHECK_NOT_IMPLEMENTED(false, "dtorch: raw storage bytes are on a worker; copy tensors instead");
  }
  bool initialized() override { return Session::get().active(); }
  void emptyCache(c10::MempoolId_t) override {
    if (!Session::get().active()) return;
    for (int worker = 0; worker < Session::get().workers(); ++worker) counters_of(worker, "empty_cache");
  }
  void recordStream(const c10::DataPtr&, c10::Stream) override {}
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex i) override {
    auto of = counters_of(i, "memory");
    c10::CachingDeviceAllocator::DeviceStats stats;
    auto both = [](c10::CachingAllocator::StatArray& all, int64_t current, int64_t peak, int64_t made, int64_t freed) {
      auto& stat = all[static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE)];
      stat.current = current;
      stat.peak = peak;
      stat.allocated = made;
      stat.freed = freed;
    };
    for (auto* bytes : {&stats.allocated_bytes, &stats.active_bytes, &stats.requested_bytes})
      both(*bytes, of["allocated"], of["peak"], of["total"], of["freed"]);
    for (auto* blocks : {&stats.allocation, &stats.active})
      both(*blocks, of["blocks"], of["peak_blocks"], of["allocations"], of["frees"]);
    both(stats.reserved_bytes, of["reserved"], of["peak_reserved"], 0, 0);
    stats.num_alloc_retries = of["retries"];
    stats.num_ooms = of["ooms"];
    return stats;
  }
  void resetAccumulatedStats(c10::DeviceIndex i) override { counters_of(i, "reset_accumulated"); }
  void resetPeakStats(c10::DeviceIndex i) override { counters_of(i, "reset_peak"); }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex i) override {
    auto of = counters_of(i, "memory");
    int64_t free = std::min(of["limit"] - of["reserved"], of["available"]);
    return {static_cast<size_t>(std::max<int64_t>(0, free)), static_cast<size_t>(std::min(of["limit"], of["machine"]))};
  }

 private:
  // What dtorch.worker_stats gives.
  static std::map<std::string, int64_t> counters_of(int worker, const char* what) {
    auto reply = stats_of(worker_of(c10::Device(kDevice, static_cast<c10::DeviceIndex>(worker))), what);
    auto in = reply_body(reply);
    std::map<std::string, int64_t> all;
    for (size_t n = in.array(); n-- > 0;) {
      in.array();
      std::string name(in.str());
      all[name] = in.integer();
    }
    return all;
  }
};

}  // namespace

c10::Allocator* allocator() {
  static Allocator a;
  return &a;
}

StorageCtx* ctx_of(const c10::StorageImpl* storage) {
  TORCH_CHECK(storage, "dtorch: the tensor has no storage");
  const auto& data = storage->data_ptr();
  TORCH_CHECK(data.get_deleter() == &release_storage, "dtorch: the tensor's storage was not made by dtorch");
  return static_cast<StorageCtx*>(data.get_context());
}

bool is_first(const at::TensorImpl* t, const StorageCtx* ctx) {
  const auto& g = ctx->first;
  if (t->storage_offset() != g.offset || c10::typeMetaToScalarType(t->dtype()) != g.dtype) return false;
  auto sizes = t->sizes();
  auto strides = t->strides();
  size_t n = sizes.size();
  if (n != g.sizes.size()) return false;
  for (size_t i = 0; i < n; ++i)
    if (sizes[i] != g.sizes[i] || strides[i] != g.strides[i]) return false;
  return !t->is_conj() && !t->is_neg();
}

size_t storage_bytes(c10::IntArrayRef sizes, c10::IntArrayRef strides, int64_t offset, size_t itemsize) {
  int64_t last = offset;
  for (size_t i = 0; i < sizes.size(); ++i) {
    if (sizes[i] == 0) return 0;
    last += (sizes[i] - 1) * strides[i];
  }
  return static_cast<size_t>(last + 1) * itemsize;
}

at::Tensor make_tensor(int worker, at::ScalarType dtype, c10::IntArrayRef sizes, c10::IntArrayRef strides) {
  static const size_t most = machine_memory();
  size_t n = storage_bytes(sizes, strides, 0, c10::elementSize(dtype));
  if (__builtin_expect(n > most, 0) && !Session::get().accelerated()) throw_too_large(n, most);
  auto* ctx = new_ctx(worker);
  ctx->first.dtype = dtype;
  ctx->first.sizes.assign(sizes.begin(), sizes.end());
  ctx->first.strides.assign(strides.begin(), strides.end());
  ctx->nbytes = n;
  c10::Storage storage(c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), static_cast<int64_t>(n),
                                                             make_data(ctx, n, worker), allocator(), /*resizable=*/true));
  auto t = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                                    c10::scalarTypeToTypeMeta(dtype));
  t.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides);
  return t;
}

at::Tensor make_tensor(int worker, at::ScalarType dtype, c10::IntArrayRef sizes) {
  return make_tensor(worker, dtype, sizes, row_major(sizes));
}

at::Tensor make_result(int worker, const Geometry& g) {
  if (__builtin_expect(g.offset == 0 && g.flags == 0, 1)) return make_tensor(worker, g.dtype, g.sizes, g.strides);
  auto first = first_of(g);
  auto t = make_tensor(worker, first.dtype, first.sizes, first.strides);
  auto* impl = t.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(g.sizes, g.strides, g.offset);
  if (g.flags & kFlagConj) impl->_set_conj(true);
  if (g.flags & kFlagNeg) impl->_set_neg(true);
  return t;
}

void resize_storage(c10::StorageImpl* storage, size_t nbytes, bool tell_worker) {
  auto* ctx = ctx_of(storage);
  if (ctx->generation != Session::get().generation()) throw_engine_error("");
  storage->set_nbytes(nbytes);
  ctx->nbytes = nbytes;
  auto& session = Session::get();
  if (ctx->lazy || !tell_worker) {
    if (nbytes <= kInlineBytes) return;
    Session::Writer w(session);
    return ctx->contents.reset();  // too large to be told here (CON-3)
  }
  session.admit(ctx->worker);
  Session::Writer w(session);
  ctx->contents.reset();
  ctx->last_seq = w.begin(Record::RESIZE, ctx->worker, 2);
  mp::put_uint(w.buf(), ctx->id);
  mp::put_uint(w.buf(), nbytes);
  w.end();
}

void ensure_running() {
  if (__builtin_expect(!Session::get().active(), 0)) start_default_engine();
}

int current_worker() { return current; }

void set_current_worker(int worker) { current = worker; }

int worker_of(std::optional<c10::Device> device) {
  ensure_running();
  int index = device && device->has_index() ? device->index() : current;
  int n = Session::get().workers();
  TORCH_CHECK(index >= 0 && index < n, "dtorch:", index, " does not exist: the engine has ", n,
              n == 1 ? " worker" : " workers", " (dtorch:0 to dtorch:", n - 1, "); call dtorch.init(workers=...)");
  return index;
}

}  // namespace dtorch

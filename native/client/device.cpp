// The device as PyTorch's core sees it: current device, streams and events, and hooks. What stands behind them is in
// streams.cpp, generator.cpp, pinned.cpp and storage.cpp, the kernels in kernels.cpp and hot.cpp.
#include "client/device.h"

#include <ATen/SequenceNumber.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <atomic>

#include "client/generator.h"
#include "client/pinned.h"
#include "client/python_error.h"
#include "client/storage.h"
#include "client/streams.h"

namespace dtorch {

namespace {

// Makes a worker current; starts the engine to see whether there is such a worker, but not to choose what is current.
void choose(c10::Device d) {
  if (!Session::get().active() && d.index() == current_worker()) return;
  set_current_worker(worker_of(d));
}

c10::Device device_at(int worker) { return {kDevice, static_cast<c10::DeviceIndex>(worker)}; }

// Autograd works its nodes off by number, the latest first, and so adds gradients up; numbers are counted by each thread for
// itself. Eager's backward on the CPU runs in the caller's thread: what it makes with create_graph is later than what the
// forward made. Ours runs in the engine's thread for the device, whose count stands elsewhere, and gradients of gradients
// would be added up in another order, to other bits. A thread that makes or runs a node of ours therefore takes its count
// up to the latest one; both ask for a stream. (Only the first node that the caller makes after a backward is numbered before
// anything of ours is asked: it can still come too early in the order, which shows from the third derivative on.)
void keep_order() {
  static std::atomic<uint64_t> latest{0};
  uint64_t mine = at::sequence_number::peek();
  uint64_t seen = latest.load(std::memory_order_relaxed);
  for (; mine < seen; ++mine) at::sequence_number::get_and_increment();
  while (mine > seen && !latest.compare_exchange_weak(seen, mine, std::memory_order_relaxed)) {
  }
}

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kDevice; }
  c10::Device exchangeDevice(c10::Device d) const override {
    int before = current_worker();
    if (d.has_index()) set_current_worker(d.index());
    return device_at(before);
  }
  c10::Device getDevice() const override { return device_at(current_worker()); }
  void setDevice(c10::Device d) const override {
    if (d.has_index()) choose(d);
  }
  void uncheckedSetDevice(c10::Device d) const noexcept override {
    if (d.has_index()) set_current_worker(d.index());
  }
  c10::Stream getStream(c10::Device d) const override {
    keep_order();
    return current_stream(d);
  }
  c10::Stream getDefaultStream(c10::Device d) const override { return c10::Stream(c10::Stream::DEFAULT, d); }
  c10::Stream getStreamFromGlobalPool(c10::Device d, bool) const override { return new_stream(d); }
  c10::Stream getNewStream(c10::Device d, int) const override { return new_stream(d); }
  c10::Stream exchangeStream(c10::Stream s) const override {
    keep_order();
    return exchange_stream(s);
  }
  c10::DeviceCapability getDeviceCapability(c10::Device) const override {
    c10::DeviceCapability all;  // but quantized ones
    auto& has = all.capability_data.supported_scalar_types;
    has.has_QInt8 = has.has_QUInt8 = has.has_QInt32 = has.has_QUInt4x2 = has.has_QUInt2x4 = 0;
    return all;
  }
  c10::DeviceIndex deviceCount() const noexcept override {
    auto& s = Session::get();
    return static_cast<c10::DeviceIndex>(s.active() ? s.workers() : 1);
  }
  bool queryStream(const c10::Stream& s) const override { return stream_is_idle(s); }
  void synchronizeStream(const c10::Stream& s) const override { synchronize_stream(s); }
  void synchronizeDevice(const c10::DeviceIndex i) const override { synchronize_stream(getDefaultStream(device_at(i))); }
  void record(void** event, const c10::Stream& s, const c10::DeviceIndex, const c10::EventFlag) const override {
    record_event(event, s);
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override { destroy_event(event); }
  void block(void* event, const c10::Stream& s) const override { wait_for_event(event, s); }
  bool queryEvent(void* event) const override { return event_happened(event); }
  void synchronizeEvent(void* event) const override { synchronize_event(event); }
  double elapsedTime(void* first, void* second, const c10::DeviceIndex) const override {
    return milliseconds_between(first, second);
  }
};

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return Session::get().active(); }
  void init() const override { ensure_running(); }
  c10::DeviceIndex deviceCount() const override { return guard().deviceCount(); }
  void setCurrentDevice(c10::DeviceIndex i) const override { choose(device_at(i)); }
  c10::DeviceIndex getCurrentDevice() const override { return static_cast<c10::DeviceIndex>(current_worker()); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex i) const override {
    auto before = getCurrentDevice();
    if (i >= 0) set_current_worker(i);
    return before;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex i) const override { return exchangeDevice(i); }
  bool isPinnedPtr(const void* p) const override { return pinned_part(p).has_value(); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return pinned_allocator(); }
  at::Device getDeviceFromPtr(void*) const override { return device_at(current_worker()); }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex i) const override { return default_generator(i); }
  at::Generator getNewGenerator(c10::DeviceIndex i) const override { return new_generator(i); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t n) const override {
    resize_storage(storage.unsafeGetStorageImpl(), n, /*tell_worker=*/true);
  }

 private:
  static const Guard& guard() {
    static const Guard g;
    return g;
  }
};

}  // namespace

void register_device() {
  // Both are leaked on purpose: PyTorch keeps the pointers until the process ends.
  static c10::impl::DeviceGuardImplRegistrar guard(kDevice, new Guard);
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  c10::SetAllocator(kDevice, allocator());
  at::setHostAllocator(kDevice, pinned_allocator());
}

}  // namespace dtorch

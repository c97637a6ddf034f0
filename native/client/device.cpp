// The device as PyTorch's core sees it: current device, streams and events (one in-order stream per worker), and hooks.
// The generators are in generator.cpp, the kernels in kernels.cpp and hot.cpp.
#include "client/device.h"

#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include "client/generator.h"
#include "client/python_error.h"
#include "client/storage.h"
#include "client/value.h"

namespace dtorch {

namespace {

c10::Device device_at(int worker) { return {kDevice, static_cast<c10::DeviceIndex>(worker)}; }

// A worker runs its records in order: one stream, whose events are synchronisation points of the client.
struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kDevice; }
  c10::Device exchangeDevice(c10::Device d) const override {
    int before = current_worker();
    if (d.has_index()) set_current_worker(d.index());
    return device_at(before);
  }
  c10::Device getDevice() const override { return device_at(current_worker()); }
  void setDevice(c10::Device d) const override {
    if (d.has_index()) set_current_worker(worker_of(d));
  }
  void uncheckedSetDevice(c10::Device d) const noexcept override {
    if (d.has_index()) set_current_worker(d.index());
  }
  c10::Stream getStream(c10::Device d) const override { return c10::Stream(c10::Stream::DEFAULT, d); }
  c10::Stream getDefaultStream(c10::Device d) const override { return c10::Stream(c10::Stream::DEFAULT, d); }
  c10::Stream getStreamFromGlobalPool(c10::Device d, bool) const override { return c10::Stream(c10::Stream::DEFAULT, d); }
  c10::Stream getNewStream(c10::Device d, int) const override { return c10::Stream(c10::Stream::DEFAULT, d); }
  c10::Stream exchangeStream(c10::Stream s) const override { return c10::Stream(c10::Stream::DEFAULT, s.device()); }
  c10::DeviceIndex deviceCount() const noexcept override {
    auto& s = Session::get();
    return static_cast<c10::DeviceIndex>(s.active() ? s.workers() : 1);
  }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream& s) const override { synchronize(worker_of(s.device())); }
  void synchronizeDevice(const c10::DeviceIndex i) const override { synchronize(worker_of(device_at(i))); }
  void record(void** event, const c10::Stream& s, const c10::DeviceIndex, const c10::EventFlag) const override {
    *event = reinterpret_cast<void*>(static_cast<uintptr_t>(s.device_index() + 1));
  }
  void block(void*, const c10::Stream&) const override {}  // order within a worker is the order of issue
  bool queryEvent(void*) const override { return true; }
  void synchronizeEvent(void* event) const override {
    if (event) synchronize(static_cast<int>(reinterpret_cast<uintptr_t>(event)) - 1);
  }
};

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return Session::get().active(); }
  void init() const override { ensure_running(); }
  c10::DeviceIndex deviceCount() const override { return guard().deviceCount(); }
  void setCurrentDevice(c10::DeviceIndex i) const override { set_current_worker(worker_of(device_at(i))); }
  c10::DeviceIndex getCurrentDevice() const override { return static_cast<c10::DeviceIndex>(current_worker()); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex i) const override {
    auto before = getCurrentDevice();
    if (i >= 0) set_current_worker(i);
    return before;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex i) const override { return exchangeDevice(i); }
  bool isPinnedPtr(const void*) const override { return false; }
  c10::Allocator* getPinnedMemoryAllocator() const override { return c10::GetAllocator(c10::DeviceType::CPU); }
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
}

}  // namespace dtorch

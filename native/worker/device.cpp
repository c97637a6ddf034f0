// See device.h.
#include "worker/device.h"

#include <ATen/Context.h>
#include <ATen/EmptyTensor.h>
#include <ATen/ops/empty_strided.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/TensorOptions.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <cstring>
#include <string>

#include "common/decode.h"

namespace dtorch::worker {

namespace {

const c10::impl::DeviceGuardImplInterface& guard() {
  static const auto* impl = c10::impl::getDeviceGuardImpl(computing.device.type());
  return *impl;
}

c10::DeviceAllocator* allocator() { return c10::getDeviceAllocator(computing.device.type()); }

}  // namespace

void compute_on(const std::string& device) {
  computing.device = c10::Device(device);
  if (on_host()) return;
  computing.keys = c10::DispatchKeySet(c10::computeDispatchKey(at::kFloat, at::kStrided, computing.device));
  guard().setDevice(computing.device);
  at::globalContext().setSDPUseCuDNN(false);  // the client calls flash and memory-efficient attention (client/attention.cpp)
}

at::Tensor make_empty(c10::IntArrayRef sizes, c10::IntArrayRef strides, at::ScalarType dtype) {
  if (__builtin_expect(on_host(), 1)) return at::detail::empty_strided_cpu(sizes, strides, dtype);
  for (;;) {
    try {
      return at::empty_strided(sizes, strides, at::TensorOptions(dtype).device(computing.device));
    } catch (const c10::OutOfMemoryError&) {
      if (!relieve_pressure()) throw;
    }
  }
}

at::Tensor make_bytes(size_t n, c10::Device where) {
  auto count = static_cast<int64_t>(n);
  return where.is_cpu() ? at::detail::empty_cpu({count}, at::kByte) : make_empty({count}, {1}, at::kByte);
}

void copy_bytes(const at::Tensor& bytes, const at::Tensor& of, size_t n) {
  if (n == 0) return;
  if (of.is_cpu()) std::memcpy(bytes.mutable_data_ptr(), of.storage().data(), n);
  else bytes.narrow(0, 0, static_cast<int64_t>(n)).copy_(view_of(of, {at::kByte, {static_cast<int64_t>(n)}, {1}}));
}

c10::Stream compute_stream() { return guard().getStream(computing.device); }

c10::Stream fetch_stream() {
  static const c10::Stream stream = guard().getStreamFromGlobalPool(computing.device, /*isHighPriority=*/true);
  return stream;
}

c10::Event now_on(const c10::Stream& stream) {
  c10::Event e(computing.device.type());
  e.record(stream);
  return e;
}

void fetch_after_computing() { now_on(compute_stream()).block(fetch_stream()); }

bool still_works() {
  try {
    guard().synchronizeDevice(computing.device.index());
    return true;
  } catch (const std::exception&) {
    return false;
  }
}

DeviceMemory device_memory() {
  DeviceMemory m;
  if (!allocator()->initialized()) return m;
  constexpr auto all = static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE);
  auto s = allocator()->getDeviceStats(computing.device.index());
  const auto &bytes = s.allocated_bytes[all], &blocks = s.allocation[all], &reserved = s.reserved_bytes[all];
  m.stats.allocated = bytes.current, m.stats.peak = bytes.peak, m.stats.total = bytes.allocated, m.stats.freed = bytes.freed;
  m.stats.live = blocks.current, m.stats.peak_live = blocks.peak;
  m.stats.allocations = blocks.allocated, m.stats.frees = blocks.freed;
  m.stats.retries = s.num_alloc_retries, m.stats.failures = s.num_ooms;
  m.reserved = reserved.current, m.peak_reserved = reserved.peak;
  return m;
}

void reset_device_peaks() {
  if (allocator()->initialized()) allocator()->resetPeakStats(computing.device.index());
}
void reset_device_accumulated() {
  if (allocator()->initialized()) allocator()->resetAccumulatedStats(computing.device.index());
}
void empty_device_cache() {
  if (allocator()->initialized()) allocator()->emptyCache();
}

}  // namespace dtorch::worker

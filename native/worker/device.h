// What the executor asks of the device that its worker computes on: memory, and when work has been done.
//
// A CPU has done its work when a call returns. An accelerator works behind: kernels are launched ahead on one stream, values
// are fetched on another, and nothing here waits for either. Everything goes through PyTorch's own interfaces for devices
// (common/device.h); what they lack, page-locked memory and memory shared between processes, is Python's (device_python.h).
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>

#include "common/device.h"
#include "common/geometry.h"
#include "worker/memory.h"

namespace dtorch::worker {

// Makes "cpu" or "cuda:1" the device of this process.
void compute_on(const std::string& device);

// A new tensor where this worker computes. Where memory is short it waits for some, as the allocator does on the host.
at::Tensor make_empty(c10::IntArrayRef sizes, c10::IntArrayRef strides, at::ScalarType dtype);
inline at::Tensor make_empty(const Geometry& g) { return make_empty(g.sizes, g.strides, g.dtype); }
// One of n bytes, beside another.
at::Tensor make_bytes(size_t n, c10::Device where);

// Copies the first n bytes of a storage to a tensor of make_bytes.
void copy_bytes(const at::Tensor& bytes, const at::Tensor& of, size_t n);

// The stream on which operators run, and the one on which values are fetched. On accelerators only.
c10::Stream compute_stream();
c10::Stream fetch_stream();

// A point in a stream's work: everything issued to it so far.
c10::Event now_on(const c10::Stream& stream);
// What the fetch stream does from now on comes after what the compute stream was given so far.
void fetch_after_computing();

// Whether the device goes on working after an error that it reported. Waits for it.
bool still_works();

// The device's own memory statistics, by memory.h's names; `reserved` and `peak_reserved` beside them.
struct DeviceMemory {
  MemoryStats stats;
  int64_t reserved = 0, peak_reserved = 0;
};
DeviceMemory device_memory();
void reset_device_peaks();
void reset_device_accumulated();
void empty_device_cache();

}  // namespace dtorch::worker

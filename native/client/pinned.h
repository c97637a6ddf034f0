// Pinned memory: CPU memory that a worker reads by itself, so that an upload from it costs the client no copy.
//
// As for CUDA, it is what `tensor.pin_memory()`, `torch.empty(..., pin_memory=True)` and a DataLoader with
// `pin_memory=True` give, and what `.to("dtorch", non_blocking=True)` is fast from.
//
// PIN-1  A block that an upload under way reads is not used again before the worker has read it, whoever drops it: the
//        upload holds its storage (session.h, WorkerState::Upload::kept).
// PIN-2  A child made by fork makes and frees no block of the parent's; it sees the parent's memory, shared.
#pragma once

#include <ATen/core/CachingHostAllocator.h>

#include <cstddef>
#include <optional>
#include <utility>

namespace dtorch {

at::HostAllocator* pinned_allocator();

// Where the memory lies when a pointer is into pinned memory: a descriptor of this process, and the offset in its file.
std::optional<std::pair<int, size_t>> pinned_part(const void* p);

}  // namespace dtorch

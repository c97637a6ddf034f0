// The worker's CPU allocator: PyTorch's memory interface, counted.
//
// Freed memory goes back to the C library's heap, which is told to keep it: fresh pages are what makes large results
// slow (a 32 MiB sum spends most of its time in page faults), recycled ones are fast.
#pragma once

#include <cstddef>
#include <cstdint>

namespace dtorch::worker {

struct MemoryStats {
  int64_t allocated = 0, peak = 0;      // bytes that operators asked for and hold now; the most since reset
  int64_t live = 0, allocations = 0;    // blocks held now; ever made
};

// Makes it PyTorch's CPU allocator in this process. Call before any tensor is made.
void install_allocator();
MemoryStats& memory_stats();
// Counts memory that tensors hold but that the allocator did not make: adopted segments. Negative when it goes.
void count_memory(int64_t nbytes);

}  // namespace dtorch::worker

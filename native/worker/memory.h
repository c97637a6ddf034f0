// The worker's CPU allocator: PyTorch's memory interface on top of the pool, counted.
//
// Freed memory is kept: fresh pages are what makes large results slow (a 32 MiB sum spends most of its time in page
// faults), recycled ones are fast. When memory runs short, in this order: the calling thread's kept blocks go back to
// the pool, the pool's free pages to the operating system, the executor waits for releases that are under way; then the
// allocation fails with c10::OutOfMemoryError.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>

namespace dtorch::worker {

class Pool;

// Statistics by torch.cuda's names: bytes and blocks that operators asked for and hold.
struct MemoryStats {
  int64_t allocated = 0, peak = 0;        // bytes held now; the most since reset
  int64_t live = 0, peak_live = 0;        // blocks held now; the most since reset
  int64_t allocations = 0, total = 0;     // blocks and bytes made since the start or the last reset
  int64_t frees = 0, freed = 0;           // the same, freed
  int64_t retries = 0, failures = 0;      // times memory ran short; times it stayed so
  int64_t lent = 0;                       // bytes that only the client still holds, as values it fetched; not in `allocated`
  int64_t mapped = 0;                     // bytes of other workers' memory that tensors here stand on; not in `allocated`
};

// Makes it PyTorch's CPU allocator in this process. Call before any tensor is made.
void install_allocator();
Pool& pool();
MemoryStats& memory_stats();
void reset_peaks();
void reset_accumulated();  // what was counted since the start
// A segment of n bytes that tensors hold but that the allocator did not make: it comes, or throws c10::OutOfMemoryError as
// an allocation would; and it goes.
void adopt_memory(size_t n);
void disown_memory(size_t n);
// n bytes are now held by the client alone, as its own memory; or (negative) about to be freed.
void lend_memory(int64_t n);
// Gives everything that is free back to the operating system: this thread's kept blocks and the pool's free pages.
size_t empty_cache();
// Called on the thread that sets it when an allocation does not succeed; true: something was freed, try again.
void set_pressure_hook(std::function<bool()> hook);
// Calls it, for memory of another kind.
bool relieve_pressure();

}  // namespace dtorch::worker

// See memory.h. The executor's thread makes and frees nearly all blocks; operators' own threads may free some, so the
// counters are atomic where that can happen (relaxed: they are statistics).
#include "worker/memory.h"

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <c10/util/Exception.h>

#include <malloc.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <cstring>

namespace dtorch::worker {

namespace {

constexpr size_t kAlign = 64;  // as c10's own CPU allocator; also the size of the header in front of a block

MemoryStats stats;

// The block's size stands in a header right before the data, so that the data pointer alone is enough to free it:
// oneDNN allocates raw pointers through this interface.
// Small blocks are kept per thread, by size: a scalar's result should not cost a search of the heap.
constexpr size_t kSmall = 2048, kKept = 64;
struct Bin {
  void* blocks[kKept];
  size_t count = 0;
};
struct Bins {
  Bin bins[kSmall / kAlign + 1];
  ~Bins() {
    for (auto& b : bins)
      while (b.count) std::free(b.blocks[--b.count]);
  }
};
Bins& bins() {
  static thread_local Bins b;
  return b;
}
size_t rounded(size_t n) { return (n + kAlign - 1) / kAlign * kAlign; }

void freed(void* data) {
  if (!data) return;
  void* base = static_cast<char*>(data) - kAlign;
  size_t n;
  std::memcpy(&n, base, sizeof n);
  __atomic_fetch_sub(&stats.allocated, static_cast<int64_t>(n), __ATOMIC_RELAXED);
  __atomic_fetch_sub(&stats.live, 1, __ATOMIC_RELAXED);
  if (n <= kSmall) {
    auto& bin = bins().bins[rounded(n) / kAlign];
    if (bin.count < kKept) {
      bin.blocks[bin.count++] = base;
      return;
    }
  }
  std::free(base);
}

struct Allocator final : c10::Allocator {
  c10::DataPtr allocate(size_t n) override {
    if (n == 0) return {nullptr, nullptr, &freed, c10::Device(c10::DeviceType::CPU)};
    static const size_t machine = static_cast<size_t>(sysconf(_SC_PHYS_PAGES)) * static_cast<size_t>(sysconf(_SC_PAGESIZE));
    void* base = nullptr;
    Bin* bin = n <= kSmall ? &bins().bins[rounded(n) / kAlign] : nullptr;
    if (bin && bin->count) base = bin->blocks[--bin->count];
    else if (n > machine || posix_memalign(&base, kAlign, rounded(n) + kAlign) != 0)
      TORCH_CHECK_WITH(OutOfMemoryError, false, "tried to allocate ", n, " bytes on a CPU worker of a machine with ", machine,
                       " bytes; ", stats.allocated, " bytes are allocated");
    std::memcpy(base, &n, sizeof n);
    int64_t now = __atomic_add_fetch(&stats.allocated, static_cast<int64_t>(n), __ATOMIC_RELAXED);
    if (now > stats.peak) stats.peak = now;
    __atomic_fetch_add(&stats.live, 1, __ATOMIC_RELAXED);
    __atomic_fetch_add(&stats.allocations, 1, __ATOMIC_RELAXED);
    void* data = static_cast<char*>(base) + kAlign;
    return {data, data, &freed, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &freed; }
  void copy_data(void* dst, const void* src, size_t n) const override { std::memcpy(dst, src, n); }
};

}  // namespace

MemoryStats& memory_stats() { return stats; }

void count_memory(int64_t n) {
  int64_t now = __atomic_add_fetch(&stats.allocated, n, __ATOMIC_RELAXED);
  if (now > stats.peak) stats.peak = now;
}

void install_allocator() {
  mallopt(M_MMAP_THRESHOLD, 1 << 30);
  mallopt(M_TRIM_THRESHOLD, 1 << 30);
  mallopt(M_TOP_PAD, 1 << 20);
  static Allocator allocator;
  c10::SetCPUAllocator(&allocator, /*priority=*/100);
}

}  // namespace dtorch::worker

// See memory.h. The executor's thread makes and frees nearly all blocks; operators' own threads may free some, so the
// counters are atomic where that can happen (relaxed: they are statistics).
#include "worker/memory.h"

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <c10/util/Exception.h>

#include <cstring>
#include <vector>

#include "common/machine.h"
#include "worker/pool.h"

namespace dtorch::worker {

namespace {

MemoryStats stats;

void add(int64_t& counter, int64_t n) { __atomic_fetch_add(&counter, n, __ATOMIC_RELAXED); }
void add(int64_t& counter, int64_t n, int64_t& peak) {
  int64_t now = __atomic_add_fetch(&counter, n, __ATOMIC_RELAXED);
  if (now > peak) peak = now;
}

// Small blocks are kept per thread, by size: a scalar's result should not cost a search of the pool.
constexpr size_t kSmall = 64 << 10, kKept = 64, kKeptBytes = 1 << 20;
struct Bins {
  std::vector<void*> bins[kSmall / Pool::kAlign + 1];
  size_t bytes = 0;
  static size_t index(size_t n) { return (n + Pool::kAlign - 1) / Pool::kAlign; }

  void* take(size_t n) {
    auto& bin = bins[index(n)];
    if (bin.empty()) return nullptr;
    void* data = bin.back();
    bin.pop_back();
    bytes -= index(n) * Pool::kAlign;
    Pool::resize(data, n);
    return data;
  }
  bool keep(void* data, size_t n) {
    auto& bin = bins[index(n)];
    if (bin.size() >= kKept || bytes + n > kKeptBytes) return false;
    bin.push_back(data);
    bytes += index(n) * Pool::kAlign;
    return true;
  }
  void flush() {
    for (auto& bin : bins) {
      for (void* data : bin) pool().free(data);
      bin.clear();
    }
    bytes = 0;
  }
  ~Bins() { flush(); }
};
Bins& bins() {
  static thread_local Bins b;
  return b;
}

thread_local std::function<bool()> pressure_hook;

// Memory is short for n bytes: makes room until `attempt` succeeds, or throws.
template <class Attempt>
void scarce(size_t n, const Attempt& attempt) {
  add(stats.retries, 1);
  do {
    empty_cache();
    if (attempt()) return;
  } while (pressure_hook && pressure_hook());
  add(stats.failures, 1);
  TORCH_CHECK_WITH(OutOfMemoryError, false, "tried to allocate ", n, " bytes: ", stats.allocated, " bytes are allocated, ",
                   pool().reserved(), " reserved, the worker's limit is ", pool().limit(), " and the machine has ",
                   available_memory(), " available");
}

void freed(void* data) {
  if (!data) return;
  size_t n = Pool::size_of(data);
  add(stats.allocated, -static_cast<int64_t>(n));
  add(stats.live, -1);
  add(stats.frees, 1);
  add(stats.freed, static_cast<int64_t>(n));
  if (n <= kSmall && bins().keep(data, n)) return;
  pool().free(data);
}

struct Allocator final : c10::Allocator {
  c10::DataPtr allocate(size_t n) override {
    const c10::Device cpu(c10::DeviceType::CPU);
    if (n == 0) return {nullptr, nullptr, &freed, cpu};
    void* data = n <= kSmall ? bins().take(n) : nullptr;
    if (!data) data = pool().allocate(n);
    if (__builtin_expect(!data, 0)) scarce(n, [&] { return (data = pool().allocate(n)) != nullptr; });
    auto bytes = static_cast<int64_t>(n);
    add(stats.allocated, bytes, stats.peak);
    add(stats.live, 1, stats.peak_live);
    add(stats.allocations, 1);
    add(stats.total, bytes);
    return {data, data, &freed, cpu};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &freed; }
  void copy_data(void* dst, const void* src, size_t n) const override { std::memcpy(dst, src, n); }
};

}  // namespace

Pool& pool() {
  static Pool& p = *new Pool;  // never destroyed: tensors of other threads may outlive any order of destruction
  return p;
}

MemoryStats& memory_stats() { return stats; }

void reset_peaks() {
  stats.peak = stats.allocated;
  stats.peak_live = stats.live;
  pool().reset_peak();
}

void reset_accumulated() {
  for (auto* counter : {&stats.allocations, &stats.total, &stats.frees, &stats.freed, &stats.retries, &stats.failures})
    __atomic_store_n(counter, 0, __ATOMIC_RELAXED);
}

void adopt_memory(size_t n) {
  if (!pool().adopt(n)) scarce(n, [n] { return pool().adopt(n); });
  add(stats.allocated, static_cast<int64_t>(n), stats.peak);
  add(stats.live, 1, stats.peak_live);
  add(stats.allocations, 1);
  add(stats.total, static_cast<int64_t>(n));
}

void disown_memory(size_t n) {
  pool().disown(n);
  add(stats.allocated, -static_cast<int64_t>(n));
  add(stats.live, -1);
  add(stats.frees, 1);
  add(stats.freed, static_cast<int64_t>(n));
}

void lend_memory(int64_t n) {
  add(stats.allocated, -n);  // no new peak when it comes back: that is only to be freed
  add(stats.lent, n);
  pool().exempt(n);
}

size_t empty_cache() {
  bins().flush();
  return pool().trim();
}

void set_pressure_hook(std::function<bool()> hook) { pressure_hook = std::move(hook); }

bool relieve_pressure() { return pressure_hook && pressure_hook(); }

void install_allocator() {
  static Allocator allocator;
  c10::SetCPUAllocator(&allocator, /*priority=*/100);
}

}  // namespace dtorch::worker

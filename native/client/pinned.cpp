// See pinned.h. One sparse memfd, far larger than memory, mapped once; addresses cost nothing and descriptors do, so the
// segment is never given back, only its pages. Blocks are powers of two, each cut from the end of what is used and kept in
// the list of its size when it is freed: the next batch of a DataLoader takes the last one's, pages and all. What is
// kept beyond kKept bytes gives its pages back at once.
#include "client/pinned.h"

#include <fcntl.h>
#include <pthread.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <cerrno>
#include <cstring>
#include <memory>
#include <mutex>
#include <vector>

#include "client/python_error.h"
#include "common/machine.h"

namespace dtorch {

namespace {

constexpr size_t kLeast = 64, kPage = 4096;
constexpr size_t kKept = size_t{256} << 20;
constexpr size_t kAsk = size_t{32} << 20;  // smaller requests do not ask the machine what it has

// The segment of one process; never freed, for tensors of any age lie in it.
struct Arena {
  int fd = -1;
  char* base = nullptr;
  size_t size = 0;
  std::atomic<size_t> top{0};            // bytes cut off so far
  std::vector<size_t> free[64];          // offsets of free blocks, by the logarithm of their size
  std::vector<size_t> dry[64];           // the same, whose pages were given back
  Arena* parent = nullptr;               // of the process that this one was forked from

  bool contains(const void* p) const { return p >= base && p < base + top.load(std::memory_order_acquire); }
};

struct Block {
  Arena* arena;
  size_t offset, requested;
  int order;
};

std::mutex mu;  // guards `stats` and every arena's lists
std::atomic<Arena*> arena{nullptr};
std::atomic<bool> inherited{false};  // `arena` is the parent's
at::HostStats stats;
size_t kept = 0;

// Called with `mu` held.
Arena* make_arena(Arena* parent) {
  auto a = std::make_unique<Arena>();
  a->parent = parent;
  a->fd = memfd_create("dtorch-pinned", MFD_CLOEXEC);
  TORCH_CHECK(a->fd >= 0, "dtorch: memfd_create for pinned memory failed: ", std::strerror(errno));
  for (a->size = std::bit_ceil(8 * machine_memory());; a->size /= 2) {
    if (ftruncate(a->fd, static_cast<off_t>(a->size)) == 0) {
      void* p = mmap(nullptr, a->size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, a->fd, 0);
      if (p != MAP_FAILED) {
        a->base = static_cast<char*>(p);
        break;
      }
    }
    if (a->size <= kAsk) {
      int e = errno;
      close(a->fd);
      TORCH_CHECK(false, "dtorch: pinned memory could not be mapped: ", std::strerror(e));
    }
  }
  madvise(a->base, a->size, MADV_HUGEPAGE);  // where unsupported, nothing is lost
  static const int registered = pthread_atfork([] { mu.lock(); }, [] { mu.unlock(); },
                                               [] {
                                                 inherited = true;  // PIN-2
                                                 mu.unlock();
                                               });
  (void)registered;
  return a.release();
}

// Called with `mu` held.
Arena& own_arena() {
  if (!arena.load() || inherited.load()) {
    arena.store(make_arena(arena.load()), std::memory_order_release);
    inherited = false;
    kept = 0;
    stats = {};
  }
  return *arena.load();
}

// Called with `mu` held: the pages of a free block go back; it stays in its place.
void give_back(Arena& a, size_t offset, int order) {
  size_t n = size_t{1} << order;
  if (n < kPage) return;
  fallocate(a.fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, static_cast<off_t>(offset), static_cast<off_t>(n));
  ++stats.num_host_free;
}

// Called with `mu` held.
void give_back_kept() {
  Arena* a = arena.load();
  if (!a || inherited.load()) return;
  for (int order = std::countr_zero(kPage); order < 64; ++order) {
    for (size_t offset : a->free[order]) {
      give_back(*a, offset, order);
      stats.allocated_bytes.decrease(size_t{1} << order);
      stats.allocations.decrease(1);
      kept -= size_t{1} << order;
    }
    a->dry[order].insert(a->dry[order].end(), a->free[order].begin(), a->free[order].end());
    a->free[order].clear();
  }
}

void freed(void* p) {
  std::unique_ptr<Block> block(static_cast<Block*>(p));
  std::lock_guard lock(mu);
  Arena& a = *block->arena;
  if (&a != arena.load() || inherited.load()) return;  // PIN-2
  size_t n = size_t{1} << block->order;
  stats.active_bytes.decrease(n);
  stats.active_requests.decrease(1);
  if (kept + n <= kKept || n < kPage) {
    a.free[block->order].push_back(block->offset);
    kept += n;
    return;
  }
  give_back(a, block->offset, block->order);
  a.dry[block->order].push_back(block->offset);
  stats.allocated_bytes.decrease(n);
  stats.allocations.decrease(1);
}

size_t take(std::vector<size_t>& list) {
  size_t offset = list.back();
  list.pop_back();
  return offset;
}

struct Allocator final : at::HostAllocator {
  c10::DataPtr allocate(size_t n) override {
    const c10::Device cpu(c10::DeviceType::CPU);
    if (n == 0) return {nullptr, nullptr, &c10::detail::deleteNothing, cpu};
    std::unique_lock lock(mu);
    Arena& a = own_arena();
    size_t size = std::bit_ceil(std::max(n, kLeast));
    int order = std::countr_zero(size);
    size_t offset;
    if (!a.free[order].empty()) {
      offset = take(a.free[order]);
      kept -= size;
    } else {
      size_t available = n >= kAsk ? available_memory() : n;
      if (n > available) {
        give_back_kept();
        available = available_memory();
      }
      if (n > available || size > a.size) {
        lock.unlock();  // raising runs Python
        throw_too_large(n, available);
      }
      if (!a.dry[order].empty()) {
        offset = take(a.dry[order]);
      } else {
        offset = (a.top.load() + std::min(size, kPage) - 1) / std::min(size, kPage) * std::min(size, kPage);
        if (offset + size > a.size) {
          lock.unlock();
          throw_too_large(n, a.size - offset);
        }
        a.top.store(offset + size, std::memory_order_release);
      }
      ++stats.num_host_alloc;
      stats.allocated_bytes.increase(size);
      stats.allocations.increase(1);
    }
    stats.active_bytes.increase(size);
    stats.active_requests.increase(1);
    return {a.base + offset, new Block{&a, offset, n, order}, &freed, cpu};
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* dst, const void* src, size_t n) const override { std::memcpy(dst, src, n); }

  // PIN-1 holds without help.
  bool record_event(void*, void*, c10::Stream) override { return true; }
  void empty_cache() override {
    std::lock_guard lock(mu);
    give_back_kept();
  }
  at::HostStats get_stats() override {
    std::lock_guard lock(mu);
    return stats;
  }
  void reset_accumulated_stats() override {
    std::lock_guard lock(mu);
    for (auto* s : all()) s->reset_accumulated();
    stats.num_host_alloc = stats.num_host_free = 0;
  }
  void reset_peak_stats() override {
    std::lock_guard lock(mu);
    for (auto* s : all()) s->reset_peak();
  }

 private:
  static std::array<c10::CachingAllocator::Stat*, 4> all() {
    return {&stats.active_requests, &stats.active_bytes, &stats.allocations, &stats.allocated_bytes};
  }
};

}  // namespace

at::HostAllocator* pinned_allocator() {
  static Allocator& a = *new Allocator;
  return &a;
}

std::optional<std::pair<int, size_t>> pinned_part(const void* p) {
  for (Arena* a = arena.load(std::memory_order_acquire); a; a = a->parent)
    if (a->contains(p)) return std::pair(a->fd, static_cast<size_t>(static_cast<const char*>(p) - a->base));
  return {};
}

}  // namespace dtorch

// See staging.h.
#include "worker/staging.h"

#include <sys/mman.h>
#include <unistd.h>

#include <bit>
#include <cstdio>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "common/segment.h"
#include "worker/device_python.h"

namespace dtorch::worker {

namespace {

constexpr size_t kLeast = 64 << 10, kLarge = 64 << 20, kMostKept = size_t{1} << 30;

// Few sizes, so that buffers fit again.
size_t rounded(size_t n) {
  if (n <= kLarge) return std::bit_ceil(std::max(n, kLeast));
  return (n + kLarge - 1) / kLarge * kLarge;
}

struct Staged {
  explicit Staged(size_t n) : size(n), fd(memfd_create("dtorch-staging", MFD_CLOEXEC)) {
    if (fd < 0 || ftruncate(fd, static_cast<off_t>(size)) != 0) fail("no shared memory for a copy");
    data = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (data == MAP_FAILED) fail("shared memory for a copy cannot be mapped");
    try {
      page_lock(data, size);
      locked = true;
    } catch (const std::exception& e) {  // copies wait for each other then
      static const bool said = std::fprintf(stderr, "dtorch: %s; copies to and from the GPU will be slow\n", e.what()) > 0;
      (void)said;
    }
  }
  Staged(const Staged&) = delete;
  Staged& operator=(const Staged&) = delete;
  ~Staged() {
    try {
      if (locked) page_unlock(data);
    } catch (const std::exception&) {  // the device is lost, and so is the lock
    }
    munmap(data, size);
    close(fd);
  }
  [[noreturn]] void fail(const char* what) {
    auto e = segment_error(what, size);
    if (fd >= 0) close(fd);
    throw e;
  }

  size_t size;
  int fd;
  void* data = nullptr;
  bool locked = false;
};

struct Buffers {
  std::mutex mu;
  std::multimap<size_t, std::unique_ptr<Staged>> kept;  // by size
  size_t kept_bytes = 0, used_bytes = 0;
};
Buffers& buffers() {
  static Buffers& b = *new Buffers;  // never destroyed: storages may outlive any order of destruction
  return b;
}

void end(void* p) {
  std::unique_ptr<Staged> s(static_cast<Staged*>(p));
  auto& b = buffers();
  std::lock_guard lock(b.mu);
  b.used_bytes -= s->size;
  size_t size = s->size;
  if (b.kept_bytes + size > kMostKept) return;
  b.kept_bytes += size;
  b.kept.emplace(size, std::move(s));
}

}  // namespace

at::Tensor stage(const Geometry& g) {
  size_t n = c10::elementSize(g.dtype);
  for (int64_t d : g.sizes) n *= static_cast<size_t>(d);
  size_t size = rounded(n);
  auto& b = buffers();
  std::unique_ptr<Staged> s;
  {
    std::lock_guard lock(b.mu);
    if (auto found = b.kept.find(size); found != b.kept.end()) {
      s = std::move(found->second);
      b.kept.erase(found);
      b.kept_bytes -= size;
    }
    b.used_bytes += size;
  }
  try {
    if (!s) s = std::make_unique<Staged>(size);
  } catch (...) {
    std::lock_guard lock(b.mu);
    b.used_bytes -= size;
    throw;
  }
  void* data = s->data;
  return adopt({data, s.release(), &end, c10::Device(c10::DeviceType::CPU)}, n, g);
}

bool staged_part(const c10::DataPtr& owner, const void* data, int* fd, size_t* offset) {
  if (owner.get_deleter() != &end) return false;
  const auto* s = static_cast<const Staged*>(owner.get_context());
  *fd = s->fd;
  *offset = static_cast<size_t>(static_cast<const char*>(data) - static_cast<const char*>(s->data));
  return true;
}

size_t staged_bytes() {
  auto& b = buffers();
  std::lock_guard lock(b.mu);
  return b.used_bytes + b.kept_bytes;
}

void drop_staging() {
  auto& b = buffers();
  decltype(b.kept) dropped;  // without the lock: unlocking asks Python, whose lock another thread may hold that is in end()
  std::lock_guard lock(b.mu);
  dropped.swap(b.kept);
  b.kept_bytes = 0;
}

}  // namespace dtorch::worker

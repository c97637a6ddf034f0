// See pool.h.
#include "worker/pool.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <new>
#include <stdexcept>
#include <string>
#include <system_error>

#include "common/machine.h"

namespace dtorch::worker {

namespace {

constexpr size_t kHeader = Pool::kAlign;
// Every so many bytes of new reservations the machine is asked whether it has the memory: touching pages that do not exist
// ends the process, and nothing can be said about it afterwards.
constexpr size_t kAsk = size_t{32} << 20;

size_t rounded(size_t n, size_t to) { return (n + to - 1) / to * to; }

}  // namespace

Pool::Pool() {
  fd_ = memfd_create("dtorch-pool", MFD_CLOEXEC);
  if (fd_ < 0) throw std::system_error(errno, std::generic_category(), "memfd_create for the worker's memory");
  // Twice what could ever be used, so that fragmentation of addresses never matters; less where addresses are limited.
  size_ = rounded(2 * machine_memory(), kGranule);
  for (;; size_ = rounded(size_ / 2, kGranule)) {
    if (ftruncate(fd_, static_cast<off_t>(size_)) == 0) {
      void* p = mmap(nullptr, size_, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd_, 0);
      if (p != MAP_FAILED) {
        base_ = static_cast<char*>(p);
        break;
      }
    }
    if (size_ <= kGranule) throw std::system_error(errno, std::generic_category(), "mapping the worker's memory");
  }
  madvise(base_, size_, MADV_HUGEPAGE);  // a page fault per 2 MiB instead of 512; where unsupported, nothing is lost
  limit_ = machine_memory();
  touched_.resize(size_ / kGranule);
  touched_[0] = true;  // the first header
  reserved_ = peak_reserved_ = kGranule;
  new (base_) Header{size_, 0, 0, false};
  free_.emplace(size_, base_);
}

// Called with mu_ held: makes [begin, end) count as reserved, or false.
bool Pool::reserve(char* begin, char* end) {
  size_t first = offset_of(begin) / kGranule, last = (offset_of(end) - 1) / kGranule;
  size_t fresh = 0;
  for (size_t i = first; i <= last; ++i) fresh += !touched_[i];
  if (fresh == 0) return true;
  if (!grow(fresh * kGranule)) return false;
  for (size_t i = first; i <= last; ++i) touched_[i] = true;
  return true;
}

// Called with mu_ held.
bool Pool::within_limit(size_t bytes) const {
  size_t used = reserved_ - std::min(reserved_, static_cast<size_t>(exempt_));
  return bytes <= limit_ && used <= limit_ - bytes;
}

void Pool::exempt(int64_t bytes) {
  std::lock_guard lock(mu_);
  exempt_ += bytes;
}

// Called with mu_ held.
bool Pool::grow(size_t bytes) {
  if (!within_limit(bytes)) return false;
  unasked_ += bytes;
  if (unasked_ >= kAsk) {
    if (bytes > available_memory()) return false;
    unasked_ = 0;
  }
  reserved_ += bytes;
  peak_reserved_ = std::max(peak_reserved_, reserved_);
  return true;
}

bool Pool::adopt(size_t n) {
  std::lock_guard lock(mu_);
  if (!within_limit(n)) return false;  // the machine is not asked: its pages exist already
  reserved_ += n;
  peak_reserved_ = std::max(peak_reserved_, reserved_);
  return true;
}

void Pool::disown(size_t n) {
  std::lock_guard lock(mu_);
  reserved_ -= n;
}

void* Pool::allocate(size_t n) {
  if (n > size_) return nullptr;
  size_t need = kHeader + rounded(n, kAlign);
  std::lock_guard lock(mu_);
  auto it = free_.lower_bound({need, nullptr});
  if (it == free_.end()) return nullptr;
  auto [size, block] = *it;
  bool split = size - need >= kHeader + kAlign;
  // The header of what remains is written too.
  char* written = block + need + (split ? kHeader : 0);
  if (!reserve(block, written)) return nullptr;
  free_.erase(it);
  auto* h = header(block);
  if (split) {
    h->size = need;
    char* rest = next(block);
    new (rest) Header{size - need, need, 0, false};
    if (char* after = next(rest); after < base_ + size_) header(after)->previous = size - need;
    free_.emplace(size - need, rest);
  }
  h->requested = n;
  h->used = true;
  return block + kHeader;
}

void Pool::free(void* data) {
  char* block = static_cast<char*>(data) - kHeader;
  std::lock_guard lock(mu_);
  auto* h = header(block);
  h->used = false;
  if (char* after = next(block); after < base_ + size_ && !header(after)->used) {
    free_.erase({header(after)->size, after});
    h->size += header(after)->size;
  }
  if (h->previous && !header(block - h->previous)->used) {
    char* before = block - h->previous;
    free_.erase({header(before)->size, before});
    header(before)->size += h->size;
    block = before;
    h = header(before);
  }
  if (char* after = next(block); after < base_ + size_) header(after)->previous = h->size;
  free_.emplace(h->size, block);
}

size_t Pool::size_of(const void* data) {
  return reinterpret_cast<const Header*>(static_cast<const char*>(data) - kHeader)->requested;
}

void Pool::resize(void* data, size_t n) { reinterpret_cast<Header*>(static_cast<char*>(data) - kHeader)->requested = n; }

size_t Pool::trim() {
  std::lock_guard lock(mu_);
  size_t bytes = 0;
  for (auto& [size, block] : free_) {
    // Whole granules behind the header, which stays.
    size_t first = rounded(offset_of(block) + kHeader, kGranule) / kGranule, last = (offset_of(block) + size) / kGranule;
    for (size_t i = first; i < last;) {
      if (!touched_[i]) {
        ++i;
        continue;
      }
      size_t run = i;
      while (run < last && touched_[run]) touched_[run++] = false;
      fallocate(fd_, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, static_cast<off_t>(i * kGranule),
                static_cast<off_t>((run - i) * kGranule));
      bytes += (run - i) * kGranule;
      i = run;
    }
  }
  reserved_ -= bytes;
  return bytes;
}

void Pool::set_limit(size_t bytes) {
  std::lock_guard lock(mu_);
  limit_ = std::min(bytes, machine_memory());
}

void Pool::check() const {
  std::lock_guard lock(mu_);
  size_t previous = 0, free_blocks = 0;
  bool before_is_free = false;
  for (char* block = base_; block < base_ + size_; block = next(block)) {
    auto* h = header(block);
    std::string where = " at offset " + std::to_string(offset_of(block));
    if (h->size < kHeader || h->size % kAlign || offset_of(block) + h->size > size_) throw std::logic_error("bad size" + where);
    if (h->previous != previous) throw std::logic_error("bad link to the block before" + where);
    if (!h->used) {
      if (before_is_free) throw std::logic_error("two free neighbours" + where);
      if (!free_.count({h->size, block})) throw std::logic_error("a free block is not in the tree" + where);
      ++free_blocks;
    } else if (h->requested + kHeader > h->size) {
      throw std::logic_error("a block is smaller than what it was asked for" + where);
    }
    before_is_free = !h->used;
    previous = h->size;
  }
  if (free_blocks != free_.size()) throw std::logic_error("the tree holds blocks that are not free");
}

}  // namespace dtorch::worker

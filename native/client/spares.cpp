// See spares.h.
#include "client/spares.h"

#include <time.h>

#include <algorithm>
#include <cstring>

#include "common/machine.h"
#include "common/segment.h"

namespace dtorch {

namespace {

uint64_t now_ns() {
  timespec t{};
  clock_gettime(CLOCK_MONOTONIC, &t);
  return static_cast<uint64_t>(t.tv_sec) * 1000000000ull + static_cast<uint64_t>(t.tv_nsec);
}

}  // namespace

Spares& spares() {
  static Spares* s = new Spares;
  return *s;
}

Spares::Segment::~Segment() {
  if (data) munmap(data, size);
  close(fd);
}

Spares::SegmentPtr Spares::fill(const void* data, size_t n, int worker) {
  if (n < kSmallest) return std::make_shared<Segment>(make_segment("dtorch-upload", data, n), n);
  if (auto segment = take(n, worker)) {
    std::memcpy(segment->data, data, n);
    return segment;
  }
  auto segment = std::make_shared<Segment>(make_segment("dtorch-upload", data, n), n);
  keep(segment, worker);
  return segment;
}

// The smallest that fits and is not much larger, mapped.
Spares::SegmentPtr Spares::take(size_t n, int worker) {
  std::lock_guard lock(mu_);
  SegmentPtr best;
  for (auto& s : segments_)
    if (s->worker < 0 && s->size >= n && s->size <= n + n / 8 && (!best || s->size < best->size)) best = s;
  if (!best) return nullptr;
  if (!best->data) {
    void* pages = mmap(nullptr, best->size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, best->fd, 0);
    if (pages == MAP_FAILED) return nullptr;  // too many mappings: a fresh segment does
    best->data = pages;
  }
  best->worker = worker;
  ++recycled_;
  return best;
}

void Spares::keep(const SegmentPtr& segment, int worker) {
  std::lock_guard lock(mu_);
  // The oldest goes: one that is away belongs to a tensor that stays, such as a weight.
  if (segments_.size() >= kMostSegments) segments_.erase(segments_.begin());
  segment->id = next_id_++;
  segment->worker = worker;
  segments_.push_back(segment);
}

void Spares::returned(uint64_t id) {
  std::vector<SegmentPtr> dropped;  // unmapped without the lock
  std::lock_guard lock(mu_);
  auto it = std::find_if(segments_.begin(), segments_.end(), [id](auto& s) { return s->id == id; });
  if (it == segments_.end()) return;
  auto segment = *it;
  segment->worker = -1;
  segment->since = now_ns();
  segments_.erase(it);
  size_t free = segment->size;
  for (auto& s : segments_) free += s->worker < 0 ? s->size : 0;
  size_t most = free > kFewBytes ? std::min(kMostFreeBytes, available_memory() / 4) : kMostFreeBytes;
  for (auto s = segments_.begin(); free > most && s != segments_.end();) {
    if ((*s)->worker >= 0) {
      ++s;
      continue;
    }
    free -= (*s)->size;
    dropped.push_back(std::move(*s));
    s = segments_.erase(s);
  }
  if (segment->size <= most) segments_.push_back(std::move(segment));
  else dropped.push_back(std::move(segment));
}

void Spares::worker_died(int worker) {
  std::lock_guard lock(mu_);
  std::erase_if(segments_, [worker](auto& s) { return s->worker == worker; });
}

void Spares::clear() {
  std::lock_guard lock(mu_);
  segments_.clear();
}

bool Spares::age() {
  std::lock_guard lock(mu_);
  uint64_t now = now_ns();
  std::erase_if(segments_, [now](auto& s) { return s->worker < 0 && now - s->since > kKeepNs; });
  return std::any_of(segments_.begin(), segments_.end(), [](auto& s) { return s->worker < 0; });
}

Spares::Stats Spares::stats() {
  std::lock_guard lock(mu_);
  Stats s{0, recycled_};
  for (auto& segment : segments_) s.bytes += segment->worker < 0 ? segment->size : 0;
  return s;
}

}  // namespace dtorch

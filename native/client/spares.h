// Segments of uploads that come back, so that the next upload of that size is one memcpy into memory that exists.
//
// A fresh segment costs more than the copy into it: the operating system has to find and account for every page. A loop
// that uploads a batch a step, and drops it, therefore sends the same few segments to and fro. The worker that has
// adopted one (SHM-2) says RETURNED when its tensor is gone; until then the client does not touch the segment, and after
// that nobody else has it.
//
// SPA-1  A segment is written only while it is here: new, or returned.
// SPA-2  At most kMostFreeBytes lie here unused, above kFewBytes at most a quarter of what the machine has available, and none
//        for longer than kKeepNs.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

namespace dtorch {

class Spares {
 public:
  static constexpr size_t kSmallest = size_t{256} << 10;  // below, a fresh segment costs little
  static constexpr size_t kMostFreeBytes = size_t{1} << 30, kFewBytes = size_t{64} << 20;
  static constexpr size_t kMostSegments = 64;
  static constexpr uint64_t kKeepNs = 2'000'000'000;

  struct Segment {
    Segment(int fd_, size_t size_) : fd(fd_), size(size_) {}
    Segment(const Segment&) = delete;
    Segment& operator=(const Segment&) = delete;
    ~Segment();
    const int fd;
    const size_t size;
    uint64_t id = 0;       // 0: it will not come back
    void* data = nullptr;  // mapped when it is used again
    int worker = -1;       // that has it; -1: it is here
    uint64_t since = 0;    // CLOCK_MONOTONIC of its return
  };
  using SegmentPtr = std::shared_ptr<Segment>;

  // A segment that holds a copy of n bytes from its beginning on, for that worker. Who sends it keeps the pointer until
  // the worker has executed the record. Throws when there is no memory.
  SegmentPtr fill(const void* data, size_t n, int worker);
  void returned(uint64_t id);
  void worker_died(int worker);
  void clear();  // drops all that is here
  // Drops what has not been used for long; whether something is left that will have to go.
  bool age();

  struct Stats {
    size_t bytes;       // that lie here unused
    uint64_t recycled;  // uploads that took a returned segment
  };
  Stats stats();

  void lock() { mu_.lock(); }  // around fork()
  void unlock() { mu_.unlock(); }

 private:
  SegmentPtr take(size_t n, int worker);
  void keep(const SegmentPtr& segment, int worker);

  std::mutex mu_;
  std::vector<SegmentPtr> segments_;  // here or away, oldest first; guarded by mu_, as their last three fields are
  uint64_t next_id_ = 1, recycled_ = 0;
};

Spares& spares();

}  // namespace dtorch

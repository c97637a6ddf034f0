// The CPU worker's memory: one sparse shared segment, from which every tensor is cut.
//
// The segment (a memfd) is as large as addresses allow and costs nothing until its pages are touched. Since all memory
// lies in one segment, any tensor can be lent to another process as a part of it (SHM-2), and freed neighbours always
// grow together: what is free is one range between two used blocks, whatever the sizes were.
//
// A block is a header of 64 bytes and the data behind it. Headers link a block to its neighbours (boundary tags); free
// blocks stand in a tree ordered by size, then by address, and the smallest that is large enough is split.
// Pages are accounted for in granules of kGranule, the size of a huge page: `reserved` counts the granules that a block
// has ever lain in and that were not given back since, and the segments of others that the worker has adopted.
//
// POOL-1  Blocks tile the segment: no gap, no overlap; two free blocks are never neighbours.
// POOL-2  reserved(), less what is exempt, is at most limit() (as long as that is not lowered below it), and the operating system holds at most
//         reserved() bytes for the worker's tensors.
#pragma once

#include <cstddef>
#include <cstdint>
#include <mutex>
#include <set>
#include <utility>
#include <vector>

namespace dtorch::worker {

class Pool {
 public:
  static constexpr size_t kAlign = 64;
  static constexpr size_t kGranule = size_t{2} << 20;

  // Makes the segment; throws std::system_error when the machine refuses. It lives as long as the process.
  Pool();

  // n bytes aligned to kAlign, or null when `limit` or the machine's memory does not allow it. Uninitialised.
  void* allocate(size_t n);
  void free(void* data);
  // The n it was made with; and another n for the same block, which differs by less than kAlign.
  static size_t size_of(const void* data);
  static void resize(void* data, size_t n);

  // So many bytes (negative: fewer) of the reserved ones are not held against the limit.
  void exempt(int64_t bytes);

  // A segment of n bytes that somebody else made becomes the worker's, or goes; false when the limit does not allow it.
  bool adopt(size_t n);
  void disown(size_t n);

  // Gives the pages of free blocks back to the operating system; the number of bytes.
  size_t trim();

  void set_limit(size_t bytes);
  size_t limit() const { return limit_; }
  size_t reserved() const { return reserved_; }
  size_t peak_reserved() const { return peak_reserved_; }
  void reset_peak() { peak_reserved_ = reserved_; }

  int fd() const { return fd_; }
  bool contains(const void* p) const { return p >= base_ && p < base_ + size_; }
  size_t offset_of(const void* p) const { return static_cast<size_t>(static_cast<const char*>(p) - base_); }

  // Checks POOL-1; throws std::logic_error that says what is wrong. For tests.
  void check() const;

 private:
  struct Header {
    size_t size;       // of the block, header included
    size_t previous;   // size of the block before it; 0 for the first
    size_t requested;  // bytes asked for; meaningless while free
    bool used;
  };
  using Free = std::set<std::pair<size_t, char*>>;

  static Header* header(char* block) { return reinterpret_cast<Header*>(block); }
  char* next(char* block) const { return block + header(block)->size; }  // base_ + size_ after the last
  bool reserve(char* begin, char* end);
  bool grow(size_t bytes);
  bool within_limit(size_t bytes) const;

  int fd_ = -1;
  char* base_ = nullptr;
  size_t size_ = 0;
  mutable std::mutex mu_;  // guards all below; operators' own threads allocate too
  Free free_;
  std::vector<bool> touched_;  // per granule
  int64_t exempt_ = 0;
  size_t limit_ = 0, reserved_ = 0, peak_reserved_ = 0;
  size_t unasked_ = 0;  // bytes reserved since the machine was last asked for what it has
};

}  // namespace dtorch::worker

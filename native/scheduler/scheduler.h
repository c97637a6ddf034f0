// The controller's per-record work: splitting a stream of records into one batch per worker.
//
// Contract
// - One thread at a time. split() touches no Python object and may run without the GIL; the caller keeps the stream's
//   bytes alive and unchanged until it has copied the runs out.
// - A stream is accepted whole or not at all: split() throws StreamError and leaves every counter as it was.
// - Which records exist, and how many elements each has, is told by the caller (from dtorch/protocol.py): there is no
//   second copy of that table here. Only RELEASE is known by name, because it alone is not sequenced (WIRE-1).
// - Work is linear in the number of elements; memory in the number of runs.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

namespace dtorch {

// Malformed input; the text names the byte offset.
struct StreamError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Neighbouring records of one worker, as offsets into the stream.
struct Run {
  size_t begin, end;
};

// One worker's share of a stream.
struct Part {
  uint32_t worker;
  uint64_t first_seq;          // number of the first sequenced record (WIRE-1), meaningful also when count is 0
  uint64_t count = 0;          // sequenced records
  uint64_t release_count = 0;  // RELEASE records
  size_t record_bytes = 0, release_bytes = 0;
  std::vector<Run> records{}, releases{};
};

// What has gone through for one worker since the start.
struct WorkerCounters {
  uint64_t records = 0;   // sequenced records; also the number of the last one queued
  uint64_t releases = 0;
  uint64_t bytes = 0;
  uint64_t executed = 0;  // last number the worker reported (PROGRESS)
};

class Scheduler {
 public:
  static constexpr size_t kKinds = 128;  // a record's kind is a one-byte msgpack integer
  // lengths[kind]: elements of a record of that kind, kind and worker included; 0: no such record.
  using Lengths = std::array<uint32_t, kKinds>;

  Scheduler(size_t workers, const Lengths& lengths) : lengths_(lengths), counters_(workers) {}

  // Parts in the order in which their workers first appear. The offsets refer to `data`.
  std::vector<Part> split(const uint8_t* data, size_t size);

  // A worker has executed all up to `seq`. Throws std::invalid_argument when that cannot be.
  void executed(size_t worker, uint64_t seq);

  const std::vector<WorkerCounters>& counters() const { return counters_; }
  uint64_t streams() const { return streams_; }  // accepted so far: the number of the last one

 private:
  Lengths lengths_;
  std::vector<WorkerCounters> counters_;
  uint64_t streams_ = 0;
};

}  // namespace dtorch

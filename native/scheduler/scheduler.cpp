// Design notes: a stream is walked once. Of each record only the array header, the kind and the worker are decoded
// (and, of a RELEASE, its two integers); the rest is skipped without looking into it, which checks the bounds all the
// same. Nothing is copied while walking: neighbouring records of one worker and class (sequenced, or RELEASE) join into
// a run, and the binding copies runs into the objects it hands out.
//
// Counters are changed only after the last byte was accepted, so that a malformed stream changes nothing.
#include "scheduler/scheduler.h"

#include "common/msgpack.h"
#include "common/protocol.h"

namespace dtorch {
namespace {

constexpr uint32_t kNoPart = ~uint32_t{0};

void extend(std::vector<Run>& runs, size_t begin, size_t end) {
  if (!runs.empty() && runs.back().end == begin) runs.back().end = end;
  else runs.push_back({begin, end});
}

[[noreturn]] void refuse(size_t at, size_t record, const std::string& why) {
  throw StreamError("record stream: byte " + std::to_string(at) + ": " + why + " (in the record that starts at byte " +
                    std::to_string(record) + ")");
}

}  // namespace

std::vector<Part> Scheduler::split(const uint8_t* data, size_t size) {
  std::vector<Part> parts;
  std::vector<uint32_t> part_of(counters_.size(), kNoPart);
  mp::Reader reader(data, size);
  size_t begin = 0;  // of the record at hand
  auto here = [&] { return static_cast<size_t>(reader.pos() - data); };
  try {
    while (!reader.done()) {
      begin = here();
      size_t length = reader.array();
      if (length < 2) refuse(begin, begin, "a record of " + std::to_string(length) + " elements has no kind and worker");

      size_t at = here();
      int64_t kind = reader.integer();
      if (kind < 0 || kind >= static_cast<int64_t>(kKinds) || lengths_[static_cast<size_t>(kind)] == 0)
        refuse(at, begin, "there is no record of kind " + std::to_string(kind));
      if (length != lengths_[static_cast<size_t>(kind)])
        refuse(begin, begin, "a record of kind " + std::to_string(kind) + " has " +
               std::to_string(lengths_[static_cast<size_t>(kind)]) + " elements, not " + std::to_string(length));

      at = here();
      int64_t worker = reader.integer();
      if (worker < 0 || worker >= static_cast<int64_t>(counters_.size()))
        refuse(at, begin, "there is no worker " + std::to_string(worker) + " among " + std::to_string(counters_.size()));

      uint32_t& index = part_of[static_cast<size_t>(worker)];
      if (index == kNoPart) {
        index = static_cast<uint32_t>(parts.size());
        parts.push_back({static_cast<uint32_t>(worker), counters_[static_cast<size_t>(worker)].records + 1});
      }
      Part& part = parts[index];

      if (kind == static_cast<int64_t>(Record::RELEASE)) {
        reader.integer();  // the storage's id
        at = here();
        uint64_t last = reader.uint();
        uint64_t sent = part.first_seq - 1 + part.count;
        // A release that waits for a record never sent would keep its storage for ever (WIRE-2).
        if (last > sent)
          refuse(at, begin, "a RELEASE waits for record " + std::to_string(last) + " of worker " +
                 std::to_string(worker) + ", which has had " + std::to_string(sent));
        ++part.release_count;
        part.release_bytes += here() - begin;
        extend(part.releases, begin, here());
      } else {
        for (size_t i = 2; i < length; ++i) reader.skip();
        ++part.count;
        part.record_bytes += here() - begin;
        extend(part.records, begin, here());
      }
    }
  } catch (const mp::FormatError& error) {
    refuse(here(), begin, error.what());
  }
  ++streams_;
  for (const Part& part : parts) {
    WorkerCounters& c = counters_[part.worker];
    c.records += part.count;
    c.releases += part.release_count;
    c.bytes += part.record_bytes + part.release_bytes;
  }
  return parts;
}

void Scheduler::executed(size_t worker, uint64_t seq) {
  if (worker >= counters_.size())
    throw std::invalid_argument("there is no worker " + std::to_string(worker) + " among " + std::to_string(counters_.size()));
  WorkerCounters& c = counters_[worker];
  if (seq < c.executed || seq > c.records)
    throw std::invalid_argument("worker " + std::to_string(worker) + " says it executed record " + std::to_string(seq) +
                                ", but it had reached " + std::to_string(c.executed) + " of " + std::to_string(c.records));
  c.executed = seq;
}

}  // namespace dtorch

// What the client notes while dtorch.profile() records (common/trace.h): every record written, every wait, every batch sent.
//
// Any thread may add; a lock of its own guards the log, which may be taken while the session's is held, not the other way.
// A child made by fork records nothing.
#pragma once

#include <atomic>
#include <string>
#include <vector>

#include "common/trace.h"

namespace dtorch::trace {

extern std::atomic<bool> recording;
inline bool on() { return __builtin_expect(recording.load(std::memory_order_relaxed), 0); }  // TRACE-1

// The present time while recording, else 0: the `start` for add(), which takes 0 for "nobody asked".
inline uint64_t clock() { return on() ? now_ns() : 0; }

void start(uint64_t limit);
void stop();

// Adds an event of the calling thread that began at `event.start` and ends now.
void add(TraceEvent event);
inline void add(Trace kind, uint64_t start, uint64_t number, uint64_t bytes = 0, uint32_t detail = 0) {
  add({start, 0, number, 0, bytes, 0, 0, detail, -1, static_cast<uint8_t>(kind), 0});
}

// The calling thread wrote a record: it began when the thread's event before ended, for all that lies between was the
// program's own Python and the issuing of this operator.
void record(Record kind, int worker, uint64_t seq, size_t bytes, uint32_t op, uint32_t site);

// A named part of the program begins or ends on this thread.
void begin(std::string_view name);
void end();

struct Taken {
  std::vector<TraceEvent> events;
  uint64_t dropped;
  std::vector<std::string> texts;  // with the last, empty events
  std::vector<int> threads;        // the same: thread n's number in the operating system stands at n - 1
};
Taken take();

}  // namespace dtorch::trace

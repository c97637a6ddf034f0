// See trace.h. Design notes: a thread's processor time costs twenty looks at the clock, so it is read only where it can tell
// something: when a thread has written nothing for kGapNs. Then the time since it was read last, less the short gaps since
// (which count as busy), is what the thread worked in the gap; the rest of it, it slept. So an asyncio loop that waits for a
// value shows as idle, and Python at work as work.
//
// USER_SCOPE callbacks see every torch.profiler.record_function, the optimizers' own among them.
#include "client/trace.h"

#include <ATen/record_function.h>
#include <pthread.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <mutex>

#include "client/session.h"

namespace dtorch::trace {

std::atomic<bool> recording{false};

namespace {

constexpr uint64_t kGapNs = 100'000;

std::mutex mu;
TraceLog log;               // guarded by mu
std::vector<int> threads;   // the same
uint64_t generation = 0;    // the same; of the recording
at::CallbackHandle spans{at::INVALID_CALLBACK_HANDLE};

struct Thread {
  uint64_t generation = 0;
  uint16_t number = 0;
  uint64_t last = 0;      // when its last event ended
  uint64_t cpu = 0;       // its processor time when that was read last
  uint64_t since = 0;     // what counts as busy since then
};
Thread& self() {
  static thread_local Thread t;
  return t;
}

uint64_t cpu_ns() {
  timespec t;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
  return static_cast<uint64_t>(t.tv_sec) * 1'000'000'000 + static_cast<uint64_t>(t.tv_nsec);
}

// With mu held. Gives the thread its number at its first event.
Thread& known(uint64_t now) {
  Thread& t = self();
  if (t.generation == generation) return t;
  threads.push_back(static_cast<int>(syscall(SYS_gettid)));
  t = {generation, static_cast<uint16_t>(std::min<size_t>(threads.size(), 0xffff)), now, cpu_ns(), 0};
  return t;
}

// The busy part of the time from the thread's last event until `now`.
uint64_t busy(Thread& t, uint64_t now) {
  uint64_t gap = now - t.last;
  if (gap < kGapNs) {
    t.since += gap;
    return gap;
  }
  uint64_t cpu = cpu_ns(), used = cpu - t.cpu;
  t.cpu = cpu;
  uint64_t in_gap = used > t.since ? used - t.since : 0;
  t.since = 0;
  return std::min(in_gap, gap);
}

void forked() {
  recording = false;
  mu.unlock();
}

}  // namespace

void start(uint64_t limit) {
  static const int at_fork = pthread_atfork([] { mu.lock(); }, [] { mu.unlock(); }, forked);
  (void)at_fork;
  {
    std::lock_guard lock(mu);
    log.start(limit);
    threads.clear();
    ++generation;
    known(now_ns());  // this thread's time line begins here, not at its first event
  }
  recording = true;
  spans = at::addGlobalCallback(at::RecordFunctionCallback(
                                    [](const at::RecordFunction& f) -> std::unique_ptr<at::ObserverContext> {
                                      begin(f.name());
                                      return nullptr;
                                    },
                                    [](const at::RecordFunction&, at::ObserverContext*) { end(); })
                                    .scopes({at::RecordScope::USER_SCOPE}));
}

void stop() {
  end();  // gives what this thread did last its time
  recording = false;
  if (spans != at::INVALID_CALLBACK_HANDLE) at::removeCallback(std::exchange(spans, at::INVALID_CALLBACK_HANDLE));
  std::lock_guard lock(mu);
  log.stop();
}

void add(TraceEvent event) {
  event.end = now_ns();
  std::lock_guard lock(mu);
  if (!log.on()) return;
  auto kind = static_cast<Trace>(event.kind);
  if (kind != Trace::REQUEST && kind != Trace::SENT) {  // the session's, whichever thread it is
    Thread& t = known(event.start);
    event.thread = t.number;
    if (kind != Trace::INFER) {  // a part of the issuing of an operator, whose record ends the gap
      event.link = event.start > t.last ? busy(t, event.start) : 0;
      t.last = event.end;
    }
  }
  log.add(event);
}

void record(Record kind, int worker, uint64_t seq, size_t bytes, uint32_t op, uint32_t site) {
  uint64_t now = now_ns();
  std::lock_guard lock(mu);
  if (!log.on()) return;
  Thread& t = known(now);
  uint64_t start = t.last;
  log.add({start, now, seq, busy(t, now), bytes, op, site, 0, static_cast<int8_t>(worker), static_cast<uint8_t>(kind), t.number});
  t.last = now;
}

void begin(std::string_view name) {
  if (!on()) return;
  uint32_t text;
  {
    std::lock_guard lock(mu);
    text = log.text(name);
  }
  add({now_ns(), 0, 0, 0, 0, text, 0, 0, -1, static_cast<uint8_t>(Trace::SPAN_BEGIN), 0});
}

void end() {
  if (on()) add(Trace::SPAN_END, now_ns(), 0);
}

Taken take() {
  std::lock_guard lock(mu);
  Taken out{log.take(), log.dropped(), {}, {}};
  if (!out.events.empty()) return out;
  out.texts = log.texts();
  out.threads = std::exchange(threads, {});
  log.clear();
  return out;
}

}  // namespace dtorch::trace

// The client's end of the wire: the record buffer, its flushing, backpressure, and the requests that await an answer.
//
// Every operator appends one record to a buffer under one mutex. The buffer is sent when it is full, when a value is
// asked for, or when the client has been quiet (flusher thread). The buffer's bytes are sent from whichever thread
// fills it: the PUSH socket moves between threads only under that mutex, which is the fence ZeroMQ asks for.
//
// SES-1  No Python lock is taken while `mu_` is held, and nobody waits while holding it: a tensor's deleter runs with the
//        GIL and takes `mu_`.
// SES-2  A record's sequence number is its position among its worker's records (WIRE-1); `last_seq` of every storage it
//        names is set in the same critical section.
// SES-3  A request is answered exactly once: by a reply, by its worker's death or by the session's end. Replies are
//        taken in by whoever waits for that worker, or by the reply thread (direct.h).
// SES-4  The client runs ahead by at most `inflight_bytes` of records and `upload_bytes` of values; beyond, it waits.
#pragma once

#include <pthread.h>
#include <time.h>

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include "client/direct.h"
#include "client/lock.h"
#include "client/trace.h"
#include "common/msgpack.h"
#include "common/protocol.h"
#include "common/segment.h"
#include "common/zmq_api.h"

namespace dtorch {

struct StorageCtx;

// Thread-local variables of the hot path: at a fixed offset, without a call to find them. They must be small and plain.
#define DTORCH_TLS static thread_local __attribute__((tls_model("initial-exec")))

constexpr size_t kMaxUploads = 256;  // under way at a time: each holds a descriptor

struct IdBlock {
  uint64_t next = 0, end = 0;
};
constexpr uint64_t kIdBlock = 256;

// A value that stands in a worker's memory and is mapped here; the end of it gives the memory back (SHM-2).
struct Loan {
  Mapping map;
  uint64_t token = 0;
  uint32_t generation = 0;
  int worker = 0;

  Loan() = default;
  Loan(const Loan&) = delete;
  Loan& operator=(const Loan&) = delete;
  ~Loan();
};

// A question to a worker and, once it came, the answer. Shared by the asker and the reply thread.
struct Request {
  enum class State : uint8_t { Pending, Done, Failed };

  uint64_t id = 0;
  int worker = 0;
  uint32_t site = 0;
  uint64_t seq = 0;    // of its record; guarded by Session::mu_
  Record kind = Record::SYNC;  // the same
  uint32_t op = 0;     // of an ASK the operator
  uint64_t asked = 0;  // when it was made, if somebody traces
  std::atomic<State> state{State::Pending};
  std::string reply;   // the reply's first frame (VALUE, META, DONE, ERROR) or, when Failed by death, empty
  std::string failure; // why, when Failed without a reply
  std::unique_ptr<Loan> loan;  // a VALUE that came as a segment, mapped by the reply thread
  std::vector<int> wake_fds;  // eventfds of the threads that wait; guarded by Session::mu_
  bool callback = false;  // Python wants to hear of it; guarded by Session::mu_
};
using RequestPtr = std::shared_ptr<Request>;

// What stands in a reply after [kind, request, worker].
inline mp::Reader reply_body(const std::string& reply) {
  mp::Reader in(reply.data(), reply.size());
  in.array();
  in.skip(), in.skip(), in.skip();
  return in;
}

struct SessionConfig {
  zmq::Api api{};
  void* push = nullptr;
  int replies = -1;  // the socket that workers connect to (direct.h); Python's
  int workers = 0;
  bool accelerated = false;  // the workers compute on accelerators
  size_t inflight_bytes = 64u << 20;
  size_t upload_bytes = 1024u << 20;
  long flush_us = 100;
};

struct WorkerState {
  uint64_t next_seq = 1;
  uint64_t executed = 0;
  size_t unsent_bytes = 0;                          // bytes in the buffer for this worker
  std::deque<std::pair<uint64_t, size_t>> inflight; // (last seq, bytes) of each sent batch not yet executed
  struct Upload {
    uint64_t seq;
    size_t size;
    std::shared_ptr<void> kept;  // what keeps the segment open, and as it is, till then
    bool ours;                   // a segment of ours, not memory of the program's
  };
  std::deque<Upload> uploads;                       // until they are executed (SHM-2)
  std::vector<bool> knows_op;                       // by operator number
  std::string dead;                                 // why, when the worker is gone
  int default_dtype = 6, deterministic = 0;         // what it was told last (issue.cpp: tell_switches)
  bool grad_mode = false;
  uint32_t device_switches = 0;                     // the same for accelerators; 0: nothing
};

struct Counters {
  uint64_t records = 0, releases = 0, batches = 0, bytes = 0, waits = 0, upload_bytes = 0;
};

class Session {
 public:
  // The one session of the process (one engine at a time).
  static Session& get();

  void attach(const SessionConfig& config);
  void detach(const std::string& why);
  bool active() const { return active_.load(std::memory_order_acquire) && !forked_; }
  int workers() const { return config_.workers; }
  bool accelerated() const { return config_.accelerated; }
  uint32_t generation() const { return generation_.load(std::memory_order_acquire); }
  pid_t owner() const { return owner_; }

  // --- writing records -------------------------------------------------------------------------------------------
  // A Writer holds the mutex; begin() opens a sequenced record for a worker and returns its number.
  class Writer {
   public:
    explicit Writer(Session& s) : s_(s), lock_(s.mu_) {}
    Buffer& buf() { return s_.buf_; }
    // Header [kind, worker, ...] of an array of 2 + fields elements; returns the record's sequence number.
    uint64_t begin(Record kind, int worker, size_t fields) {
      mark_ = s_.buf_.size();
      mp::put_array(s_.buf_, 2 + fields);
      s_.buf_.push(static_cast<uint8_t>(kind));
      mp::put_uint(s_.buf_, static_cast<uint64_t>(worker));
      worker_ = worker;
      kind_ = kind;
      return s_.state_[static_cast<size_t>(worker)].next_seq++;
    }
    // The same for a request: its number follows as the first field.
    uint64_t begin(Record kind, const RequestPtr& r, size_t fields) {
      r->seq = begin(kind, r->worker, fields);
      r->kind = kind;
      site_ = r->site;
      mp::put_uint(s_.buf_, r->id);
      return r->seq;
    }
    void end() {
      s_.state_[static_cast<size_t>(worker_)].unsent_bytes += s_.buf_.size() - mark_;
      ++s_.counters_.records;
      if (trace::on()) trace::record(kind_, worker_, worker(worker_).next_seq - 1, s_.buf_.size() - mark_, op_, site_);
      s_.after_record();
    }
    // For the trace: the operator, and the line of the client's code.
    void about(uint32_t op, uint32_t site) { op_ = op, site_ = site; }
    WorkerState& worker(int w) { return s_.state_[static_cast<size_t>(w)]; }
    Session& session() { return s_; }

   private:
    friend class Session;
    Session& s_;
    std::unique_lock<Lock> lock_;
    size_t mark_ = 0;
    int worker_ = 0;
    Record kind_{};
    uint32_t op_ = 0, site_ = 0;
  };

  void release(uint64_t storage, int worker, uint64_t last_seq, uint32_t generation);
  void flush();
  // Sends the controller a message that is not records, after what is buffered. Throws when the session is over.
  void tell_controller(const void* frame, size_t n);

  // Throws when the session is over or the worker is dead; waits while the client is too far ahead (SES-4).
  void admit(int worker) {
    if (__builtin_expect(too_far() || trouble_.load(std::memory_order_relaxed), 0)) admit_slow(worker);
  }
  bool too_far() const {
    return inflight_.load(std::memory_order_relaxed) > config_.inflight_bytes ||
           uploading_.load(std::memory_order_relaxed) > config_.upload_bytes ||
           uploads_.load(std::memory_order_relaxed) > kMaxUploads;
  }
  void add_upload(Writer& w, int worker, WorkerState::Upload upload);

  // Ids come in blocks per thread: an atomic operation a tensor would show.
  uint64_t new_storage_id() {
    DTORCH_TLS IdBlock block;
    if (__builtin_expect(block.next == block.end, 0)) {
      block.next = next_storage_.fetch_add(kIdBlock, std::memory_order_relaxed);
      block.end = block.next + kIdBlock;
    }
    return block.next++;
  }
  uint64_t new_storage_ids(uint64_t n) { return next_storage_.fetch_add(n, std::memory_order_relaxed); }
  // Whether a worker has executed all that was issued to it; sends what lies in the buffer, so that it becomes true.
  bool idle(int worker);

  uint64_t new_transfer() { return next_transfer_.fetch_add(1, std::memory_order_relaxed); }

  // --- requests --------------------------------------------------------------------------------------------------
  RequestPtr new_request(int worker, uint32_t site);
  RequestPtr find(uint64_t id);
  // Forgets an ASK whose results nobody took, and lets go of them.
  void abandon(const RequestPtr& r);
  void forget(uint64_t id);
  // Waits without the GIL until it is answered. False when `timeout_s` >= 0 passed first. Python signals are served
  // (KeyboardInterrupt comes out as a python_error).
  bool wait(const RequestPtr& r, double timeout_s = -1);
  // True when it was answered already; else the request is reported by receive() when it is.
  bool want_callback(const RequestPtr& r);

  struct Received {
    enum class What { Fd, Message, Completed } what;
    int fd = -1;
    std::string message;
    std::vector<uint64_t> completed;
  };
  // Blocks, without the GIL, until Python has something to do; used by the reply thread alone.
  Received receive(void* pull, const std::vector<int>& fds);
  void worker_died(int worker, const std::string& why, std::vector<uint64_t>* completed);
  std::vector<uint64_t> take_completed();

  Counters counters();
  std::vector<std::pair<uint64_t, uint64_t>> progress();  // per worker: issued, executed

  // Threads inside a slow operator call right now: the client is not quiet while there are some.
  std::atomic<int> issuing{0};

 private:
  void after_record();
  void flush_locked();
  void flusher();
  void admit_slow(int worker);
  void on_progress(int worker, uint64_t seq);
  void complete(const RequestPtr& r, Request::State state);
  bool handle(const uint8_t* data, size_t n, Received* out);
  void release_results(mp::Reader& in);

  SessionConfig config_;
  pid_t owner_ = 0;
  bool forked_ = false;  // this process is a child of the owner: it has no session
  std::atomic<bool> active_{false};
  std::atomic<uint32_t> generation_{0};
  std::string ended_;  // why the last session ended; guarded by mu_

  Lock mu_;
  Buffer buf_;                      // records not yet sent
  uint32_t buffered_ = 0;           // how many
  uint64_t changes_ = 0;            // grows with every record; the flusher compares
  clockid_t issuer_clock_ = 0;      // CPU clock of the thread that wrote the last record
  int issuer_tid_ = 0;
  std::vector<WorkerState> state_;
  Counters counters_;
  std::unordered_map<uint64_t, RequestPtr> requests_;
  std::vector<uint64_t> completed_; // requests with callbacks answered since take_completed()

  std::shared_ptr<Direct> direct_;  // of this session; guarded by mu_

  std::condition_variable_any flusher_cv_, progress_cv_;
  bool flusher_idle_ = false, flusher_stop_ = false;
  std::thread flusher_thread_;

  std::atomic<size_t> inflight_{0}, uploading_{0}, uploads_{0};
  std::atomic<bool> trouble_{false};  // a worker is dead or the session is over
  std::atomic<uint64_t> next_storage_{1}, next_request_{1}, next_transfer_{1};
};

// RAII: the request is forgotten at the end of the scope, whatever ends it.
struct ForgetAtEnd {
  const RequestPtr& request;
  ~ForgetAtEnd() { Session::get().forget(request->id); }
};

// RAII: one thread is inside an operator call that takes its time (a geometry miss).
struct Issuing {
  Issuing() { Session::get().issuing.fetch_add(1, std::memory_order_relaxed); }
  ~Issuing() { Session::get().issuing.fetch_sub(1, std::memory_order_relaxed); }
};

}  // namespace dtorch

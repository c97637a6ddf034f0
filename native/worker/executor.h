// The worker's loop: takes batches of records, runs them in order, frees in time, answers.
//
// One thread does all of it. Between two operators, and at least every kDrainNs while it computes, it empties its socket,
// so that a release acts as soon as it can: memory is freed between operators anyway. A second thread for reading would
// have to hand over every record and could not free any earlier.
//
// EXE-1  Records run in the order they came, one at a time, each exactly once.
// EXE-2  A release frees its storage when the record it names has been executed: at once, or right after that record
//        (WIRE-2). A release that overtook its record waits for the batch that brings it.
// EXE-3  A failing record harms nothing but its results: they are poisoned with its cause, and so is what reads them.
// EXE-4  An operator's result takes the memory of an argument only if the argument dies with that very record and nothing
//        else stands on its storage: no view among the arguments, no loan (donation).
// EXE-5  No exception leaves the loop but for a broken connection or a malformed record, which end the process.
// EXE-6  On an accelerator no record waits for the device. What an answer needs to have been done is waited for by an event,
//        looked at between operators; a tensor that is being fetched or sent is lent meanwhile, so nothing writes it (SHM-2).
// EXE-7  An error after which the device does not work (a CUDA device assert) fails all that is under way and all that follows
//        with its cause, for other workers too; once the client has been told the process ends.
#pragma once

#include <atomic>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "common/protocol.h"
#include "common/segment.h"
#include "common/trace.h"
#include "common/zmq_api.h"
#include "worker/device.h"
#include "worker/operators.h"

namespace dtorch::worker {

// How long an operator that would raise the peak waits for a release just behind it (look_ahead).
constexpr int64_t kLookaheadNs = 200000;

class Executor {
 public:
  // `replies`: a packet socket connected to the client, which becomes ours, or -1: replies go by way of the controller.
  Executor(const zmq::Api& api, void* socket, int worker, int parent_fd, int replies);
  ~Executor();

  // 0 after EXIT, 1 when the parent is gone.
  int run();

 private:
  struct Batch {
    Batch(const zmq::Api& api) : records(api) {}
    uint64_t first_seq = 0;
    uint32_t count = 0;
    zmq::Frame records;
    size_t position = 0;              // of the next record, in bytes
    std::vector<int32_t> free_after;  // per record: head of a list in `dying_`, or -1; empty until a release needs it
  };
  struct Dying {
    uint64_t storage;
    int32_t next;
  };
  struct Loan {
    c10::Storage storage;
    bool to_peer;  // to another worker, not to the client
  };
  struct Incoming {
    std::string payload;  // encoded: bytes, a segment, or an error
  };
  // Another worker's memory that a tensor here stands on; the end of it gives the memory back (SHM-2).
  struct Borrowed {
    Executor* executor;
    Mapping map;
    uint64_t token;
    int source;
    ~Borrowed();
  };
  static void end_borrowed(void* borrowed);
  // What is to happen when an accelerator has come so far: an answer goes out, memory is needed no longer. It is given the
  // reason where the device will not come there, else null, and throws nothing.
  using Then = std::function<void(const CausePtr& lost)>;
  struct Pending {
    c10::Event reached;
    uint64_t site;  // the client's line that asked for it
    Then then;
  };
  enum Stream { Compute, Fetch };
  // An uploaded segment that is the worker's now, memory of its tensors until the storage goes.
  struct Adopted {
    Executor* executor;
    Mapping map;
    uint64_t spare;  // 0: the client does not want it back
    Adopted(Executor* executor, const Mapping& map, uint64_t spare);
    ~Adopted();
    static void end(void* p) { delete static_cast<Adopted*>(p); }
  };

  // --- the socket
  bool wait_readable();  // false: the parent is gone
  void drain();
  void receive_one(zmq::Frame& head);
  void take_batch(mp::Reader& head, std::unique_ptr<Batch> batch, zmq::Frame& releases);
  void reply(const Buffer& b) { zmq::send(api_, socket_, b.data(), b.size(), 0); }  // to the controller
  void answer(const Buffer& b);  // to the client: VALUE, META, DONE, ERROR, RETURNED

  // --- accelerators work behind (EXE-6)
  void when_done(Stream stream, uint64_t site, Then then);
  bool works_behind() const { return !pending_[Compute].empty() || !pending_[Fetch].empty(); }
  void settle();                     // does what has become due
  void lose(const CausePtr& cause);  // the device works no longer
  uint64_t waiting_since() const;    // the first line that is known to wait for the device
  void refuse(mp::Reader& in, const CausePtr& cause);  // in place of executing it: who waits for it is told
  at::Tensor to_device(const at::Tensor& host, uint64_t site);  // a copy where the worker computes; `host` is held until it was read

  // --- releases
  void release(uint64_t storage, uint64_t last_seq);
  int32_t dying_at(const Batch& batch, uint64_t seq) const;  // head of the list of what dies with a record
  bool await_releases();  // memory is short: waits a moment for some to be freed
  void attach_release(uint64_t storage, uint64_t seq);
  void free_storage(uint64_t storage);

  // --- lending (SHM-2)
  uint64_t lend(const c10::Storage& storage, bool to_peer);
  void leave_to_client(c10::StorageImpl* storage);  // no tensor here has it: if no peer does, it is the client's memory
  void give_back(uint64_t token);
  void before_write(uint64_t storage);  // what is lent is not written to: the tensor moves to other memory first
  void return_borrowed();

  // --- records
  void execute_front();
  void execute(mp::Reader& in);
  void perform(mp::Reader& in);
  void op(mp::Reader& in);
  at::Tensor find_donor(const Operator& op, mp::Reader args, uint64_t* id);
  void look_ahead(mp::Reader args);
  void ask(mp::Reader& in);
  void define_op(mp::Reader& in);
  void alloc(mp::Reader& in);
  void put(mp::Reader& in);
  void map(mp::Reader& in);
  void fetch(mp::Reader& in);
  void send_tensor(mp::Reader& in);
  void recv_tensor(mp::Reader& in);
  void seed(mp::Reader& in);
  void rng_get(mp::Reader& in);
  void rng_set(mp::Reader& in);
  void sync(mp::Reader& in);
  void resize(mp::Reader& in);
  void stats(mp::Reader& in);
  void option(mp::Reader& in);
  bool set_switch(std::string_view name, int64_t value);  // true: it is one
  void empty_all_caches();
  void tell_freed(int peer, const std::vector<std::string>& handles);
  void event(mp::Reader& in);
  void read(mp::Reader& in);
  void import(mp::Reader& in);

  // --- the trace (trace.cpp)
  void execute_traced(mp::Reader& in);
  void describe_record(mp::Reader in, TraceEvent& e);
  void note_wait(Trace kind, uint64_t start, uint64_t link, int peer);  // from `start` until now
  void put_trace(Buffer& b);

  Operator& operator_at(uint64_t number);
  // Makes the cause of the exception that is being handled.
  CausePtr cause_of(const char* kind_if_unknown, const std::string& op, const std::string& shapes, uint64_t site);
  CausePtr make_cause(const char* kind, const std::string& type, const std::string& message, const std::string& op,
                      const std::string& shapes, uint64_t site);
  void put_largest(Buffer& b);
  void answer_error(uint64_t request, const CausePtr& cause);
  void answer_done(uint64_t request);  // with nothing to say
  void payload(Buffer& b, at::Tensor t, bool to_peer);  // appends inline bytes or a lent part of shared memory
  void value(uint64_t request, const at::Tensor& t);  // answers a FETCH
  bool device_payload(Buffer& b, const at::Tensor& t, int dest);
  // Copies an accelerator's tensor to the host beside what it computes; `then` gets the copy.
  void fetch_from_device(const at::Tensor& t, uint64_t site, std::function<void(const at::Tensor&, const CausePtr& lost)> then);
  void answer_value(uint64_t request, const at::Tensor& t);  // value(), or the error of it
  void send_cause(uint64_t transfer, uint64_t dest, const CausePtr& cause);  // in place of a tensor
  static bool shared_part(const at::Tensor& t, int* fd, size_t* offset);
  void made(uint64_t storage, at::Tensor t, uint64_t site);
  void note_failure(const CausePtr& cause);
  void poison(uint64_t storage, const CausePtr& cause);  // noted as a failure to report

  const zmq::Api& api_;
  void* socket_;
  const int worker_;
  const int parent_fd_;
  int replies_;
  bool acknowledged_ = false;  // the client reads what we send there
  bool exit_ = false, parent_gone_ = false;
  bool grad_mode_ = false;  // the client's, for the operators that read it
  // Memory of others that is not needed any more, not said yet: the token and whose it is. Of the client: a spare's number.
  // A custom operator may keep a tensor and drop it in a thread of its own; that is said when the executor next wakes.
  static constexpr int kClient = -1;
  class Returned {
   public:
    void add(uint64_t token, int source) {
      std::lock_guard lock(mu_);
      all_.emplace_back(token, source);
      any_.store(true, std::memory_order_relaxed);
    }
    bool any() const { return any_.load(std::memory_order_relaxed); }
    std::vector<std::pair<uint64_t, int>> take() {
      std::lock_guard lock(mu_);
      any_.store(false, std::memory_order_relaxed);
      return std::exchange(all_, {});
    }

   private:
    std::mutex mu_;
    std::atomic<bool> any_{false};
    std::vector<std::pair<uint64_t, int>> all_;
  } returned_;

  Store store_;
  Generators generators_;
  std::vector<std::unique_ptr<Operator>> operators_;
  std::unordered_map<uint64_t, c10::OperatorName> unknown_;  // defined by the client, and by no module imported here

  std::deque<std::unique_ptr<Batch>> batches_;
  uint64_t executed_ = 0;  // the last record that ran
  uint64_t received_ = 0;  // the last record that arrived
  std::vector<Dying> dying_;
  int32_t dying_free_ = -1;
  std::multimap<uint64_t, uint64_t> early_;  // releases that overtook their record: seq -> storage
  uint64_t last_drain_ = 0;
  bool light_ = false;  // the last record was arithmetic on a few numbers (small.h)
  int unseen_ = 0;      // such operators since the clock was looked at

  std::unordered_map<uint64_t, Incoming> incoming_;
  std::unordered_map<int, std::string> dead_peers_;
  std::unordered_set<int> awaited_closers_;  // who is to close memory that is about to be freed
  std::unordered_map<uint64_t, Loan> loans_;                      // by token
  std::unordered_multimap<c10::StorageImpl*, uint64_t> lent_;     // their tokens by storage
  std::unordered_set<c10::StorageImpl*> clients_;                 // lent, and held by no one but the client
  uint64_t next_token_ = uint64_t{1} << 62;
  std::deque<Pending> pending_[2];  // by Stream, in its order
  size_t device_limit_ = 0;  // bytes that the client allows on an accelerator; 0: all
  CausePtr lost_;           // why the device works no longer
  bool lost_told_ = false;  // the client knows; the process ends
  std::deque<CausePtr> failures_;               // not yet reported

  int64_t donations_ = 0, lookaheads_ = 0, lookahead_hits_ = 0;
  int64_t lookahead_ns_ = kLookaheadNs;

  bool log_allocations_ = false;
  struct LogRow { uint64_t seq, storage; int64_t nbytes; uint32_t site; uint64_t ns; };  // nbytes < 0: freed
  std::vector<LogRow> log_;
  TraceLog trace_;
  std::vector<at::Tensor> made_;  // scratch of op()
  Buffer out_;
};

}  // namespace dtorch::worker

// See session.h. Order of events for a batch: records are appended under `mu_` by after_record(); flush_locked() sends
// [RECORDS, count] and the bytes, and notes per worker how many bytes are under way; a PROGRESS message from a worker
// takes them off again and closes the upload segments that its batch carried.
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "client/session.h"

#include <poll.h>
#include <signal.h>
#include <sys/eventfd.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <fstream>
#include <iterator>
#include <utility>

#include "client/python_error.h"
#include "client/spares.h"

namespace dtorch {

namespace {

// A full buffer is sent. Small batches start the workers early; while they have plenty to do, large ones cost the
// controller less per record.
constexpr size_t kFlushBytes = 32 * 1024, kFlushBytesBusy = 128 * 1024, kPlenty = 256 * 1024;

// While records keep coming the buffer is sent by filling up, and the flusher looks less often: its waking costs too.
constexpr long kMaxNapFactor = 4;
constexpr int kSignalCheckMs = 200;
constexpr long kSparesMs = 500;  // how often the reply thread looks for segments that nobody uses any more
constexpr int kMaxQuietChecks = 100;  // a preempted client is given this many flush intervals before we send anyway

// One eventfd per thread that ever waited.
struct ThreadEvent {
  int fd = eventfd(0, EFD_CLOEXEC);
  ~ThreadEvent() { close(fd); }
  void drain() const {
    uint64_t n;
    [[maybe_unused]] auto r = read(fd, &n, sizeof n);
  }
};
ThreadEvent& thread_event() {
  static thread_local ThreadEvent event;
  return event;
}

int thread_id() {
  static thread_local int tid = static_cast<int>(syscall(SYS_gettid));
  return tid;
}
clockid_t thread_clock() {
  static thread_local clockid_t id = [] {
    clockid_t c = 0;
    pthread_getcpuclockid(pthread_self(), &c);
    return c;
  }();
  return id;
}
int64_t cpu_ns(clockid_t id) {
  timespec t{};
  return clock_gettime(id, &t) == 0 ? t.tv_sec * 1000000000LL + t.tv_nsec : -1;
}

// 'R' when the thread is running or waiting for a processor; 0 when it cannot be told.
char thread_state(int tid) {
  char path[64], text[512];
  std::snprintf(path, sizeof path, "/proc/self/task/%d/stat", tid);
  int fd = open(path, O_RDONLY | O_CLOEXEC);
  if (fd < 0) return 0;
  ssize_t n = read(fd, text, sizeof text - 1);
  close(fd);
  if (n <= 0) return 0;
  text[n] = 0;
  const char* p = std::strrchr(text, ')');
  return p && p[1] ? p[2] : 0;
}

}  // namespace

Session& Session::get() {
  static Session* session = new Session;  // never destroyed: deleters of tensors may run at exit
  return *session;
}

void Session::attach(const SessionConfig& config) {
  if (active()) throw std::logic_error("a session is active already");
  std::lock_guard lock(mu_);
  if (forked_) {
    // The parent's thread does not exist here, and those that waited on the conditions neither: all three are left as
    // they are, for they can be neither joined nor destroyed.
    new (&flusher_thread_) std::thread;
    new (&flusher_cv_) std::condition_variable_any;
    new (&progress_cv_) std::condition_variable_any;
    requests_.clear();
  }
  config_ = config;
  owner_ = getpid();
  forked_ = false;
  // A child made by fork finds the mutex free, and itself without a session.
  static const int registered = pthread_atfork([] { Session::get().mu_.lock(), spares().lock(); },
                                               [] { spares().unlock(), Session::get().mu_.unlock(); },
                                               [] {
                                                 Session::get().forked_ = true;
                                                 spares().unlock(), Session::get().mu_.unlock();
                                               });
  (void)registered;
  state_.clear();
  state_.resize(static_cast<size_t>(config.workers));
  spares().clear();
  buf_.clear();
  buffered_ = 0;
  counters_ = {};
  completed_.clear();
  inflight_ = uploading_ = uploads_ = 0;
  trouble_ = false;
  ended_.clear();
  direct_ = std::make_shared<Direct>(config.replies, config.workers);
  flusher_stop_ = false;
  generation_.fetch_add(1, std::memory_order_release);
  flusher_thread_ = std::thread([this] { flusher(); });
  active_.store(true, std::memory_order_release);
}

void Session::detach(const std::string& why) {
  if (forked_) return;  // a forked child: the parent's session is not ours to end
  std::thread joiner;
  std::vector<WorkerState::Upload> uploads;  // ended outside the lock: what they keep may be the program's (SES-1)
  std::shared_ptr<Direct> direct;
  {
    std::lock_guard lock(mu_);
    if (!active_.load()) return;
    direct = std::move(direct_);
    active_.store(false, std::memory_order_release);
    generation_.fetch_add(1, std::memory_order_release);
    ended_ = why;
    trouble_ = true;
    flusher_stop_ = true;
    buf_.clear();
    buffered_ = 0;
    for (auto& [id, r] : requests_) {
      if (r->state.load() != Request::State::Pending) continue;
      r->failure = why;
      complete(r, Request::State::Failed);
    }
    for (auto& w : state_) {
      std::move(w.uploads.begin(), w.uploads.end(), std::back_inserter(uploads));
      w.uploads.clear();
    }
    joiner = std::move(flusher_thread_);
    flusher_cv_.notify_all();
    progress_cv_.notify_all();
  }
  uploads.clear();
  spares().clear();
  if (joiner.joinable()) joiner.join();
}

// --- records ---------------------------------------------------------------------------------------------------------

void Session::after_record() {
  ++buffered_;
  ++changes_;
  issuer_tid_ = thread_id();
  issuer_clock_ = thread_clock();
  size_t full = inflight_.load(std::memory_order_relaxed) > kPlenty ? kFlushBytesBusy : kFlushBytes;
  if (buf_.size() >= full) {
    flush_locked();
  } else if (flusher_idle_) {
    flusher_idle_ = false;
    flusher_cv_.notify_one();
  }
}

void Session::flush_locked() {
  if (buf_.empty() || !active_.load(std::memory_order_relaxed)) return;
  uint64_t began = trace::clock();
  uint8_t head[16] = {0x92, static_cast<uint8_t>(Message::RECORDS), 0xce};
  mp::be32(head + 3, buffered_);
  zmq::send(config_.api, config_.push, head, 7, zmq::kSendMore);
  zmq::send(config_.api, config_.push, buf_.data(), buf_.size(), 0);
  ++counters_.batches;
  counters_.bytes += buf_.size();
  if (began) trace::add(Trace::SENT, began, counters_.batches, buf_.size(), buffered_);
  for (auto& w : state_) {
    if (!w.unsent_bytes) continue;
    if (w.dead.empty()) {
      w.inflight.emplace_back(w.next_seq - 1, w.unsent_bytes);
      inflight_.fetch_add(w.unsent_bytes, std::memory_order_relaxed);
    }
    w.unsent_bytes = 0;
  }
  buf_.clear();
  buffered_ = 0;
}

void Session::flush() {
  std::lock_guard lock(mu_);
  flush_locked();
}

bool Session::idle(int worker) {
  std::lock_guard lock(mu_);
  flush_locked();
  const auto& w = state_[static_cast<size_t>(worker)];
  return w.executed + 1 == w.next_seq;
}

void Session::tell_controller(const void* frame, size_t n) {
  std::string why;
  {
    std::lock_guard lock(mu_);
    flush_locked();
    if (active_.load() && !forked_) return zmq::send(config_.api, config_.push, frame, n, 0);
    why = ended_;
  }
  throw_engine_error(why.empty() ? "dtorch is not running; call dtorch.init() first" : why);
}

void Session::release(uint64_t storage, int worker, uint64_t last_seq, uint32_t generation) {
  if (!active() || generation != generation_.load(std::memory_order_acquire) || forked_) return;
  std::lock_guard lock(mu_);
  if (!active_.load() || generation != generation_.load()) return;
  buf_.push(0x94);
  buf_.push(static_cast<uint8_t>(Record::RELEASE));
  mp::put_uint(buf_, static_cast<uint64_t>(worker));
  mp::put_uint(buf_, storage);
  mp::put_uint(buf_, last_seq);
  ++counters_.releases;
  after_record();
}

// Sends what is left in the buffer once the client is quiet. Quiet means: no record for a flush interval, no thread
// inside an operator call, and the thread that wrote the last record either ran on for that long or sleeps. A thread
// that merely lost its processor is not quiet: sending half of what it was about to say would make the worker hold
// memory that the next record releases.
void Session::flusher() {
  std::unique_lock lock(mu_);
  while (!flusher_stop_) {
    if (buf_.empty()) {
      flusher_idle_ = true;
      flusher_cv_.wait(lock);
      flusher_idle_ = false;
      continue;
    }
    long factor = 1;
    for (int check = 0; !flusher_stop_ && !buf_.empty(); ++check) {
      uint64_t before = changes_;
      clockid_t clock = issuer_clock_;
      int tid = issuer_tid_;
      lock.unlock();
      int64_t cpu0 = cpu_ns(clock);
      timespec nap{0, config_.flush_us * 1000 * factor};
      nanosleep(&nap, nullptr);
      int64_t cpu1 = cpu_ns(clock);
      bool ran_on = cpu0 < 0 || cpu1 < 0 || cpu1 - cpu0 >= config_.flush_us * 1000;
      bool quiet = issuing.load(std::memory_order_relaxed) == 0 && (ran_on || thread_state(tid) != 'R');
      lock.lock();
      if (changes_ != before) {
        check = 0;
        factor = std::min(factor * 2, kMaxNapFactor);
        continue;
      }
      if (quiet || check >= kMaxQuietChecks) {
        flush_locked();
        break;
      }
    }
  }
}

void Session::add_upload(Writer&, int worker, WorkerState::Upload upload) {
  auto& w = state_[static_cast<size_t>(worker)];
  if (upload.ours) counters_.upload_bytes += upload.size;
  if (!active_.load() || !w.dead.empty()) return spares().worker_died(worker);  // nobody will ever report progress past it
  uploading_.fetch_add(upload.size, std::memory_order_relaxed);
  w.uploads.push_back(std::move(upload));
  uploads_.fetch_add(1, std::memory_order_relaxed);
}

void Session::admit_slow(int worker) {
  std::unique_lock lock(mu_);
  for (;;) {
    if (!active_.load()) {
      std::string why = ended_.empty() ? "dtorch is not running; call dtorch.init() first" : ended_;
      lock.unlock();  // raising runs Python (SES-1)
      throw_engine_error(why);
    }
    if (std::string dead = state_[static_cast<size_t>(worker)].dead; !dead.empty()) {
      lock.unlock();
      throw_worker_died(worker, dead);
    }
    if (!too_far()) return;
    flush_locked();
    ++counters_.waits;
    lock.unlock();
    uint64_t began = trace::clock();
    {
      GilReleased released;
      std::unique_lock again(mu_);
      // Signals are looked at a few times a second while the client is held back; progress wakes it at once.
      progress_cv_.wait_for(again, std::chrono::milliseconds(200), [&] {
        return !active_.load() || !state_[static_cast<size_t>(worker)].dead.empty() || !too_far();
      });
    }
    if (began) trace::add(Trace::HELD_BACK, began, 0);
    check_signals();
    lock.lock();
  }
}

void Session::on_progress(int worker, uint64_t seq) {
  std::vector<WorkerState::Upload> done;
  {
    std::lock_guard lock(mu_);
    if (worker < 0 || static_cast<size_t>(worker) >= state_.size()) return;
    auto& w = state_[static_cast<size_t>(worker)];
    w.executed = std::max(w.executed, seq);
    size_t freed = 0;
    while (!w.inflight.empty() && w.inflight.front().first <= seq) {
      freed += w.inflight.front().second;
      w.inflight.pop_front();
    }
    inflight_.fetch_sub(freed, std::memory_order_relaxed);
    while (!w.uploads.empty() && w.uploads.front().seq <= seq) {
      uploading_.fetch_sub(w.uploads.front().size, std::memory_order_relaxed);
      uploads_.fetch_sub(1, std::memory_order_relaxed);
      done.push_back(std::move(w.uploads.front()));
      w.uploads.pop_front();
    }
    if (freed || !done.empty()) progress_cv_.notify_all();
  }
}

// --- requests --------------------------------------------------------------------------------------------------------

RequestPtr Session::new_request(int worker, uint32_t site) {
  auto r = std::make_shared<Request>();
  r->id = next_request_.fetch_add(1, std::memory_order_relaxed);
  r->worker = worker;
  r->site = site;
  r->asked = trace::clock();
  std::lock_guard lock(mu_);
  // The session or the worker may have ended since admit(): nobody would answer.
  if (!active_.load()) r->failure = ended_;
  else r->failure = state_[static_cast<size_t>(worker)].dead;
  if (!r->failure.empty()) r->state.store(Request::State::Failed, std::memory_order_release);
  requests_.emplace(r->id, r);
  return r;
}

RequestPtr Session::find(uint64_t id) {
  std::lock_guard lock(mu_);
  auto it = requests_.find(id);
  return it == requests_.end() ? nullptr : it->second;
}

Loan::~Loan() {
  map.end();
  Session::get().release(token, worker, 0, generation);
}

// Whether a process is gone, or a zombie: one has no descriptors any more.
static bool has_died(int pid) {
  if (kill(pid, 0) != 0) return true;
  std::ifstream file("/proc/" + std::to_string(pid) + "/stat");
  std::string line;
  std::getline(file, line);
  size_t name = line.rfind(')');
  return name == std::string::npos || name + 2 >= line.size() || line[name + 2] == 'Z' || line[name + 2] == 'X';
}

void Session::forget(uint64_t id) {
  RequestPtr dying;  // its loan ends outside the lock
  std::lock_guard lock(mu_);
  auto it = requests_.find(id);
  if (it == requests_.end()) return;
  dying = std::move(it->second);
  requests_.erase(it);
}

// For the trace: what is said of a request.
static TraceEvent event_of(const Request& r, Trace kind, uint64_t start) {
  return {start, 0, r.id, 0, 0, r.op, r.site, static_cast<uint32_t>(r.kind), static_cast<int8_t>(r.worker), static_cast<uint8_t>(kind), 0};
}

// Called with mu_ held.
void Session::complete(const RequestPtr& r, Request::State state) {
  if (r->asked && trace::on()) trace::add(event_of(*r, Trace::REQUEST, r->asked));
  r->state.store(state, std::memory_order_release);
  for (int fd : r->wake_fds) {
    uint64_t one = 1;
    [[maybe_unused]] auto n = write(fd, &one, sizeof one);
  }
  if (r->callback) completed_.push_back(r->id);
}

bool Session::want_callback(const RequestPtr& r) {
  std::lock_guard lock(mu_);
  if (r->state.load() != Request::State::Pending) return true;
  r->callback = true;
  return false;
}

std::vector<uint64_t> Session::take_completed() {
  std::lock_guard lock(mu_);
  return std::exchange(completed_, {});
}

bool Session::wait(const RequestPtr& r, double timeout_s) {
  using clock = std::chrono::steady_clock;
  auto deadline = clock::now() + std::chrono::duration<double>(timeout_s < 0 ? 0 : timeout_s);
  auto& event = thread_event();
  std::shared_ptr<Direct> direct;
  {
    std::lock_guard lock(mu_);
    flush_locked();
    if (r->state.load() != Request::State::Pending) return true;
    r->wake_fds.push_back(event.fd);
    direct = direct_;
  }
  auto pending = [&r] { return r->state.load(std::memory_order_acquire) == Request::State::Pending; };
  bool answered = true, interrupted = false;
  uint64_t began = trace::clock();
  {
    GilReleased released;
    Direct::Waiting waiting(direct, r->worker);
    Direct::Packet packet;
    while (pending()) {
      int ms = -1;
      if (timeout_s >= 0) {
        auto left = std::chrono::duration_cast<std::chrono::milliseconds>(deadline - clock::now()).count();
        ms = left < 0 ? 0 : static_cast<int>(std::min<long long>(left + 1, 1 << 30));
      }
      // A signal that came just before the wait does not interrupt it: its flag is looked at now and then.
      if (ms < 0 || ms > kSignalCheckMs) ms = kSignalCheckMs;
      pollfd items[2] = {{event.fd, POLLIN, 0}, {waiting.fd(), POLLIN, 0}};
      int n = poll(items, 2, ms);
      if (n > 0) {
        Received unused;
        while (items[1].revents && pending() && waiting.take(packet))
          if (handle(packet.bytes.data(), packet.bytes.size(), &unused)) direct->nudge();  // there is more to tell Python
        if (items[0].revents) event.drain();
        continue;
      }
      if (n < 0 && errno != EINTR) throw std::runtime_error(std::string("poll: ") + std::strerror(errno));
      if (!signals_ok(released)) {  // a Python error is set
        answered = false;
        interrupted = true;
        break;
      }
      if (n == 0 && timeout_s >= 0 && clock::now() >= deadline) {
        answered = false;
        break;
      }
    }
    packet.done();
  }
  {
    std::lock_guard lock(mu_);
    r->wake_fds.erase(std::find(r->wake_fds.begin(), r->wake_fds.end(), event.fd));
    if (!pending()) {
      // The event may have been signalled after a time-out: leave none behind for the next wait.
      pollfd item{event.fd, POLLIN, 0};
      if (poll(&item, 1, 0) > 0) event.drain();
      answered = true;
    }
  }
  if (began) trace::add(event_of(*r, Trace::WAIT, began));
  if (interrupted) throw_if_python_error();
  return answered;
}

// --- the reply thread ------------------------------------------------------------------------------------------------

// Lets go of the storages that a META reply brings.
void Session::release_results(mp::Reader& in) {
  int worker = static_cast<int>(in.integer());
  auto one = [&](mp::Reader& r) {  // [storage, geometry]
    r.array();
    release(r.uint(), worker, 0, generation());
    r.skip();
  };
  size_t n = in.array();
  for (size_t i = 0; i + 1 < n; ++i) {  // the last element is about arguments
    if (in.kind() != mp::Kind::Array) {
      in.skip();
      continue;
    }
    mp::Reader inside = in;
    size_t m = inside.array();
    if (m && inside.kind() == mp::Kind::Int) {
      one(in);
    } else {
      in.array();
      for (size_t k = 0; k < m; ++k) in.kind() == mp::Kind::Array ? one(in) : in.skip();
    }
  }
}

void Session::abandon(const RequestPtr& r) {
  forget(r->id);
  if (r->state.load() != Request::State::Done || r->reply.empty()) return;
  mp::Reader in(r->reply.data(), r->reply.size());
  in.array();
  in.skip(), in.skip();
  release_results(in);
}

// Takes a message in; true when Python has to hear of it or of the requests in completed_.
bool Session::handle(const uint8_t* data, size_t n_bytes, Received* out) {
  mp::Reader in(data, n_bytes);
  in.array();
  auto kind = static_cast<Message>(in.integer());
  switch (kind) {
    case Message::PROGRESS: {
      int worker = static_cast<int>(in.integer());
      on_progress(worker, in.uint());
      return false;
    }
    case Message::RETURNED: {
      in.skip();
      spares().returned(in.uint());
      return true;  // the reply thread shall look after what lies here
    }
    case Message::VALUE:
    case Message::META:
    case Message::DONE:
    case Message::ERROR: {
      uint64_t id = in.uint();
      RequestPtr r = find(id);
      std::unique_ptr<Loan> loan;
      if (kind == Message::VALUE) {
        int worker = static_cast<int>(in.integer());
        in.skip();  // geometry
        if (in.kind() == mp::Kind::Array) {
          in.array();
          int pid = static_cast<int>(in.integer()), fd = static_cast<int>(in.integer());
          size_t offset = in.uint(), n = in.uint();
          loan = std::make_unique<Loan>();
          loan->token = in.uint();
          loan->generation = generation();
          loan->worker = worker;
          try {
            if (r) loan->map = open_segment(pid, fd, offset, n, Sharing::Lent);
          } catch (const std::exception& e) {
            if (has_died(pid)) return false;  // its maker did: WORKER_DIED answers this request (WIRE-4)
            loan.reset();  // outside the lock: it writes a record
            std::lock_guard lock(mu_);
            if (r->state.load() != Request::State::Pending) return false;
            r->failure = std::string("the value could not be mapped: ") + e.what();
            complete(r, Request::State::Failed);
            return !completed_.empty();
          }
        }
      }
      std::unique_lock lock(mu_);
      if (!r || !requests_.count(id)) {  // nobody asks any more: a future was dropped, or an ASK was interrupted and its
        lock.unlock();                   // results are nobody's. It may have been so just now: abandon() saw no answer then
        if (kind == Message::META) release_results(in);
        return false;
      }
      if (r->state.load() != Request::State::Pending) {  // its worker's death came first
        lock.unlock();  // the loan's end writes a record
        return false;
      }
      auto& executed = state_[static_cast<size_t>(r->worker)].executed;
      executed = std::max(executed, r->seq);  // PROGRESS says so at the end of the batch
      r->reply.assign(reinterpret_cast<const char*>(data), n_bytes);
      r->loan = std::move(loan);
      complete(r, kind == Message::ERROR ? Request::State::Failed : Request::State::Done);
      return !completed_.empty();
    }
    default:
      out->what = Received::What::Message;
      out->message.assign(reinterpret_cast<const char*>(data), n_bytes);
      return true;
  }
}

Session::Received Session::receive(void* pull, const std::vector<int>& fds) {
  Received out{};
  const auto& api = config_.api;
  std::shared_ptr<Direct> direct;
  {
    std::lock_guard lock(mu_);
    direct = direct_;  // null: the session is over
  }
  Direct::Packet packet;
  auto take_in = [&] {
    Received unused;  // what the session has to tell comes by way of the controller
    handle(packet.bytes.data(), packet.bytes.size(), &unused);
  };
  std::vector<zmq::PollItem> items;
  items.push_back({pull, 0, zmq::kPollIn, 0});
  if (direct) items.push_back({nullptr, direct->fd(), zmq::kPollIn, 0});
  const size_t watched = items.size();
  for (int fd : fds) items.push_back({nullptr, fd, zmq::kPollIn, 0});
  for (;;) {
    // Messages first: what a dying peer still said counts.
    for (;;) {
      zmq::Frame frame(api);
      if (!frame.recv(pull, zmq::kDontWait)) break;
      handle(frame.data(), frame.size(), &out);
      if (out.what != Received::What::Message) continue;
      // It may be a death: what came straight from a worker was said before it (DIR-2).
      for (int worker = 0; direct && worker < config_.workers; ++worker)
        while (direct->take_from(worker, packet)) take_in();
      return out;
    }
    while (direct && direct->take(packet)) take_in();
    if (auto completed = take_completed(); !completed.empty()) {
      out.what = Received::What::Completed;
      out.completed = std::move(completed);
      return out;
    }
    for (auto& item : items) item.revents = 0;
    long patience = spares().age() ? kSparesMs : -1;
    if (api.poll(items.data(), static_cast<int>(items.size()), patience) < 0) continue;  // EINTR
    for (size_t i = 0; i < items.size(); ++i) {
      if (!items[i].revents) continue;
      if (i < watched) break;
      out.what = Received::What::Fd;
      out.fd = items[i].fd;
      return out;
    }
  }
}

void Session::worker_died(int worker, const std::string& why, std::vector<uint64_t>* completed) {
  std::deque<WorkerState::Upload> uploads;  // ended outside the lock: what they keep may be the program's (SES-1)
  spares().worker_died(worker);
  std::lock_guard lock(mu_);
  if (worker < 0 || static_cast<size_t>(worker) >= state_.size()) return;
  auto& w = state_[static_cast<size_t>(worker)];
  w.dead = why;
  trouble_ = true;
  for (auto& [seq, bytes] : w.inflight) inflight_.fetch_sub(bytes, std::memory_order_relaxed);
  w.inflight.clear();
  for (auto& u : w.uploads) {
    uploading_.fetch_sub(u.size, std::memory_order_relaxed);
    uploads_.fetch_sub(1, std::memory_order_relaxed);
  }
  uploads.swap(w.uploads);
  for (auto& [id, r] : requests_) {
    if (r->worker != worker || r->state.load() != Request::State::Pending) continue;
    r->failure = why;
    complete(r, Request::State::Failed);
  }
  progress_cv_.notify_all();
  *completed = std::exchange(completed_, {});
}

Counters Session::counters() {
  std::lock_guard lock(mu_);
  return counters_;
}

std::vector<std::pair<uint64_t, uint64_t>> Session::progress() {
  std::lock_guard lock(mu_);
  std::vector<std::pair<uint64_t, uint64_t>> out;
  for (auto& w : state_) out.emplace_back(w.next_seq - 1, w.executed);
  return out;
}

}  // namespace dtorch

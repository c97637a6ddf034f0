// See executor.h. This file: the socket, batches and releases. records.cpp: what each record does.
#include "worker/executor.h"

#include <ATen/core/grad_mode.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/StreamGuard.h>

#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <optional>
#include <utility>

#include "worker/device_python.h"
#include "worker/memory.h"
#include "worker/staging.h"

namespace dtorch::worker {

namespace {

constexpr uint64_t kDrainNs = 20000;
constexpr uint64_t kSpinNs = 1'000'000;  // an accelerator is asked without pause so long, then every millisecond
constexpr int kLightOperators = 4;  // on a few numbers (small.h): after so many the clock is looked at
constexpr int64_t kLookaheadBytes = 16 << 10;  // less is not worth a wait

}  // namespace

Executor::Executor(const zmq::Api& api, void* socket, int worker, int parent_fd, int replies)
    : api_(api), socket_(socket), worker_(worker), parent_fd_(parent_fd), replies_(replies) {}

Executor::~Executor() {
  if (replies_ >= 0) close(replies_);
}

int Executor::run() {
  c10::InferenceMode inference;
  set_pressure_hook([this] { return await_releases(); });
  while (!exit_) {
    drain();
    if (exit_) break;
    if (works_behind()) settle();
    if (lost_told_) {
      lose(lost_);
      throw std::runtime_error("the device works no longer");
    }
    if (returned_.any()) return_borrowed();
    if (batches_.empty()) {
      if (!wait_readable()) return 1;
      continue;
    }
    execute_front();
    if (parent_gone_) return 1;
  }
  return 0;
}

bool Executor::wait_readable() {
  zmq::PollItem items[2] = {{socket_, 0, zmq::kPollIn, 0}, {nullptr, parent_fd_, zmq::kPollIn, 0}};
  int n = parent_fd_ >= 0 ? 2 : 1;
  uint64_t start = works_behind() ? now_ns() : 0;
  for (;;) {
    api_.poll(items, n, !works_behind() ? -1 : now_ns() - start < kSpinNs ? 0 : 1);
    if (n == 2 && items[1].revents) parent_gone_ = true;
    if (parent_gone_ || items[0].revents || !works_behind()) return !parent_gone_;
    settle();
    if (lost_told_ || returned_.any()) return true;
  }
}

void Executor::drain() {
  for (;;) {
    zmq::Frame head(api_);
    if (!head.recv(socket_, zmq::kDontWait)) break;
    receive_one(head);
    if (exit_) break;
  }
  last_drain_ = now_ns();
}

// Straight to the client where that goes at once, else by way of the controller, which keeps what has no reader yet.
void Executor::answer(const Buffer& b) {
  if (replies_ >= 0 && __builtin_expect(!acknowledged_, 0)) {
    char said;
    acknowledged_ = recv(replies_, &said, 1, MSG_DONTWAIT) == 1;
  }
  if (acknowledged_ && replies_ >= 0 && b.size() <= kDirectBytes) {
    ssize_t n;
    do n = send(replies_, b.data(), b.size(), MSG_DONTWAIT | MSG_NOSIGNAL);
    while (n < 0 && errno == EINTR);
    if (n == static_cast<ssize_t>(b.size())) return;
    if (n < 0 && (errno == EPIPE || errno == ECONNRESET || errno == ENOTCONN)) close(std::exchange(replies_, -1));
  }
  reply(b);
}

void Executor::receive_one(zmq::Frame& head) {
  mp::Reader in(head.data(), head.size());
  size_t fields = in.array();
  auto kind = static_cast<Message>(in.integer());
  switch (kind) {
    case Message::BATCH: {
      auto batch = std::make_unique<Batch>(api_);
      zmq::Frame releases(api_);
      batch->records.recv(socket_, 0);
      releases.recv(socket_, 0);
      take_batch(in, std::move(batch), releases);
      return;
    }
    case Message::INCOMING: {
      uint64_t transfer = in.uint();
      incoming_[transfer].payload.assign(reinterpret_cast<const char*>(in.pos()), in.left());
      return;
    }
    case Message::TRANSFER_DONE: {
      give_back(in.uint());
      return;
    }
    case Message::PEER_DIED: {
      int worker = static_cast<int>(in.integer());
      dead_peers_[worker] = std::string(in.str());
      awaited_closers_.erase(worker);
      if (!on_host()) try {
          forget_peer(worker);
        } catch (...) {
          note_failure(cause_of("internal", "closing a dead worker's memory", "", 0));
        }
      return;
    }
    case Message::FREED: {  // without handles: the answer of one who has closed them
      int source = static_cast<int>(in.integer());
      in.skip();
      std::vector<std::string> handles;
      for (size_t i = in.array(); i-- > 0;) handles.emplace_back(in.bin());
      if (handles.empty()) {
        awaited_closers_.erase(source);
        return;
      }
      try {
        close_allocations(source, handles);
      } catch (...) {
        note_failure(cause_of("internal", "closing another worker's memory", "", 0));
      }
      tell_freed(source, {});
      return;
    }
    case Message::EXIT: exit_ = true; return;
    default:
      throw mp::FormatError("the worker has no use for message " + std::to_string(static_cast<int>(kind)) + " with " +
                            std::to_string(fields) + " fields");
  }
}

void Executor::take_batch(mp::Reader& head, std::unique_ptr<Batch> batch, zmq::Frame& releases) {
  batch->first_seq = head.uint();
  batch->count = static_cast<uint32_t>(head.uint());
  uint64_t n = head.uint();
  if (batch->count) {
    if (batch->first_seq != received_ + 1)
      throw mp::FormatError("a batch starts at record " + std::to_string(batch->first_seq) + " after record " +
                            std::to_string(received_));
    received_ = batch->first_seq + batch->count - 1;
    batches_.push_back(std::move(batch));
    while (!early_.empty() && early_.begin()->first <= received_) {
      attach_release(early_.begin()->second, early_.begin()->first);
      early_.erase(early_.begin());
    }
  }
  mp::Reader r(releases.data(), releases.size());
  for (uint64_t i = 0; i < n; ++i) {
    r.array();
    r.integer();  // RELEASE
    r.integer();  // worker
    uint64_t storage = r.uint();
    release(storage, r.uint());
  }
}

// --- releases --------------------------------------------------------------------------------------------------------

void Executor::release(uint64_t storage, uint64_t last_seq) {
  if (last_seq <= executed_) free_storage(storage);
  else if (last_seq > received_) early_.emplace(last_seq, storage);
  else attach_release(storage, last_seq);
}

void Executor::attach_release(uint64_t storage, uint64_t seq) {
  // Releases name recent records: search from the newest batch.
  auto it = batches_.rbegin();
  while ((*it)->first_seq > seq) ++it;
  auto& batch = **it;
  if (batch.free_after.empty()) batch.free_after.assign(batch.count, -1);
  auto& head = batch.free_after[seq - batch.first_seq];
  int32_t slot;
  if (dying_free_ >= 0) {
    slot = dying_free_;
    dying_free_ = dying_[static_cast<size_t>(slot)].next;
  } else {
    slot = static_cast<int32_t>(dying_.size());
    dying_.push_back({});
  }
  dying_[static_cast<size_t>(slot)] = {storage, head};
  head = slot;
}

void Executor::free_storage(uint64_t storage) {
  if (__builtin_expect(storage >> 62, 0)) return give_back(storage);
  if (__builtin_expect(!loans_.empty(), 0))
    if (auto* s = store_.find(storage); s && s->first.defined()) leave_to_client(s->first.storage().unsafeGetStorageImpl());
  if (store_.erase(storage) && __builtin_expect(log_allocations_, 0)) log_.push_back({executed_, storage, -1, 0, now_ns()});
}

int32_t Executor::dying_at(const Batch& batch, uint64_t seq) const {
  return batch.free_after.empty() ? -1 : batch.free_after[seq - batch.first_seq];
}

bool Executor::await_releases() {
  constexpr uint64_t kPatienceNs = 200'000'000;  // nothing is lost by waiting: the alternative is to fail
  auto allocated = [] { return on_host() ? memory_stats().allocated : device_memory().stats.allocated; };
  int64_t before = allocated();
  uint64_t start = now_ns();
  struct Note {
    Executor* executor;
    uint64_t start;
    ~Note() { executor->note_wait(Trace::AWAIT_MEMORY, start, 0, -1); }
  } note{this, start};
  do {
    drain();
    if (works_behind()) settle();  // what is being fetched or sent keeps its memory
    if (returned_.any()) return_borrowed();
    if (allocated() < before) return true;
    if (exit_ || lost_) return false;
    zmq::PollItem item{socket_, 0, zmq::kPollIn, 0};
    api_.poll(&item, 1, works_behind() ? 1 : 5);
  } while (now_ns() - start < kPatienceNs);
  return false;
}

// The record that runs next is the last one that came. If it would raise the peak, and nothing that it reads is known to
// die with it, the release may be just behind: the client sends in batches.
void Executor::look_ahead(mp::Reader args) {
  args.skip();
  int64_t bytes = 0;
  for (size_t n = args.array(); n-- > 0;) {
    args.array();
    args.skip();
    auto g = read_geometry(args);
    int64_t size = static_cast<int64_t>(c10::elementSize(g.dtype));
    for (int64_t d : g.sizes) size *= d;
    bytes += size;
  }
  const auto& m = memory_stats();
  if (m.allocated + bytes <= m.peak || bytes < kLookaheadBytes) return;
  ++lookaheads_;
  uint64_t seq = executed_ + 1, start = now_ns();
  const auto& batch = *batches_.front();
  do {
    drain();
    if (received_ > seq || dying_at(batch, seq) >= 0 || m.allocated + bytes <= m.peak) {
      ++lookahead_hits_;
      return;
    }
  } while (!exit_ && now_ns() - start < static_cast<uint64_t>(lookahead_ns_));
}

// --- lending ---------------------------------------------------------------------------------------------------------

// The loan holds the storage, so its memory outlives the tensor until the reader lets go.
uint64_t Executor::lend(const c10::Storage& storage, bool to_peer) {
  uint64_t token = next_token_++;
  lent_.emplace(storage.unsafeGetStorageImpl(), token);
  loans_.emplace(token, Loan{storage, to_peer});
  return token;
}

void Executor::leave_to_client(c10::StorageImpl* storage) {
  if (!storage->device().is_cpu() || !on_host()) return;  // an accelerator's worker lends copies
  auto [begin, end] = lent_.equal_range(storage);
  if (begin == end || std::any_of(begin, end, [this](auto& l) { return loans_.at(l.second).to_peer; })) return;
  if (clients_.insert(storage).second) lend_memory(static_cast<int64_t>(storage->nbytes()));
}

void Executor::give_back(uint64_t token) {
  auto it = loans_.find(token);
  if (it == loans_.end()) return;
  auto* storage = it->second.storage.unsafeGetStorageImpl();
  auto [begin, end] = lent_.equal_range(storage);
  for (auto l = begin; l != end; ++l)
    if (l->second == token) {
      lent_.erase(l);
      break;
    }
  if (!lent_.count(storage) && clients_.erase(storage)) lend_memory(-static_cast<int64_t>(storage->nbytes()));
  loans_.erase(it);
}

// The loans keep the old memory, the tensor gets a copy: what a reader sees is what it asked for.
void Executor::before_write(uint64_t id) {
  auto* s = store_.find(id);
  if (!s || !s->first.defined()) return;
  auto* impl = s->first.storage().unsafeGetStorageImpl();
  if (!lent_.count(impl)) return;
  auto copy = make_bytes(impl->nbytes(), impl->device());  // may wait for releases, which may end loans
  std::vector<uint64_t> tokens;
  auto [begin, end] = lent_.equal_range(impl);
  for (auto l = begin; l != end; ++l) tokens.push_back(l->second);
  if (tokens.empty()) return;
  copy_bytes(copy, s->first, impl->nbytes());
  lent_.erase(impl);
  auto data = copy.storage().unsafeGetStorageImpl()->set_data_ptr(c10::DataPtr(nullptr, impl->device()));
  c10::Storage old(c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), impl->nbytes(),
                                                         impl->set_data_ptr(std::move(data)), impl->allocator(),
                                                         /*resizable=*/false));
  for (uint64_t token : tokens) {
    loans_.at(token).storage = old;
    lent_.emplace(old.unsafeGetStorageImpl(), token);
  }
  leave_to_client(old.unsafeGetStorageImpl());
}

Executor::Borrowed::~Borrowed() {
  std::atomic_ref(memory_stats().mapped).fetch_sub(static_cast<int64_t>(map.size), std::memory_order_relaxed);
  map.end();
  executor->returned_.add(token, source);
}

void Executor::return_borrowed() {
  for (auto [token, source] : returned_.take()) {
    out_.clear();
    if (source == kClient) {
      mp::put_array(out_, 3);
      out_.push(static_cast<uint8_t>(Message::RETURNED));
      mp::put_int(out_, worker_);
      mp::put_uint(out_, token);
      answer(out_);
      continue;
    }
    mp::put_array(out_, 4);
    out_.push(static_cast<uint8_t>(Message::TRANSFER_DONE));
    mp::put_uint(out_, token);
    mp::put_int(out_, source);
    mp::put_int(out_, worker_);
    reply(out_);
  }
}

// --- accelerators ----------------------------------------------------------------------------------------------------

void Executor::when_done(Stream stream, uint64_t site, Then then) {
  std::optional<c10::Event> reached;
  try {
    reached.emplace(now_on(stream == Compute ? compute_stream() : fetch_stream()));
  } catch (...) {
    return then(cause_of("op", "work on " + computing.device.str(), "", site));
  }
  pending_[stream].push_back({std::move(*reached), site, std::move(then)});
}

// What is done here may wait for memory, and come here again.
void Executor::settle() {
  for (auto& pending : pending_)
    while (!pending.empty()) {
      try {
        if (!pending.front().reached.query()) break;
      } catch (...) {
        return lose(cause_of("op", "work on " + computing.device.str(), "", waiting_since()));
      }
      auto then = std::move(pending.front().then);
      pending.pop_front();
      then(nullptr);
    }
}

uint64_t Executor::waiting_since() const {
  for (auto stream : {Fetch, Compute})  // fetches are what a program waits for
    for (auto& p : pending_[stream])
      if (p.site) return p.site;
  return 0;
}

void Executor::lose(const CausePtr& cause) {
  if (!lost_) lost_ = cause;
  for (auto& pending : pending_)
    for (auto& p : std::exchange(pending, {})) p.then(lost_);
}

void Executor::refuse(mp::Reader& in, const CausePtr& cause) {
  size_t fields = in.array() - 2;
  auto kind = static_cast<Record>(in.integer());
  in.skip();
  switch (kind) {
    case Record::FETCH:
    case Record::ASK:
    case Record::SYNC:
    case Record::RNG_GET:
    case Record::STATS:
    case Record::EVENT:
    case Record::READ:
    case Record::IMPORT:
      answer_error(in.uint(), cause);
      --fields;
      break;
    case Record::SEND: {
      uint64_t transfer = in.uint();
      send_cause(transfer, in.uint(), cause);
      fields -= 2;
      break;
    }
    default: break;
  }
  while (fields-- > 0) in.skip();
}

at::Tensor Executor::to_device(const at::Tensor& host, uint64_t site) {
  if (on_host()) return host;
  auto t = make_empty(host.sizes(), host.strides(), host.scalar_type());
  t.copy_(host, /*non_blocking=*/true);
  when_done(Compute, site, [host](const CausePtr&) {});
  return t;
}

void Executor::fetch_from_device(const at::Tensor& t, uint64_t site,
                                 std::function<void(const at::Tensor&, const CausePtr&)> then) {
  auto host = stage({t.scalar_type(), Dims(t.sizes().begin(), t.sizes().end()), Dims(t.strides().begin(), t.strides().end())});
  uint64_t loan = lend(t.storage(), /*to_peer=*/true);  // its memory is neither reused nor written until it was read
  try {
    fetch_after_computing();
    c10::StreamGuard on(fetch_stream());
    host.copy_(t, /*non_blocking=*/true);
  } catch (...) {
    give_back(loan);
    throw;
  }
  when_done(Fetch, site, [this, loan, host, then = std::move(then)](const CausePtr& lost) {
    give_back(loan);
    then(host, lost);
  });
}

// --- batches ---------------------------------------------------------------------------------------------------------

void Executor::execute_front() {
  auto& batch = *batches_.front();
  const uint8_t* base = batch.records.data();
  mp::Reader in(base + batch.position, batch.records.size() - batch.position);
  uint64_t last = batch.first_seq + batch.count - 1;
  while (executed_ < last) {
    light_ = false;
    if (__builtin_expect(trace_.on(), 0)) execute_traced(in);  // TRACE-1
    else execute(in);
    ++executed_;
    if (!batch.free_after.empty()) {
      auto& head = batch.free_after[executed_ - batch.first_seq];
      while (head >= 0) {
        auto& d = dying_[static_cast<size_t>(head)];
        int32_t next = d.next;
        free_storage(d.storage);
        d.next = dying_free_;
        dying_free_ = head;
        head = next;
      }
    }
    if (__builtin_expect(returned_.any(), 0)) return_borrowed();
    if (light_ && ++unseen_ < kLightOperators) continue;
    unseen_ = 0;
    if (now_ns() - last_drain_ > kDrainNs) {
      drain();
      if (__builtin_expect(works_behind(), 0)) settle();
      if (exit_ || parent_gone_ || lost_told_) return;
    }
  }
  batches_.pop_front();
  out_.clear();
  mp::put_array(out_, 3);
  out_.push(static_cast<uint8_t>(Message::PROGRESS));
  mp::put_int(out_, worker_);
  mp::put_uint(out_, executed_);
  reply(out_);
}

}  // namespace dtorch::worker

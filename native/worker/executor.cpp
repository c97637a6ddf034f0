// See executor.h. This file: the socket, batches and releases. records.cpp: what each record does.
#include "worker/executor.h"

#include <ATen/core/grad_mode.h>
#include <c10/core/InferenceMode.h>

#include <time.h>

namespace dtorch::worker {

namespace {

constexpr uint64_t kDrainNs = 20000;

uint64_t now_ns() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return static_cast<uint64_t>(t.tv_sec) * 1000000000ull + static_cast<uint64_t>(t.tv_nsec);
}

}  // namespace

Executor::Executor(const zmq::Api& api, void* socket, int worker, int parent_fd)
    : api_(api), socket_(socket), worker_(worker), parent_fd_(parent_fd) {}

Executor::~Executor() {
  for (auto& [token, fd] : exported_) close(fd);
}

int Executor::run() {
  c10::InferenceMode inference;
  while (!exit_) {
    drain();
    if (exit_) break;
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
  api_.poll(items, n, -1);
  if (n == 2 && items[1].revents) parent_gone_ = true;
  return !parent_gone_;
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
      uint64_t token = in.uint();
      free_storage(token);
      return;
    }
    case Message::PEER_DIED: {
      int worker = static_cast<int>(in.integer());
      dead_peers_[worker] = std::string(in.str());
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
  if (__builtin_expect(storage >> 62, 0)) {  // a segment of ours that its reader has mapped (SHM-2)
    auto it = exported_.find(storage);
    if (it == exported_.end()) return;
    close(it->second);
    exported_.erase(it);
    return;
  }
  if (__builtin_expect(log_allocations_, 0)) log_.push_back({executed_, storage, -1});
  store_.erase(storage);
}

// --- batches ---------------------------------------------------------------------------------------------------------

void Executor::execute_front() {
  auto& batch = *batches_.front();
  const uint8_t* base = batch.records.data();
  mp::Reader in(base + batch.position, batch.records.size() - batch.position);
  uint64_t last = batch.first_seq + batch.count - 1;
  while (executed_ < last) {
    execute(in);
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
    if (now_ns() - last_drain_ > kDrainNs) {
      drain();
      if (exit_ || parent_gone_) return;
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

// See relay.h.
#include "scheduler/relay.h"

#include <cstring>

#include "common/msgpack.h"
#include "common/protocol.h"

namespace dtorch {

namespace {

constexpr int kTurn = 64;  // messages taken from one socket before the other has its turn

// The kind of a message by its first two bytes: it is an array of fewer than 16 elements.
int kind_of(zmq::Frame& head) {
  return head.size() >= 2 && (head.data()[0] & 0xF0) == 0x90 ? head.data()[1] : -1;
}

bool goes_to_client(int kind) {
  switch (static_cast<Message>(kind)) {
    case Message::PROGRESS:
    case Message::VALUE:
    case Message::META:
    case Message::DONE:
    case Message::ERROR:
    case Message::RETURNED: return true;
    default: return false;
  }
}

std::string name_of(uint32_t worker) { return "worker-" + std::to_string(worker); }

std::string text(zmq::Frame& f) { return {reinterpret_cast<const char*>(f.data()), f.size()}; }

constexpr uint8_t trace_kind(Message kind) { return static_cast<uint8_t>(kTraceMessage + static_cast<int>(kind)); }

// A message on its way to the client: PROGRESS names the worker and a record, a reply the request and the worker.
TraceEvent describe_reply(zmq::Frame& head, uint64_t start) {
  mp::Reader in(head.data(), head.size());
  in.array();
  auto kind = static_cast<Message>(in.integer());
  TraceEvent e{};
  e.start = start;
  e.bytes = head.size();
  e.kind = trace_kind(kind);
  if (kind == Message::PROGRESS) e.worker = static_cast<int8_t>(in.integer()), e.number = in.uint();
  else e.link = in.uint(), e.worker = static_cast<int8_t>(in.integer());
  return e;
}

// A BATCH: its first record and how many there are, without the releases.
TraceEvent part_event(const Part& part, uint64_t start) {
  return {start, 0, part.first_seq, 0, part.record_bytes + part.release_bytes, 0, 0,
          static_cast<uint32_t>(part.count), static_cast<int8_t>(part.worker), trace_kind(Message::BATCH), 0};
}

}  // namespace

Relay::Event Relay::serve(bool routine, bool watch_outbox) {
  for (;;) {
    zmq::PollItem items[4] = {{s_.inbox, 0, zmq::kPollIn, 0},
                              {s_.router, 0, zmq::kPollIn, 0},
                              {nullptr, s_.events, zmq::kPollIn, 0},
                              {s_.outbox, 0, zmq::kPollOut, 0}};
    if (api_.poll(items, watch_outbox ? 4 : 3, -1) < 0) continue;  // EINTR
    Event out{};
    // Who handles a death takes in what was said before it, so events may come first; but not twice while others wait.
    bool others = items[0].revents || items[1].revents;
    if (items[2].revents && !(others && events_last_)) {
      events_last_ = true;
      return {Source::Events, {}};
    }
    events_last_ = false;
    if (items[1].revents)
      for (int i = 0; i < kTurn && take_worker(routine, &out); ++i)
        if (!out.frames.empty()) return out;
    if (items[0].revents)
      for (int i = 0; i < kTurn && take_client(routine, &out); ++i)
        if (!out.frames.empty()) return out;
    if (items[3].revents) return {Source::Outbox, {}};
  }
}

bool Relay::take_worker(bool routine, Event* out) {
  zmq::Frame identity(api_), head(api_);
  if (!identity.recv(s_.router, zmq::kDontWait)) return false;
  uint64_t began = trace_.on() ? now_ns() : 0;
  head.recv(s_.router, 0);
  if (__builtin_expect(some_gone_, 0) && is_gone(identity)) {
    Event dropped;
    rest(s_.router, head, &dropped);
    return true;
  }
  int kind = kind_of(head);
  if (!routine || head.more() || !goes_to_client(kind)) {
    *out = {Source::Worker, {text(identity)}};
    rest(s_.router, head, out);
    return true;
  }
  if (static_cast<Message>(kind) == Message::PROGRESS) {
    mp::Reader in(head.data(), head.size());
    in.array();
    in.integer();
    auto worker = static_cast<uint32_t>(in.uint());
    if (text(identity) != name_of(worker)) throw std::invalid_argument(text(identity) + " speaks for " + name_of(worker));
    scheduler_.executed(worker, in.uint());
  }
  TraceEvent event = began ? describe_reply(head, began) : TraceEvent{};
  if (!head.send(s_.outbox, zmq::kDontWait)) *out = {Source::Worker, {text(identity), text(head)}};
  else if (began) note(event);
  return true;
}

bool Relay::take_client(bool routine, Event* out) {
  zmq::Frame head(api_);
  if (!head.recv(s_.inbox, zmq::kDontWait)) return false;
  uint64_t began = trace_.on() ? now_ns() : 0;
  if (!routine || kind_of(head) != static_cast<int>(Message::RECORDS)) {
    out->source = Source::Client;
    rest(s_.inbox, head, out);
    return true;
  }
  mp::Reader in(head.data(), head.size());
  in.array();
  in.integer();
  uint64_t count = in.uint(), total = 0;
  zmq::Frame stream(api_);
  stream.recv(s_.inbox, 0);
  auto parts = scheduler_.split(stream.data(), stream.size());
  for (const auto& part : parts) total += part.count + part.release_count;
  if (total != count)
    throw std::invalid_argument("a RECORDS message says " + std::to_string(count) + " records and holds " + std::to_string(total));
  size_t bytes = stream.size();  // it may be handed on
  for (const auto& part : parts) {
    if (gone_[part.worker]) continue;
    uint64_t start = trace_.on() ? now_ns() : 0;
    batch(part, stream);
    if (start) note(part_event(part, start));
  }
  if (began) note({began, 0, scheduler_.streams(), 0, bytes, 0, 0, static_cast<uint32_t>(count), -1, trace_kind(Message::RECORDS), 0});
  return true;
}

bool Relay::is_gone(zmq::Frame& identity) {
  auto name = text(identity);
  for (size_t worker = 0; worker < gone_.size(); ++worker)
    if (gone_[worker] && name == name_of(static_cast<uint32_t>(worker))) return true;
  return false;
}

void Relay::note(TraceEvent event) {
  event.end = now_ns();
  trace_.add(event);
}

void Relay::batch(const Part& part, zmq::Frame& stream) {
  Buffer head;
  mp::put_array(head, 4);
  head.push(static_cast<uint8_t>(Message::BATCH));
  mp::put_uint(head, part.first_seq);
  mp::put_uint(head, part.count);
  mp::put_uint(head, part.release_count);
  auto name = name_of(part.worker);
  zmq::send(api_, s_.router, name.data(), name.size(), zmq::kSendMore);
  zmq::send(api_, s_.router, head.data(), head.size(), zmq::kSendMore);
  auto runs = [&](const std::vector<Run>& r, size_t bytes, int flags) {
    zmq::Frame frame(api_, bytes);
    uint8_t* to = frame.mutable_data();
    for (const auto& run : r) {
      std::memcpy(to, stream.data() + run.begin, run.end - run.begin);
      to += run.end - run.begin;
    }
    frame.send(s_.router, flags);
  };
  if (part.record_bytes == stream.size()) stream.send(s_.router, zmq::kSendMore);  // all of it is this worker's
  else runs(part.records, part.record_bytes, zmq::kSendMore);
  runs(part.releases, part.release_bytes, 0);
}

void Relay::rest(void* socket, zmq::Frame& last, Event* out) {
  out->frames.push_back(text(last));
  for (bool more = last.more(); more;) {
    zmq::Frame next(api_);
    next.recv(socket, 0);
    more = next.more();
    out->frames.push_back(text(next));
  }
}

}  // namespace dtorch

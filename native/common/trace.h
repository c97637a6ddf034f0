// What a process notes while dtorch.profile() records: events of a fixed size, and texts by number.
//
// TRACE-1  While nothing is recorded, a record costs one look at a bool, in the client and in the worker, and a batch one in
//          the controller.
// TRACE-2  A log holds at most `limit` events and kMaxTexts texts. What comes later is counted and dropped: the first events
//          stay, so that what is kept has no holes.
// TRACE-3  Events of one thread stand in the order in which they ended.
//
// A log has no lock of its own: it belongs to one thread, or its owner guards it (client/trace.cpp).
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "common/clock.h"
#include "common/msgpack.h"
#include "common/protocol.h"

namespace dtorch {

class TraceLog {
 public:
  static constexpr size_t kChunk = 16384;       // events of a reply
  static constexpr uint32_t kMaxTexts = 65536;  // 0 stands for none

  bool on() const { return on_; }

  // Starts anew; `limit` is a number of events.
  void start(uint64_t limit) {
    clear();
    limit_ = limit;
    on_ = true;
  }
  void stop() { on_ = false; }

  void add(const TraceEvent& e) {
    if (__builtin_expect(kept_ == limit_, 0)) {
      ++dropped_;
      return;
    }
    if (chunks_.empty() || chunks_.back().size() == kChunk) chunks_.emplace_back().reserve(kChunk);
    chunks_.back().push_back(e);
    ++kept_;
  }

  // The number of a text, made at first sight of its key.
  template <class Make>
  uint32_t text(std::string_view key, const Make& make) {
    auto it = numbers_.find(key);
    if (it != numbers_.end()) return it->second;
    if (texts_.size() >= kMaxTexts) return 0;
    texts_.push_back(make());
    auto number = static_cast<uint32_t>(texts_.size());
    numbers_.emplace(std::string(key), number);
    return number;
  }
  uint32_t text(std::string_view t) {
    return text(t, [&] { return std::string(t); });
  }

  // The oldest events, which the log then has no longer; empty at its end.
  std::vector<TraceEvent> take() {
    if (chunks_.empty()) return {};
    auto chunk = std::move(chunks_.front());
    chunks_.pop_front();
    return chunk;
  }
  uint64_t dropped() const { return dropped_; }
  const std::vector<std::string>& texts() const { return texts_; }  // number n stands at n - 1

  void clear() {
    on_ = false;
    chunks_.clear();
    numbers_.clear();
    texts_.clear();
    limit_ = kept_ = dropped_ = 0;
  }

 private:
  struct Hash {
    using is_transparent = void;
    size_t operator()(std::string_view s) const { return std::hash<std::string_view>{}(s); }
  };

  bool on_ = false;
  uint64_t limit_ = 0, kept_ = 0, dropped_ = 0;
  std::deque<std::vector<TraceEvent>> chunks_;
  std::unordered_map<std::string, uint32_t, Hash, std::equal_to<>> numbers_;
  std::vector<std::string> texts_;
};

inline void put_events(Buffer& b, const std::vector<TraceEvent>& events) {
  mp::put_bin(b, events.empty() ? "" : static_cast<const void*>(events.data()), events.size() * sizeof(TraceEvent));
}

}  // namespace dtorch

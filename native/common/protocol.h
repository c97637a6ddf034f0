// The wire in C++: the twin of dtorch/protocol.py, which explains every message. tests/test_protocol.py compares the
// two, name by name and number by number.
#pragma once

#include <cstddef>
#include <cstdint>

namespace dtorch {

constexpr int kVersion = 6;
constexpr size_t kInlineBytes = 64 * 1024;
constexpr size_t kDirectBytes = 80 * 1024;

enum class Message : int {
  HELLO = 1,
  RECORDS = 2,
  SHUTDOWN = 3,
  TRACE = 4,
  BATCH = 10,
  INCOMING = 11,
  PEER_DIED = 12,
  EXIT = 13,
  WORKER_HELLO = 20,
  TRANSFER = 21,
  TRANSFER_DONE = 22,
  PROGRESS = 23,
  VALUE = 24,
  META = 25,
  DONE = 26,
  ERROR = 27,
  RETURNED = 28,
  FREED = 29,
  READY = 30,
  REFUSED = 31,
  WORKER_DIED = 32,
  WORKER_READY = 33,
  TRACED = 34,
};

enum class Record : int {
  OP = 1,
  RELEASE = 2,
  DEFINE_OP = 3,
  ALLOC = 4,
  PUT = 5,
  MAP = 6,
  FETCH = 7,
  ASK = 8,
  SEND = 9,
  RECV = 10,
  SEED = 11,
  RNG_GET = 12,
  RNG_SET = 13,
  SYNC = 14,
  RESIZE = 15,
  STATS = 16,
  OPTION = 17,
  EVENT = 18,
  READ = 19,
  IMPORT = 20,
};

enum class Trace : int {
  SENT = 128,
  WAIT = 129,
  HELD_BACK = 130,
  REQUEST = 131,
  INFER = 132,
  SPAN_BEGIN = 133,
  SPAN_END = 134,
  AWAIT_PEER = 135,
  AWAIT_MEMORY = 136,
};

constexpr int kTraceMessage = 64;

struct TraceEvent {
  uint64_t start, end;
  uint64_t number, link, bytes;
  uint32_t name, site, detail;
  int8_t worker;
  uint8_t kind;
  uint16_t thread;
};
static_assert(sizeof(TraceEvent) == 56);

enum class Ext : int8_t {
  CPU_TENSOR = 1,
  COMPLEX = 2,
  GENERATOR = 3,
  DEVICE = 4,
};

constexpr int kFlagConj = 1;
constexpr int kFlagNeg = 2;

}  // namespace dtorch

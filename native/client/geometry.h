// What an operator's results will look like, without running it: the geometry cache, and how a miss is answered.
//
// Exact strides matter: eager's kernels choose by them, so a wrong guess gives other bits. PyTorch's meta kernels are not
// used, for two reasons that were measured: most are Python (up to milliseconds a call), and their strides differ from the
// CPU's for convolutions, norms and size-1 dimensions. A miss is answered by, in this order:
//
//   1. a rule (rules.cpp), for the few frequent operators that have no structured kernel;
//   2. the operator's own composite kernel. A structured operator's composite ("explicit, non-functional") computes its
//      results' geometry in C++, allocates them, and calls the out= operator. We run that kernel on the client's tensors
//      in inference mode (Inferring): allocations make lazy storages and out= operators do nothing. It is the code the
//      CPU kernel shares, so the strides are eager's. Explicit composites fall apart into such operators;
//   3. for an operator that is not PyTorch's own: its fake kernel, which is its kernel for meta tensors;
//   4. the worker (ASK): it runs the operator and tells. Wrong calls end here too and raise eager's own exception.
//
// GEO-1  A cached answer depends on nothing but the key (encode.h).
// GEO-2  The cache holds at most 2 * kCacheEntries; when full the older half goes.
// GEO-3  What depends on the data is never cached: it is asked every time.
#pragma once

#include <ATen/core/ivalue.h>
#include <ATen/core/stack.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "client/encode.h"

namespace dtorch {

struct OutSpec {
  Geometry geometry;
  std::vector<uint8_t> wire;  // the same as it stands in a record
};

struct ReturnSpec {
  enum class Kind : uint8_t { New, List, Alias, None, Value } kind;
  int index;  // New, List: first of `outs`; Alias: argument; Value: of `values`
  int count;  // List
};

struct Rewrite {
  int arg;  // an out= argument that the operator resizes
  Dims sizes, strides;
};

struct Entry {
  bool ask = false;
  bool dynamic = false;  // with `ask`: depends on the data (GEO-3)
  c10::SmallVector<OutSpec, 1> outs;
  c10::SmallVector<ReturnSpec, 1> returns;
  std::vector<Rewrite> rewrites;
  std::vector<c10::IValue> values;  // plain results (OpInfo::values_follow)
};
using EntryPtr = std::shared_ptr<const Entry>;

// While it lives, operators on this thread only infer: nothing is sent, results are lazy.
class Inferring {
 public:
  // `structured`: the operator whose structured composite runs, or null. Its out= operator is given results of the right
  // size, empty ones included.
  explicit Inferring(const std::string* structured)
      : before_(active_), structured_before_(std::exchange(structured_, structured)) {
    active_ = true;
  }
  ~Inferring() {
    active_ = before_;
    structured_ = structured_before_;
  }
  static bool active() { return active_; }
  static bool sizes_known(const std::string& op) { return structured_ && *structured_ == op; }

 private:
  bool before_;
  const std::string* structured_before_;
  static thread_local __attribute__((tls_model("initial-exec"))) const std::string* structured_;
  static thread_local __attribute__((tls_model("initial-exec"))) bool active_;
};

// Thrown inside Inferring when an operator's results cannot be told here.
struct Uninferable : std::runtime_error {
  explicit Uninferable(bool dynamic_) : std::runtime_error("dtorch: only the worker can tell"), dynamic(dynamic_) {}
  bool dynamic;
};

// The cached entry for a key, or null.
const Entry* find_geometry(const OpInfo& info, const Buffer& key);
// Answers a miss from rule or composite kernel and remembers it; an entry with `ask` when neither can.
const Entry* infer_geometry(const OpInfo& info, const Buffer& key, at::ArrayRef<c10::IValue> args);
// Runs the operator on miniature CPU tensors here; false when it raises: then only the worker can tell.
bool rehearse(const OpInfo& info, at::ArrayRef<c10::IValue> args);
// For an operator with nothing to foretell (lists written in place): whether such a call may be a wrong one, because its first
// rehearsal raised. Then the worker is asked, and a call that it did is trusted from then on.
bool is_doubtful(const OpInfo& info, at::ArrayRef<c10::IValue> args);
void trust(const OpInfo& info, at::ArrayRef<c10::IValue> args);
// Remembers what the worker told.
void learn_geometry(const OpInfo& info, const Buffer& key, at::ArrayRef<c10::IValue> args, EntryPtr entry);

// Rule for an operator (rules.cpp): appends its results' specs, in order (and returns and rewrites, where they are not just
// new tensors); false when it does not apply.
using Rule = bool (*)(at::ArrayRef<c10::IValue> args, Entry& e);
Rule find_rule(const std::string& name, const std::string& overload);

struct GeometryStats {
  uint64_t misses = 0, asks = 0, miss_ns = 0, entries = 0;
};
GeometryStats geometry_stats();
void count_ask();  // a worker was asked about an operator on sparse tensors, which are not cached here

OutSpec make_spec(at::ScalarType dtype, c10::IntArrayRef sizes, c10::IntArrayRef strides);
OutSpec make_spec(const at::Tensor& like);

}  // namespace dtorch

// See sites.h. This file alone knows CPython's frame layout (3.11 to 3.13).
#define PY_SSIZE_T_CLEAN
#define Py_BUILD_CORE 1
#include <Python.h>
#include <internal/pycore_frame.h>
#undef Py_BUILD_CORE

#include "client/sites.h"

#include <ATen/SequenceNumber.h>
#include <ATen/record_function.h>
#include <torch/csrc/autograd/function.h>

#include <array>
#include <memory>
#include <deque>
#include <mutex>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

namespace dtorch::sites {

namespace {

constexpr int kMaxFrames = 64;    // how deep the walk goes to find the client's own code
constexpr int kBeyond = 3;        // frames hashed beyond the first own one
constexpr size_t kKeptFrames = kMaxFrames;  // frames kept per site: at least those that were hashed (SITE-1)

#if PY_VERSION_HEX >= 0x030D0000
_PyInterpreterFrame* top_frame(PyThreadState* t) { return t->current_frame; }
PyCodeObject* code_of(_PyInterpreterFrame* f) { return reinterpret_cast<PyCodeObject*>(f->f_executable); }
const void* place_of(_PyInterpreterFrame* f) { return f->instr_ptr; }
#else
_PyInterpreterFrame* top_frame(PyThreadState* t) { return t->cframe->current_frame; }
PyCodeObject* code_of(_PyInterpreterFrame* f) { return f->f_code; }
const void* place_of(_PyInterpreterFrame* f) { return f->prev_instr; }
#endif

bool is_python(_PyInterpreterFrame* f) {
#if PY_VERSION_HEX >= 0x030C0000
  return f->owner != FRAME_OWNED_BY_CSTACK;
#else
  (void)f;
  return true;
#endif
}

struct Kept {
  PyCodeObject* code;  // strong reference (SITE-1)
  int offset;          // in bytes
};
struct Site {
  std::vector<Kept> frames;
};

std::mutex mu;  // guards the tables below; the GIL is never taken while it is held
std::unordered_map<uint64_t, uint32_t> by_hash;
std::deque<Site> table(1);  // index is the site's number; 0 is unknown
std::unordered_map<PyCodeObject*, bool> library_code;
std::string prefixes[2];

// Ring from autograd's sequence number to the site of the forward op (SITE-2).
// Sequence numbers count per thread; the key holds both. A slot is written by the first operator after its node was made.
struct Made { uint64_t key; uint32_t site; };
constexpr size_t kRing = 1 << 16;
std::array<Made, kRing> made{};

// Per-thread memory of what the shared tables said: most lookups end here.
struct Cache {
  struct Code { PyCodeObject* code; bool library; };
  struct Hash { uint64_t hash; uint32_t site; };
  std::array<Code, 256> codes{};
  std::array<Hash, 256> hashes{};
};
Cache& cache() {
  static thread_local auto own = std::make_unique<Cache>();
  static thread_local __attribute__((tls_model("initial-exec"))) Cache* found = nullptr;
  if (__builtin_expect(!found, 0)) found = own.get();
  return *found;
}

uint64_t mix(uint64_t h, uint64_t v) {
  h = (h ^ v) * 0x9E3779B97F4A7C15ull;
  return h ^ (h >> 32);
}

bool classify(PyCodeObject* code) {
  auto& slot = cache().codes[(reinterpret_cast<uintptr_t>(code) >> 5) & 255];
  if (slot.code == code) return slot.library;
  {
    std::lock_guard lock(mu);
    auto it = library_code.find(code);
    if (it != library_code.end()) {
      slot = {code, it->second};
      return it->second;
    }
  }
  PyGILState_STATE gil = PyGILState_Ensure();
  Py_ssize_t n = 0;
  const char* name = PyUnicode_AsUTF8AndSize(code->co_filename, &n);
  if (!name) PyErr_Clear();
  std::string_view file(name ? name : "", name ? static_cast<size_t>(n) : 0);
  bool library = false;
  for (auto& p : prefixes) library = library || (!p.empty() && file.substr(0, p.size()) == p);
  library = library || file.substr(0, 8) == "<frozen ";
  Py_INCREF(code);
  PyGILState_Release(gil);
  std::lock_guard lock(mu);
  library_code.emplace(code, library);  // a race leaks one reference, no more
  slot = {code, library};
  return library;
}

uint32_t first_sight(uint64_t hash, _PyInterpreterFrame* frame) {
  Site site;
  PyGILState_STATE gil = PyGILState_Ensure();
  for (; frame && site.frames.size() < kKeptFrames; frame = frame->previous) {
    if (!is_python(frame)) continue;
    PyCodeObject* code = code_of(frame);
    Py_INCREF(code);
    auto offset = static_cast<const char*>(place_of(frame)) - reinterpret_cast<const char*>(_PyCode_CODE(code));
    site.frames.push_back({code, static_cast<int>(offset)});
  }
  PyGILState_Release(gil);
  std::lock_guard lock(mu);
  auto [it, is_new] = by_hash.emplace(hash, static_cast<uint32_t>(table.size()));
  if (is_new) table.push_back(std::move(site));
  return it->second;
}

uint64_t made_key(uint64_t sequence, uint64_t thread) { return sequence ^ (thread << 48); }
Made& made_slot(uint64_t sequence, uint64_t thread) { return made[(sequence + thread * 8191) % kRing]; }

uint32_t of_backward() {
  auto node = torch::autograd::get_current_node();
  if (!node) return kUnknown;
  uint64_t key = made_key(node->sequence_nr(), node->thread_id());
  auto& m = made_slot(node->sequence_nr(), node->thread_id());
  return m.key == key && m.site ? (m.site | kBackward) : kUnknown;
}

}  // namespace

void set_library_prefixes(const char* torch_dir, const char* dtorch_dir) {
  prefixes[0] = torch_dir;
  prefixes[1] = dtorch_dir;
}

uint32_t current() {
  PyThreadState* thread = PyGILState_GetThisThreadState();
  _PyInterpreterFrame* top = thread ? top_frame(thread) : nullptr;
  while (top && !is_python(top)) top = top->previous;
  if (!top) return of_backward();

  uint64_t hash = 1;
  int beyond = -1;
  int depth = 0;
  for (auto* f = top; f && depth < kMaxFrames; f = f->previous) {
    if (!is_python(f)) continue;
    ++depth;
    hash = mix(hash, reinterpret_cast<uintptr_t>(place_of(f)));
    if (beyond < 0 ? !classify(code_of(f)) : true)
      if (++beyond >= kBeyond) break;
  }
  auto& slot = cache().hashes[hash & 255];
  uint32_t site;
  if (slot.hash == hash) {
    site = slot.site;
  } else {
    site = 0;
    {
      std::lock_guard lock(mu);
      auto it = by_hash.find(hash);
      if (it != by_hash.end()) site = it->second;
    }
    if (!site) site = first_sight(hash, top);
    slot = {hash, site};
  }
  if (uint64_t next = at::sequence_number::peek()) {
    uint64_t thread = at::RecordFunction::currentThreadId(), key = made_key(next - 1, thread);
    auto& m = made_slot(next - 1, thread);
    if (m.key != key) m = {key, site};
  }
  return site;
}

PyObject* describe(uint32_t number) {
  std::vector<Kept> frames;
  {
    std::lock_guard lock(mu);
    number &= ~kBackward;
    if (number < table.size()) frames = table[number].frames;
  }
  PyObject* list = PyList_New(0);
  if (!list) return nullptr;
  for (auto& f : frames) {
    int line = PyCode_Addr2Line(f.code, f.offset);
    PyObject* row = Py_BuildValue("(OiO)", f.code->co_filename, line, f.code->co_name);
    if (!row || PyList_Append(list, row) < 0) {
      Py_XDECREF(row);
      Py_DECREF(list);
      return nullptr;
    }
    Py_DECREF(row);
  }
  return list;
}

}  // namespace dtorch::sites

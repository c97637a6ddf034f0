// What the worker notes of each record while dtorch.profile() records (common/trace.h).
//
// The shapes are read off the record and the store before the record runs, outside its time. Most records repeat shapes that
// were seen before: a key of the operator and its tensors' geometries finds their text, which is made once.
#include <ATen/core/jit_type.h>

#include <sstream>

#include "worker/executor.h"

namespace dtorch::worker {

namespace {

constexpr uint8_t kValue = 0, kTensor = 1, kTensors = 2;

// Per argument of an operator: a tensor, a list of them, or neither.
std::vector<uint8_t> tensors_of(const c10::FunctionSchema& schema) {
  std::vector<uint8_t> out;
  for (const auto& a : schema.arguments()) {
    auto type = a.real_type();
    if (type->kind() == c10::TypeKind::OptionalType) type = type->containedType(0);
    bool list = type->kind() == c10::TypeKind::ListType;
    auto element = list ? type->containedType(0) : type;
    if (element->kind() == c10::TypeKind::OptionalType) element = element->containedType(0);
    out.push_back(element->kind() != c10::TypeKind::TensorType ? kValue : list ? kTensors : kTensor);
  }
  return out;
}

// Collects tensors: a key for their dtypes and sizes, and their bytes.
struct Shapes {
  Store& store;
  std::string key{};
  uint64_t bytes = 0;

  void add(at::ScalarType dtype, c10::IntArrayRef sizes) {
    key.push_back('T');
    key.push_back(static_cast<char>(dtype));
    key.push_back(static_cast<char>(sizes.size()));
    key.append(reinterpret_cast<const char*>(sizes.data()), sizes.size() * sizeof(int64_t));
    uint64_t n = c10::elementSize(dtype);
    for (int64_t d : sizes) n *= static_cast<uint64_t>(d);
    bytes += n;
  }
  void tensor(mp::Reader& in) {
    if (in.kind() == mp::Kind::Int) {
      auto* s = store.find(in.uint());
      if (s && s->first.defined()) add(s->first.scalar_type(), s->first.sizes());
      else key.push_back('?');
    } else if (in.kind() == mp::Kind::Array) {
      size_t length = in.array();
      if (length != kViewLength) {
        for (size_t parts = read_sparse_head(in, length).parts.size(); parts-- > 0;) tensor(in);
        return;
      }
      in.uint();
      auto g = read_geometry(in);
      add(g.dtype, g.sizes);
    } else {
      key.push_back(in.kind() == mp::Kind::Nil ? '-' : 'n');  // a number of the CPU's
      in.skip();
    }
  }
  void arguments(const std::vector<uint8_t>& tensors, mp::Reader& in) {
    size_t n = in.array();
    for (size_t i = 0; i < n; ++i) {
      if (i >= tensors.size() || tensors[i] == kValue || (tensors[i] == kTensors && in.kind() != mp::Kind::Array)) in.skip();
      else if (tensors[i] == kTensor) tensor(in);
      else for (size_t k = in.array(); k-- > 0;) tensor(in);
    }
  }

  // "float32 (2, 3), int64 (5,)", read back from the key: whose shapes repeat pays for no text.
  std::string text() const {
    std::ostringstream out;
    const char* between = "";
    for (size_t i = 0; i < key.size();) {
      char tag = key[i++];
      if (tag == '-') continue;
      out << std::exchange(between, ", ");
      if (tag != 'T') {
        out << (tag == 'n' ? "number" : "?");
        continue;
      }
      out << c10::getDtypeNames(static_cast<at::ScalarType>(key[i++])).first << " (";
      size_t dims = static_cast<uint8_t>(key[i++]);
      for (size_t d = 0; d < dims; ++d, i += sizeof(int64_t)) {
        int64_t size;
        std::memcpy(&size, &key[i], sizeof size);
        out << (d ? ", " : "") << size;
      }
      out << (dims == 1 ? ",)" : ")");
    }
    return out.str();
  }
};

}  // namespace

// Fills in what the record says of itself. Records that name what was never defined, or a storage that is not there, are
// for the record's own code to complain about.
void Executor::describe_record(mp::Reader in, TraceEvent& e) {
  in.array();
  auto kind = static_cast<Record>(in.integer());
  in.skip();
  e.kind = static_cast<uint8_t>(kind);
  e.worker = -1;
  Shapes shapes{store_};
  auto arguments = [&](uint64_t number, mp::Reader& from) {
    e.name = static_cast<uint32_t>(number);
    auto* op = number < operators_.size() ? operators_[number].get() : nullptr;
    if (!op) return;
    if (op->tensors.empty()) op->tensors = tensors_of(op->handle.schema());
    shapes.arguments(op->tensors, from);
  };
  auto geometry = [&] {
    auto g = read_geometry(in);
    shapes.add(g.dtype, g.sizes);
  };
  auto small = [](uint64_t v) { return static_cast<uint32_t>(v); };
  switch (kind) {
    case Record::OP: {
      uint64_t number = in.uint();
      e.site = small(in.uint());
      arguments(number, in);
      break;
    }
    case Record::ASK: {
      e.link = in.uint();
      uint64_t number = in.uint();
      e.site = small(in.uint());
      arguments(number, in);
      break;
    }
    case Record::ALLOC:
    case Record::PUT:
    case Record::MAP: in.skip(), geometry(); break;
    case Record::READ:
      e.link = in.uint();
      in.skip();
      geometry();
      break;
    case Record::FETCH:
      e.link = in.uint();
      e.site = small(in.uint());
      shapes.tensor(in);
      break;
    case Record::SEND:
      e.link = in.uint();
      e.worker = static_cast<int8_t>(in.uint());
      e.site = small(in.uint());
      shapes.tensor(in);
      break;
    case Record::RECV:
      e.link = in.uint();
      e.worker = static_cast<int8_t>(in.uint());
      e.site = small(in.uint());
      in.skip();
      geometry();
      break;
    case Record::SYNC:
    case Record::RNG_GET:
    case Record::EVENT:
    case Record::STATS: e.link = in.uint(); break;
    default: break;
  }
  e.bytes = shapes.bytes;
  if (!shapes.key.empty()) e.detail = trace_.text(shapes.key, [&] { return shapes.text(); });
}

void Executor::execute_traced(mp::Reader& in) {
  TraceEvent e{};
  describe_record(in, e);
  e.number = executed_ + 1;
  e.start = now_ns();
  execute(in);
  e.end = now_ns();
  // The recording's own questions are among those; the record that ends it has cleared the log.
  if (trace_.on() && e.kind != static_cast<uint8_t>(Record::STATS)) trace_.add(e);
}

void Executor::note_wait(Trace kind, uint64_t start, uint64_t link, int peer) {
  if (!trace_.on()) return;
  TraceEvent e{};
  e.kind = static_cast<uint8_t>(kind);
  e.start = start;
  e.end = now_ns();
  e.number = executed_ + 1;
  e.link = link;
  e.worker = static_cast<int8_t>(peer);
  trace_.add(e);
}

// The result of a STATS `trace`: stops, and hands the oldest events over.
void Executor::put_trace(Buffer& b) {
  trace_.stop();
  auto events = trace_.take();
  mp::put_array(b, 3);
  put_events(b, events);
  mp::put_uint(b, trace_.dropped());
  if (!events.empty()) return mp::put_array(b, 0);
  mp::put_array(b, trace_.texts().size());
  for (const auto& text : trace_.texts()) mp::put_str(b, text);
  trace_.clear();
}

}  // namespace dtorch::worker

// What each record does (executor.h has the class, protocol.py the fields).
#include <ATen/Context.h>
#include <ATen/EmptyTensor.h>
#include <ATen/Parallel.h>
#include <ATen/core/Generator.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/InferenceMode.h>

#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <sstream>
#include <typeinfo>

#include "common/machine.h"
#include "worker/executor.h"
#include "worker/device_python.h"
#include "worker/memory.h"
#include "worker/pool.h"
#include "worker/python.h"
#include "worker/small.h"
#include "worker/staging.h"

namespace dtorch::worker {

namespace {

// The name under which the client raises it again.
const char* type_of(const std::exception& e) {
  if (dynamic_cast<const c10::IndexError*>(&e)) return "IndexError";
  if (dynamic_cast<const c10::ValueError*>(&e)) return "ValueError";
  if (dynamic_cast<const c10::TypeError*>(&e)) return "TypeError";
  if (dynamic_cast<const c10::NotImplementedError*>(&e)) return "NotImplementedError";
  if (dynamic_cast<const c10::OutOfMemoryError*>(&e)) return "OutOfMemoryError";
  if (dynamic_cast<const c10::LinAlgError*>(&e)) return "LinAlgError";
  if (dynamic_cast<const std::bad_alloc*>(&e)) return "OutOfMemoryError";
  return "RuntimeError";
}

std::string text_of(const std::exception& e) {
  if (auto* c = dynamic_cast<const c10::Error*>(&e)) return c->what_without_backtrace();
  return e.what();
}

// An error that the device reported, which may have been made long before.
bool is_device_error(const std::exception& e) {
  return dynamic_cast<const c10::AcceleratorError*>(&e) || std::string_view(e.what()).find("CUDA error") != std::string_view::npos;
}
constexpr const char* kLostHint =
    "\nThe GPU works behind the program: an earlier operator than this may be at fault. CUDA_LAUNCH_BLOCKING=1 in the environment "
    "finds it. This worker cannot go on and ends";

// A tensor's memory as it is when it is dense, else packed row-major: what FETCH and SEND hand over.
at::Tensor handed_over(const at::Tensor& t) {
  if (t.is_conj() || t.is_neg()) return t.resolve_conj().resolve_neg().contiguous();
  return t.is_non_overlapping_and_dense() ? t : t.contiguous();
}

// Descriptors of adopted segments are kept, so that they can be lent, up to half of what the process may have.
std::atomic<size_t> kept_descriptors{0};
size_t most_descriptors() {
  static const size_t most = [] {
    rlimit limit{};
    getrlimit(RLIMIT_NOFILE, &limit);
    limit.rlim_cur = limit.rlim_max;
    setrlimit(RLIMIT_NOFILE, &limit);
    return static_cast<size_t>(std::min<rlim_t>(limit.rlim_cur, 1 << 20)) / 2;
  }();
  return most;
}

struct EndUnlessGone {
  Mapping& mapping;
  ~EndUnlessGone() { mapping.end(); }
};

// A new tensor on the host, from where it can be copied to the device.
at::Tensor host_empty(const Geometry& g) {
  return on_host() ? at::detail::empty_strided_cpu(g.sizes, g.strides, g.dtype) : stage(g);
}

// A new tensor with the bytes of a part of another process's file or segment. Read, not mapped: the file may be cut short
// meanwhile, which must be an error and no SIGBUS; and mapping costs a fault for every page. Large parts are read by as many
// threads as an operator has.
at::Tensor read_tensor(const Geometry& g, int pid, int fd, size_t offset, size_t n) {
  constexpr int64_t kPart = 8 << 20;
  Descriptor file(pid, fd, O_RDONLY);
  at::Tensor t = host_empty(g);
  size_t size = static_cast<size_t>(t.numel()) * static_cast<size_t>(t.element_size());
  TORCH_CHECK(n == size, "a value of ", size, " bytes came with ", n);
  auto* data = static_cast<char*>(t.mutable_data_ptr());
  auto total = static_cast<int64_t>(n);
  at::parallel_for(0, (total + kPart - 1) / kPart, 1, [&](int64_t begin, int64_t end) {
    int64_t from = begin * kPart, to = std::min(end * kPart, total);
    read_all(file.fd, data + from, static_cast<size_t>(to - from), offset + static_cast<size_t>(from));
  });
  return t;
}

void put_geometry(Buffer& b, const at::Tensor& t) { dtorch::put_geometry(b, t.scalar_type(), t.sizes(), t.strides()); }

std::string describe(const at::Tensor& t) {
  std::ostringstream out;
  worker::describe(out, t.scalar_type(), t.sizes());
  return out.str();
}

// A TRANSFER up to its payload.
void begin_transfer(Buffer& b, uint64_t transfer, int source, uint64_t dest) {
  mp::put_array(b, 5);
  b.push(static_cast<uint8_t>(Message::TRANSFER));
  mp::put_uint(b, transfer);
  mp::put_int(b, source);
  mp::put_uint(b, dest);
}

size_t bytes_of(const at::Tensor& t) { return static_cast<size_t>(t.numel()) * static_cast<size_t>(t.element_size()); }

}  // namespace

void Executor::end_borrowed(void* b) { delete static_cast<Borrowed*>(b); }

// --- failures --------------------------------------------------------------------------------------------------------

CausePtr Executor::make_cause(const char* kind, const std::string& type, const std::string& message, const std::string& op,
                              const std::string& shapes, uint64_t site) {
  Buffer b;
  mp::put_array(b, 8);
  mp::put_str(b, kind);
  mp::put_str(b, type);
  mp::put_str(b, message);
  mp::put_str(b, op);
  mp::put_str(b, shapes);
  mp::put_uint(b, site);
  mp::put_int(b, worker_);
  std::string_view(kind) == "memory" ? put_largest(b) : mp::put_nil(b);
  auto c = std::make_shared<Cause>();
  c->error.assign(reinterpret_cast<const char*>(b.data()), b.size());
  return c;
}

CausePtr Executor::cause_of(const char* kind, const std::string& op, const std::string& shapes, uint64_t site) {
  try {
    throw;
  } catch (const mp::FormatError&) {
    throw;  // the stream cannot be trusted any more (EXE-4)
  } catch (const std::exception& e) {
    if (auto raised = python_error_of(e)) return make_cause(kind, raised->type, raised->message, op, shapes, site);
    std::string type = type_of(e);
    if (__builtin_expect(!on_host(), 0) && is_device_error(e) && !lost_ && !still_works()) {
      lost_ = make_cause(kind, type, text_of(e) + kLostHint, op, shapes, site);
      return lost_;
    }
    return make_cause(type == "OutOfMemoryError" ? "memory" : kind, type, text_of(e), op, shapes, site);
  } catch (...) {
    return make_cause(kind, "RuntimeError", "it threw what is no std::exception", op, shapes, site);
  }
}

// What holds the memory: the largest storages, [bytes, shape, site] each.
void Executor::put_largest(Buffer& b) {
  std::vector<std::pair<size_t, const Slot*>> all;
  for (auto& [id, slot] : store_)
    if (slot.first.defined()) all.emplace_back(slot.first.storage().nbytes(), &slot);
  size_t n = std::min<size_t>(all.size(), 10);
  std::partial_sort(all.begin(), all.begin() + static_cast<ptrdiff_t>(n), all.end(),
                    [](auto& x, auto& y) { return x.first > y.first; });
  mp::put_array(b, n);
  for (size_t i = 0; i < n; ++i) {
    mp::put_array(b, 3);
    mp::put_uint(b, all[i].first);
    mp::put_str(b, describe(all[i].second->first));
    mp::put_uint(b, all[i].second->site);
  }
}

void Executor::note_failure(const CausePtr& cause) {
  if (!cause->reported) failures_.push_back(cause);
  constexpr size_t kKept = 1000;  // unreported causes; the first ones matter
  if (failures_.size() > kKept) failures_.pop_back();
}

void Executor::poison(uint64_t storage, const CausePtr& cause) {
  note_failure(cause);
  store_.poison(storage, cause);
}

void Executor::answer_error(uint64_t request, const CausePtr& cause) {
  cause->reported = true;
  lost_told_ |= cause == lost_ && lost_;
  out_.clear();
  mp::put_array(out_, 4);
  out_.push(static_cast<uint8_t>(Message::ERROR));
  mp::put_uint(out_, request);
  mp::put_int(out_, worker_);
  out_.append(cause->error.data(), cause->error.size());
  answer(out_);
}

void Executor::answer_done(uint64_t request) {
  out_.clear();
  mp::put_array(out_, 4);
  out_.push(static_cast<uint8_t>(Message::DONE));
  mp::put_uint(out_, request);
  mp::put_int(out_, worker_);
  mp::put_nil(out_);
  answer(out_);
}

// --- operators -------------------------------------------------------------------------------------------------------

void Executor::execute(mp::Reader& in) {
  if (__builtin_expect(on_host(), 1)) return perform(in);
  if (lost_) return refuse(in, lost_);
  mp::Reader start = in;
  try {
    perform(in);
  } catch (...) {  // of the device's own calls, which fail where the CPU's cannot
    auto cause = cause_of("internal", "a record", "", 0);
    note_failure(cause);
    in = start;
    refuse(in, cause);
  }
}

void Executor::perform(mp::Reader& in) {
  in.array();
  auto kind = static_cast<Record>(in.integer());
  in.integer();  // the worker: the controller has routed by it
  switch (kind) {
    case Record::OP: return op(in);
    case Record::DEFINE_OP: return define_op(in);
    case Record::ALLOC: return alloc(in);
    case Record::PUT: return put(in);
    case Record::MAP: return map(in);
    case Record::FETCH: return fetch(in);
    case Record::ASK: return ask(in);
    case Record::SEND: return send_tensor(in);
    case Record::RECV: return recv_tensor(in);
    case Record::SEED: return seed(in);
    case Record::RNG_GET: return rng_get(in);
    case Record::RNG_SET: return rng_set(in);
    case Record::SYNC: return sync(in);
    case Record::RESIZE: return resize(in);
    case Record::STATS: return stats(in);
    case Record::OPTION: return option(in);
    case Record::EVENT: return event(in);
    case Record::READ: return read(in);
    case Record::IMPORT: return import(in);
    case Record::RELEASE: break;  // never in a batch's records: the controller takes them out
  }
  throw mp::FormatError("the worker has no use for record " + std::to_string(static_cast<int>(kind)));
}

Operator& Executor::operator_at(uint64_t number) {
  if (number < operators_.size() && operators_[number]) return *operators_[number];
  auto it = unknown_.find(number);
  TORCH_CHECK(it != unknown_.end(), "operator ", number, " was never defined (a bug of dtorch)");
  auto handle = c10::Dispatcher::singleton().findSchema(it->second);  // imported since?
  TORCH_CHECK_NOT_IMPLEMENTED(handle, "worker ", worker_, " has no operator ", it->second, ": no module imported there defines "
                              "it. Call dtorch.import_on_workers(\"MODULE\") with the name of the Python module that does");
  unknown_.erase(it);
  operators_[number] = std::make_unique<Operator>(*handle);
  return *operators_[number];
}

void Executor::define_op(mp::Reader& in) {
  uint64_t number = in.uint();
  std::string name(in.str()), overload(in.str());
  if (number >= 1u << 20) throw mp::FormatError("operator number out of range");
  if (operators_.size() <= number) operators_.resize(number + 64);
  auto handle = c10::Dispatcher::singleton().findSchema({name, overload});
  // Unknown here (a custom operator of a module the worker has not imported): using it fails, defining it does not.
  if (handle) operators_[number] = std::make_unique<Operator>(*handle);
  else unknown_.insert_or_assign(number, c10::OperatorName(name, overload));
}

void Executor::made(uint64_t storage, at::Tensor t, uint64_t site) {
  auto s = static_cast<uint32_t>(site);
  if (__builtin_expect(log_allocations_, 0))
    log_.push_back({executed_ + 1, storage, static_cast<int64_t>(t.storage().nbytes()), s, now_ns()});
  store_.put(storage, std::move(t), s);
}

// The tensor whose memory the operator's result may take (EXE-4), or none, as far as the record tells: it dies here and has
// the result's geometry. Whether an argument is a view of it shows when the arguments are decoded.
at::Tensor Executor::find_donor(const Operator& op, mp::Reader args, uint64_t* id) {
  mp::Reader first = args;
  args.skip();
  if (args.array() != 1) return {};
  args.array();
  args.skip();
  auto g = read_geometry(args);
  // Complex kernels' compiled loops depend on whether they write what they read: the last bit may differ.
  if (c10::isComplexType(g.dtype)) return {};
  if (op.donation == Operator::Donation::InPlace) {
    first.array();
    if (first.kind() != mp::Kind::Int) return {};
  }
  for (int32_t at = dying_at(*batches_.front(), executed_ + 1); at >= 0; at = dying_[static_cast<size_t>(at)].next) {
    *id = dying_[static_cast<size_t>(at)].storage;
    if (op.donation == Operator::Donation::InPlace && mp::Reader(first).uint() != *id) continue;
    auto* slot = store_.find(*id);
    if (!slot || !slot->first.defined()) continue;
    const auto& t = slot->first;
    auto* impl = t.unsafeGetTensorImpl();
    if (t.scalar_type() == g.dtype && g.offset == 0 && g.flags == 0 && impl->sizes() == c10::IntArrayRef(g.sizes) &&
        impl->strides() == c10::IntArrayRef(g.strides) && t.numel() > 0 && impl->is_non_overlapping_and_dense() &&
        t.storage().nbytes() == bytes_of(t) && t.storage().data_ptr().get_deleter() != &end_borrowed && sole(t))
      return t;
  }
  return {};
}

void Executor::op(mp::Reader& in) {
  uint64_t number = in.uint(), site = in.uint();
  mp::Reader args = in;
  CausePtr cause;
  made_.clear();
  uint64_t small_before = small_calls();
  at::Tensor donor;
  uint64_t donor_id = 0;
  Operator* op = number < operators_.size() ? operators_[number].get() : nullptr;
  try {
    if (executed_ + 1 == received_ && lookahead_ns_ && on_host()) look_ahead(args);
    Decoder d(in, store_, generators_);
    if (__builtin_expect(!op, 0)) op = &operator_at(number);
    if (op->twin && dying_at(*batches_.front(), executed_ + 1) >= 0) donor = find_donor(*op, args, &donor_id);
    if (__builtin_expect(!loans_.empty(), 0) && !op->mutates.empty())
      for (uint64_t storage : storages_of(op->handle.schema(), op->mutates, args)) before_write(storage);
    std::optional<at::AutoGradMode> gradients;
    if (__builtin_expect(op->reads_grad_mode, 0)) gradients.emplace(grad_mode_);
    auto run = [&] {
      if (op->unboxed) return op->unboxed(d, donor.defined() ? &donor : nullptr, made_);
      torch::jit::Stack stack;
      call_boxed(*op, d, stack, donor.defined() ? &donor : nullptr, made_);
    };
    for (;;) {
      try {
        run();
        break;
      } catch (const c10::OutOfMemoryError&) {
        // On the host the allocator itself waits for releases (memory.h). What writes its arguments is not done twice.
        if (on_host() || !op->mutates.empty() || !await_releases()) throw;
      }
      in = args;
      made_.clear();
    }
    cause = d.poison();
  } catch (...) {
    cause = cause_of("op", op ? op->name : "an unknown operator", op ? describe_arguments(*op, args, store_) : "()", site);
    note_failure(cause);
    in = args;
    in.skip();
  }
  light_ = small_calls() != small_before;
  if (donor.defined() && made_.size() == 1 && made_[0].is_same(donor)) {  // the same memory under another name
    ++donations_;
    if (__builtin_expect(log_allocations_, 0)) log_.push_back({executed_ + 1, donor_id, -1, 0, now_ns()});
    store_.erase(donor_id);
  }
  size_t n = in.array();
  if (!cause && n != made_.size())
    cause = make_cause(op->custom ? "op" : "internal", "RuntimeError",
                       "gave " + std::to_string(made_.size()) + " results where " + std::to_string(n) +
                           (op->custom ? " are what its fake kernel says" : " were predicted"),
                       op->name, describe_arguments(*op, args, store_), site);
  for (size_t i = 0; i < n; ++i) {
    in.array();
    uint64_t storage = in.uint();
    auto geometry = read_geometry(in);
    if (!cause) {
      try {
        made(storage, conform(*op, std::move(made_[i]), geometry), site);
        continue;
      } catch (...) {
        cause = cause_of(op->custom ? "op" : "internal", op->name, describe_arguments(*op, args, store_), site);
        note_failure(cause);
      }
    }
    store_.poison(storage, cause);
  }
  made_.clear();
  if (__builtin_expect(cause != nullptr, 0) && op)
    for (uint64_t storage : storages_of(op->handle.schema(), op->mutates, args)) store_.poison(storage, cause);
}

void Executor::ask(mp::Reader& in) {
  uint64_t request = in.uint(), number = in.uint(), site = in.uint();
  mp::Reader args = in;
  CausePtr cause;
  torch::jit::Stack stack;
  std::vector<at::Tensor> fresh;
  std::vector<c10::IValue> written;
  // Of sparse results and of sparse arguments that were written: what they are made of, and the storages among the arguments
  // that this may be, which keep their numbers.
  std::unordered_map<const at::TensorImpl*, Sparse> apart;
  std::unordered_map<const c10::StorageImpl*, uint64_t> storages;
  Operator* op = number < operators_.size() ? operators_[number].get() : nullptr;
  try {
    Decoder d(in, store_, generators_);
    op = &operator_at(number);
    std::optional<at::AutoGradMode> gradients;
    if (op->reads_grad_mode) gradients.emplace(grad_mode_);
    if (!loans_.empty())
      for (uint64_t storage : storages_of(op->handle.schema(), op->mutates, args)) before_write(storage);
    call_boxed(*op, d, stack, nullptr, fresh, &written);
    cause = d.poison();
  } catch (...) {
    cause = cause_of("call", op ? op->name : "an unknown operator", op ? describe_arguments(*op, args, store_) : "()", site);
  }
  in = args;
  in.skip();
  uint64_t next = in.uint();
  if (!cause) {
    try {
      auto take = [&](const at::Tensor& t) {
        if (!is_sparse(t) || apart.count(t.unsafeGetTensorImpl())) return;
        if (storages.empty())
          for (uint64_t id : storages_of(op->handle.schema(), tensor_arguments(op->handle.schema()), args))
            storages.emplace(store_.at(id).first.storage().unsafeGetStorageImpl(), id);
        auto& s = apart[t.unsafeGetTensorImpl()] = take_apart(t);
        for (auto& part : s.parts) {
          require_plain(*op, part);
          auto* storage = part.storage().unsafeGetStorageImpl();
          // Two parts of one new storage, or a part that something else has too, would be one storage under two numbers.
          if (!storages.count(storage) && (!sole(part) || part.use_count() > 2)) part = part.clone();
        }
      };
      for (const auto& t : fresh) is_sparse(t) ? take(t) : require_plain(*op, t);
      for (const auto& v : written) {
        if (v.isTensor()) take(v.toTensor());
        if (v.isTensorList())
          for (const auto& t : v.toTensorVector()) take(t);
      }
    } catch (...) {
      cause = cause_of("call", op->name, describe_arguments(*op, args, store_), site);
    }
  }
  if (cause) return answer_error(request, cause);

  Buffer b;
  mp::put_array(b, 4);
  b.push(static_cast<uint8_t>(Message::META));
  mp::put_uint(b, request);
  mp::put_int(b, worker_);
  mp::put_array(b, stack.size() + 1);
  auto give_dense = [&](const at::Tensor& t) {
    auto g = geometry_of(t);
    mp::put_array(b, 2);
    mp::put_uint(b, next);
    dtorch::put_geometry(b, g.dtype, g.sizes, g.strides, g.offset, g.flags);
    made(next++, g.offset || g.flags ? view_of(t, first_of(g)) : t, site);
  };
  auto give_sparse = [&](const at::Tensor& t) {
    const auto& s = apart.at(t.unsafeGetTensorImpl());
    put_sparse_head(b, s);
    for (const auto& part : s.parts) {
      auto of_argument = storages.find(part.storage().unsafeGetStorageImpl());
      if (of_argument == storages.end()) {
        give_dense(part);
        continue;
      }
      auto g = geometry_of(part);
      mp::put_array(b, 2);
      mp::put_uint(b, of_argument->second);
      dtorch::put_geometry(b, g.dtype, g.sizes, g.strides, g.offset, g.flags);
    }
  };
  auto give = [&](const at::Tensor& t) {
    if (!t.defined()) mp::put_nil(b);
    else is_sparse(t) ? give_sparse(t) : give_dense(t);
  };
  for (size_t i = 0; i < stack.size(); ++i) {
    const auto& v = stack[i];
    if (op->result_alias[i] || v.isNone()) {
      mp::put_nil(b);
    } else if (v.isTensor()) {
      give(v.toTensor());
    } else if (v.isTensorList()) {
      auto list = v.toTensorVector();
      mp::put_array(b, list.size());
      for (auto& t : list) give(t);
    } else if (v.isBool()) {
      mp::put_bool(b, v.toBool());
    } else if (v.isInt()) {
      mp::put_int(b, v.toInt());
    } else if (v.isDouble()) {
      mp::put_double(b, v.toDouble());
    } else if (v.isString()) {
      mp::put_str(b, v.toStringRef());
    } else if (v.isComplexDouble()) {
      auto c = v.toComplexDouble();
      double parts[2] = {c.real(), c.imag()};
      mp::put_ext(b, static_cast<int8_t>(Ext::COMPLEX), parts, sizeof parts);
    } else {
      return answer_error(request, make_cause("internal", "NotImplementedError",
                                              "gives a " + v.tagKind() + ", which dtorch cannot send back", op->name, "", site));
    }
  }
  // Where the operator resized what it was given to write, the client must follow.
  mp::put_array(b, written.size());
  for (const auto& v : written) {
    std::vector<at::Tensor> tensors;
    if (v.isTensorList()) tensors = v.toTensorVector();
    else if (v.isTensor()) tensors.push_back(v.toTensor());
    mp::put_array(b, tensors.size());
    for (const auto& t : tensors) {
      if (!t.defined()) mp::put_nil(b);
      else if (is_sparse(t)) give_sparse(t);
      else put_geometry(b, t);
    }
  }
  answer(b);
}

// --- making and handing over -------------------------------------------------------------------------------------------

void Executor::alloc(mp::Reader& in) {
  uint64_t storage = in.uint();
  auto g = read_geometry(in);
  size_t nbytes = in.uint();
  uint64_t site = in.uint();
  try {
    at::Tensor t = make_empty(g);
    if (nbytes > t.storage().nbytes()) t = view_of(make_bytes(nbytes, computing.device), g);
    made(storage, t, site);
  } catch (...) {
    poison(storage, cause_of("internal", "an allocation", "(" + std::to_string(nbytes) + " bytes)", site));
  }
}

void Executor::put(mp::Reader& in) {
  uint64_t storage = in.uint();
  auto g = read_geometry(in);
  auto bytes = in.bin();
  uint64_t site = in.uint();
  try {
    at::Tensor t = host_empty(g);
    TORCH_CHECK(bytes.size() == bytes_of(t), "a value of ", bytes_of(t), " bytes came with ", bytes.size());
    std::memcpy(t.mutable_data_ptr(), bytes.data(), bytes.size());
    made(storage, to_device(t, site), site);
  } catch (...) {
    poison(storage, cause_of("internal", "an upload", "", site));
  }
}

Executor::Adopted::Adopted(Executor* executor_, const Mapping& map_, uint64_t spare_)
    : executor(executor_), map(map_), spare(spare_) {
  kept_descriptors += map.fd >= 0;
}

Executor::Adopted::~Adopted() {
  kept_descriptors -= map.fd >= 0;
  disown_memory(map.size);
  map.end();
  if (spare) executor->returned_.add(spare, kClient);
}

void Executor::map(mp::Reader& in) {
  uint64_t storage = in.uint();
  auto g = read_geometry(in);
  int pid = static_cast<int>(in.integer()), fd = static_cast<int>(in.integer());
  size_t offset = in.uint(), n = in.uint();
  bool lent = in.boolean();
  uint64_t spare = in.uint(), site = in.uint();
  try {
    if (lent || !on_host()) {  // an accelerator copies from page-locked memory, behind whatever it computes
      made(storage, to_device(read_tensor(g, pid, fd, offset, n), site), site);
      if (spare) returned_.add(spare, kClient);
      return;
    }
    bool keep = kept_descriptors < most_descriptors();
    auto segment = open_segment(pid, fd, offset, n, Sharing::Owned, keep);
    EndUnlessGone end{segment};
    adopt_memory(n);
    auto* adopted = new Adopted(this, segment, std::exchange(spare, 0));
    segment = {};
    made(storage, adopt({adopted->map.data, adopted, &Adopted::end, c10::Device(c10::DeviceType::CPU)}, n, g), site);
  } catch (...) {
    if (spare) returned_.add(spare, kClient);
    poison(storage, cause_of("internal", "an upload", "", site));
  }
}

void Executor::read(mp::Reader& in) {
  uint64_t request = in.uint(), storage = in.uint();
  auto g = read_geometry(in);
  int pid = static_cast<int>(in.integer()), fd = static_cast<int>(in.integer());
  size_t offset = in.uint(), n = in.uint();
  uint64_t site = in.uint();
  try {
    made(storage, to_device(read_tensor(g, pid, fd, offset, n), site), site);
  } catch (...) {
    auto cause = cause_of("op", "reading a file", "(" + std::to_string(n) + " bytes from byte " + std::to_string(offset) + ")", site);
    store_.poison(storage, cause);
    return answer_error(request, cause);  // the one who asks for the file is told; nobody else
  }
  answer_done(request);
}

// Where a tensor's bytes can be mapped by others: the pool, or an adopted segment. False for other workers' memory.
bool Executor::shared_part(const at::Tensor& t, int* fd, size_t* offset) {
  const void* data = t.const_data_ptr();
  if (pool().contains(data)) {
    *fd = pool().fd();
    *offset = pool().offset_of(data);
    return true;
  }
  const auto& owner = t.storage().data_ptr();
  if (staged_part(owner, data, fd, offset)) return true;
  if (owner.get_deleter() != &Adopted::end) return false;
  const auto& map = static_cast<const Adopted*>(owner.get_context())->map;
  *fd = map.fd;
  *offset = static_cast<size_t>(static_cast<const char*>(data) - static_cast<const char*>(map.data));
  return map.fd >= 0;
}

// Appends a payload: the bytes, or the shared memory where they lie, lent until the reader releases the token. `t` is
// dense. What cannot be mapped by others is copied into the pool, and so is what would keep a much larger storage alive.
void Executor::payload(Buffer& b, at::Tensor t, bool to_peer) {
  size_t n = bytes_of(t), offset = 0;
  int fd = -1;
  if (n <= kInlineBytes) return mp::put_bin(b, n ? t.const_data_ptr() : "", n);
  bool copied = t.storage().nbytes() / 2 > n || !shared_part(t, &fd, &offset);
  if (copied) {
    t = t.clone(at::MemoryFormat::Preserve);
    shared_part(t, &fd, &offset);
  }
  mp::put_array(b, 5);
  mp::put_int(b, getpid());
  mp::put_int(b, fd);
  mp::put_uint(b, offset);
  mp::put_uint(b, n);
  mp::put_uint(b, lend(t.storage(), to_peer));
  if (copied) leave_to_client(t.storage().unsafeGetStorageImpl());  // no tensor here has it
}

void Executor::value(uint64_t request, const at::Tensor& t) {
  Buffer b;
  mp::put_array(b, 5);
  b.push(static_cast<uint8_t>(Message::VALUE));
  mp::put_uint(b, request);
  mp::put_int(b, worker_);
  put_geometry(b, t);
  payload(b, t, /*to_peer=*/false);
  answer(b);
}

void Executor::fetch(mp::Reader& in) {
  uint64_t request = in.uint(), site = in.uint();
  CausePtr cause;
  mp::Reader start = in;
  try {
    Decoder d(in, store_, generators_);
    auto t = d.tensor();
    cause = d.poison();
    if (!cause) {
      t = handed_over(t);
      if (t.is_cpu()) return value(request, t);
      return fetch_from_device(t, site, [this, request](const at::Tensor& host, const CausePtr& lost) {
        lost ? answer_error(request, lost) : answer_value(request, host);
      });
    }
  } catch (...) {
    cause = cause_of("internal", "fetching a value", "", site);
    in = start;
    in.skip();
  }
  answer_error(request, cause);
}

void Executor::answer_value(uint64_t request, const at::Tensor& t) {
  CausePtr cause;
  try {
    return value(request, t);
  } catch (...) {
    cause = cause_of("internal", "fetching a value", "", 0);
  }
  answer_error(request, cause);
}

// A large tensor in a GPU's memory, for a worker that can map that; false where it has to go through the host's.
bool Executor::device_payload(Buffer& b, const at::Tensor& t, int dest) {
  size_t n = bytes_of(t);
  if (n <= kInlineBytes) return false;
  auto lent = lend_device_memory(t.const_data_ptr(), n, dest);
  if (!lent) return false;
  for (auto& [peer, handles] : freed_allocations())
    if (!dead_peers_.count(peer)) tell_freed(peer, handles);
  mp::put_array(b, 6);
  mp::put_int(b, lent->device);
  mp::put_bin(b, lent->handle.data(), lent->handle.size());
  mp::put_uint(b, lent->offset);
  mp::put_bin(b, lent->event.data(), lent->event.size());
  mp::put_uint(b, n);
  mp::put_uint(b, lend(t.storage(), /*to_peer=*/true));
  return true;
}

void Executor::send_tensor(mp::Reader& in) {
  uint64_t transfer = in.uint(), dest = in.uint(), site = in.uint();
  CausePtr cause;
  mp::Reader start = in;
  Buffer b;
  begin_transfer(b, transfer, worker_, dest);
  try {
    Decoder d(in, store_, generators_);
    auto t = d.tensor();
    cause = d.poison();
    if (!cause) {
      t = handed_over(t);
      if (!t.is_cpu() && !device_payload(b, t, static_cast<int>(dest)))
        return fetch_from_device(t, site, [this, transfer, dest, site, b = std::make_shared<Buffer>(std::move(b))](
                                        const at::Tensor& host, const CausePtr& lost) {
          CausePtr cause = lost;
          try {
            if (!cause) payload(*b, host, /*to_peer=*/true);
          } catch (...) {
            cause = cause_of("internal", "a copy between workers", "", site);
          }
          cause ? send_cause(transfer, dest, cause) : reply(*b);
        });
      if (t.is_cpu()) payload(b, t, /*to_peer=*/true);
    }
  } catch (...) {
    cause = cause_of("internal", "a copy between workers", "", site);
    in = start;
    in.skip();
  }
  cause ? send_cause(transfer, dest, cause) : reply(b);
}

void Executor::send_cause(uint64_t transfer, uint64_t dest, const CausePtr& cause) {
  Buffer b;
  begin_transfer(b, transfer, worker_, dest);
  b.append(cause->error.data(), cause->error.size());
  reply(b);
}

void Executor::recv_tensor(mp::Reader& in) {
  uint64_t transfer = in.uint();
  int source = static_cast<int>(in.integer());
  uint64_t site = in.uint(), storage = in.uint();
  auto g = read_geometry(in);
  auto it = incoming_.find(transfer);
  uint64_t began = it == incoming_.end() && trace_.on() ? now_ns() : 0;
  while (it == incoming_.end()) {
    auto dead = dead_peers_.find(source);
    if (dead != dead_peers_.end()) {
      auto cause = make_cause("peer", "WorkerDied", dead->second, "a copy between workers", "", site);
      return poison(storage, cause);
    }
    if (returned_.any()) return_borrowed();
    if (exit_ || lost_ || !wait_readable()) return;
    drain();
    it = incoming_.find(transfer);
  }
  if (began) note_wait(Trace::AWAIT_PEER, began, transfer, source);
  auto payload = std::move(it->second.payload);
  incoming_.erase(it);
  try {
    mp::Reader p(payload.data(), payload.size());
    if (p.kind() == mp::Kind::Bin) {
      auto bytes = p.bin();
      at::Tensor t = host_empty(g);
      TORCH_CHECK(bytes.size() == bytes_of(t), "a copy of ", bytes_of(t), " bytes came with ", bytes.size());
      if (!bytes.empty()) std::memcpy(t.mutable_data_ptr(), bytes.data(), bytes.size());
      return made(storage, to_device(t, site), site);
    }
    size_t fields = p.array();
    if (fields == 8) {  // the source's cause
      auto cause = std::make_shared<Cause>();
      cause->error = std::move(payload);
      cause->reported = true;  // the source reports it
      return store_.poison(storage, cause);
    }
    if (fields == 6) {
      Lent lent;
      lent.device = static_cast<int>(p.integer());
      lent.handle = p.bin();
      lent.offset = p.uint();
      lent.event = p.bin();
      size_t n = p.uint();
      std::shared_ptr<Borrowed> borrowed(new Borrowed{this, {}, p.uint(), source});  // gives the loan back, copied or not
      at::Tensor t = make_empty(g);
      TORCH_CHECK(n == bytes_of(t), "a copy of ", bytes_of(t), " bytes came with ", n);
      try {
        copy_lent(source, t.mutable_data_ptr(), n, lent);
      } catch (...) {
        drain();  // was it because its owner is gone?
        if (!dead_peers_.count(source)) throw;
        return poison(storage, make_cause("peer", "WorkerDied", dead_peers_[source], "a copy between workers", "", site));
      }
      when_done(Compute, site, [borrowed](const CausePtr&) {});
      return made(storage, t, site);
    }
    int pid = static_cast<int>(p.integer()), fd = static_cast<int>(p.integer());
    size_t offset = p.uint(), n = p.uint();
    auto borrowed = std::make_unique<Borrowed>(this, Mapping{}, p.uint(), source);
    at::Tensor copied;
    try {
      if (on_host()) borrowed->map = open_segment(pid, fd, offset, n, Sharing::Lent);
      else copied = read_tensor(g, pid, fd, offset, n);
    } catch (const c10::Error&) {
      throw;
    } catch (const std::exception&) {  // its maker is gone, and with it the segment
      auto cause = make_cause("peer", "WorkerDied", "worker " + std::to_string(source) + " died before its tensor was taken",
                              "a copy between workers", "", site);
      return poison(storage, cause);
    }
    if (copied.defined()) return made(storage, to_device(copied, site), site);
    std::atomic_ref(memory_stats().mapped).fetch_add(static_cast<int64_t>(n), std::memory_order_relaxed);
    void* data = borrowed->map.data;
    made(storage, adopt({data, borrowed.release(), &end_borrowed, c10::Device(c10::DeviceType::CPU)}, n, g), site);
  } catch (...) {
    poison(storage, cause_of("internal", "a copy between workers", "", site));
  }
}

void Executor::resize(mp::Reader& in) {
  uint64_t storage = in.uint();
  size_t nbytes = in.uint();
  try {
    before_write(storage);
    auto* s = store_.find(storage);
    if (!s || !s->first.defined()) return;
    c10::Storage held = s->first.storage();
    auto* impl = held.unsafeGetStorageImpl();
    auto bytes = make_bytes(nbytes, impl->device());
    copy_bytes(bytes, s->first, std::min(nbytes, impl->nbytes()));
    impl->set_data_ptr_noswap(bytes.storage().unsafeGetStorageImpl()->set_data_ptr(c10::DataPtr(nullptr, impl->device())));
    impl->set_nbytes(nbytes);
    if (log_allocations_) log_.push_back({executed_ + 1, storage, static_cast<int64_t>(nbytes), 0, now_ns()});
  } catch (...) {
    poison(storage, cause_of("internal", "resize_", "", 0));
  }
}

// --- random numbers --------------------------------------------------------------------------------------------------

void Executor::seed(mp::Reader& in) {
  auto number = static_cast<uint32_t>(in.uint());
  uint64_t value = in.uint();
  auto& g = generators_.get(number);
  std::lock_guard<std::mutex> lock(g.mutex());
  g.set_current_seed(value);
}

void Executor::rng_get(mp::Reader& in) {
  uint64_t request = in.uint();
  auto number = static_cast<uint32_t>(in.uint());
  at::Tensor state;
  try {
    state = generators_.get(number).get_state();
  } catch (...) {
    return answer_error(request, cause_of("op", "Generator.get_state", "", 0));
  }
  out_.clear();
  mp::put_array(out_, 4);
  out_.push(static_cast<uint8_t>(Message::DONE));
  mp::put_uint(out_, request);
  mp::put_int(out_, worker_);
  mp::put_bin(out_, state.const_data_ptr(), static_cast<size_t>(state.numel()));
  answer(out_);
}

void Executor::rng_set(mp::Reader& in) {
  auto number = static_cast<uint32_t>(in.uint());
  auto bytes = in.bin();
  try {
    at::Tensor t = at::detail::empty_cpu({static_cast<int64_t>(bytes.size())}, at::kByte);
    std::memcpy(t.mutable_data_ptr(), bytes.data(), bytes.size());
    auto& g = generators_.get(number);
    std::lock_guard<std::mutex> lock(g.mutex());
    g.set_state(t);
  } catch (...) {
    note_failure(cause_of("op", "Generator.set_state", "", 0));
  }
}

// --- the rest --------------------------------------------------------------------------------------------------------

void Executor::sync(mp::Reader& in) {
  uint64_t request = in.uint();
  while (!failures_.empty() && failures_.front()->reported) failures_.pop_front();
  if (!failures_.empty()) {
    auto cause = failures_.front();
    failures_.clear();  // one report a synchronisation: what followed from it follows from it
    return answer_error(request, cause);
  }
  if (on_host()) answer_done(request);
  else when_done(Compute, 0, [this, request](const CausePtr& lost) { lost ? answer_error(request, lost) : answer_done(request); });
}

void Executor::event(mp::Reader& in) {
  uint64_t request = in.uint();
  auto happened = [this, request] {
    out_.clear();
    mp::put_array(out_, 4);
    out_.push(static_cast<uint8_t>(Message::DONE));
    mp::put_uint(out_, request);
    mp::put_int(out_, worker_);
    mp::put_uint(out_, now_ns());
    answer(out_);
  };
  if (on_host()) happened();
  else when_done(Compute, 0, [this, request, happened](const CausePtr& lost) { lost ? answer_error(request, lost) : happened(); });
}

void Executor::stats(mp::Reader& in) {
  uint64_t request = in.uint();
  auto what = in.str();
  Buffer b;
  mp::put_array(b, 4);
  b.push(static_cast<uint8_t>(Message::DONE));
  mp::put_uint(b, request);
  mp::put_int(b, worker_);
  if (what == "log") {  // rows [sequence number, storage, bytes or -1, site, nanoseconds]
    mp::put_array(b, log_.size());
    for (auto& row : log_) {
      mp::put_array(b, 5);
      mp::put_uint(b, row.seq);
      mp::put_uint(b, row.storage);
      mp::put_int(b, row.nbytes);
      mp::put_uint(b, row.site);
      mp::put_uint(b, row.ns);
    }
    log_.clear();
  } else if (what == "trace") {
    put_trace(b);
  } else if (what == "properties") {  // of the device: [name, value] each
    auto rows = on_host() ? decltype(device_properties()){{"name", "CPU"}} : device_properties();
    mp::put_array(b, rows.size());
    for (auto& [name, value] : rows) {
      mp::put_array(b, 2);
      mp::put_str(b, name);
      if (auto* n = std::get_if<int64_t>(&value)) mp::put_int(b, *n);
      else mp::put_str(b, std::get<std::string>(value));
    }
  } else if (what == "live") {  // rows [storage, bytes, shape, site]
    mp::put_array(b, store_.size());
    for (auto& [id, slot] : store_) {
      mp::put_array(b, 4);
      mp::put_uint(b, id);
      mp::put_uint(b, slot.first.defined() ? slot.first.storage().nbytes() : 0);
      mp::put_str(b, slot.first.defined() ? describe(slot.first) : "poisoned");
      mp::put_uint(b, slot.site);
    }
  } else {
    if (what == "reset_peak") on_host() ? reset_peaks() : reset_device_peaks();
    if (what == "reset_accumulated") on_host() ? reset_accumulated() : reset_device_accumulated();
    if (what == "empty_cache") empty_all_caches();
    auto number = [](auto n) { return static_cast<int64_t>(n); };
    auto memory = on_host() ? DeviceMemory{memory_stats(), number(pool().reserved()), number(pool().peak_reserved())} : device_memory();
    const auto& m = memory.stats;
    auto [available, machine] = on_host() ? std::pair(available_memory(), machine_memory()) : device_memory_info();
    std::pair<const char*, int64_t> rows[] = {
        {"allocated", m.allocated}, {"peak", m.peak}, {"blocks", m.live}, {"peak_blocks", m.peak_live},
        {"allocations", m.allocations}, {"total", m.total}, {"frees", m.frees}, {"freed", m.freed}, {"retries", m.retries},
        {"ooms", m.failures},
        {"reserved", memory.reserved}, {"peak_reserved", memory.peak_reserved},
        {"limit", number(on_host() ? pool().limit() : device_limit_ ? device_limit_ : machine)},
        {"machine", number(machine)}, {"available", number(available)},
        {"mapped", std::atomic_ref(memory_stats().mapped).load(std::memory_order_relaxed)}, {"lent", m.lent},
        {"staged", number(staged_bytes())},
        {"loans", number(loans_.size())}, {"storages", number(store_.size())},
        {"donations", donations_}, {"small_arithmetic", number(small_calls())},
        {"lookaheads", lookaheads_}, {"lookahead_hits", lookahead_hits_},
        {"executed", number(executed_)}, {"received", number(received_)}};
    mp::put_array(b, std::size(rows));
    for (auto& [name, value] : rows) {
      mp::put_array(b, 2);
      mp::put_str(b, name);
      mp::put_int(b, value);
    }
  }
  answer(b);
}

void Executor::tell_freed(int peer, const std::vector<std::string>& handles) {
  out_.clear();
  mp::put_array(out_, 4);
  out_.push(static_cast<uint8_t>(Message::FREED));
  mp::put_int(out_, worker_);
  mp::put_int(out_, peer);
  mp::put_array(out_, handles.size());
  for (const auto& h : handles) mp::put_bin(out_, h.data(), h.size());
  reply(out_);
}

// What is free goes back to where it came from, once other workers have closed what they have open of it: CUDA does not say
// what else would happen (dtorch/worker/cuda.py).
void Executor::empty_all_caches() {
  if (on_host()) {
    empty_cache();
    return;
  }
  std::vector<const void*> lent;
  for (auto& [token, loan] : loans_)
    if (loan.storage.device() == computing.device) lent.push_back(loan.storage.data());
  for (auto& [peer, handles] : revoked_allocations(lent)) {
    if (dead_peers_.count(peer)) continue;
    tell_freed(peer, handles);
    awaited_closers_.insert(peer);
  }
  constexpr uint64_t kPatienceNs = 1'000'000'000;  // a neighbour answers between two operators
  for (uint64_t start = now_ns(); !awaited_closers_.empty() && !exit_ && now_ns() - start < kPatienceNs;) {
    drain();
    zmq::PollItem item{socket_, 0, zmq::kPollIn, 0};
    if (!awaited_closers_.empty()) api_.poll(&item, 1, 5);
  }
  awaited_closers_.clear();
  drop_staging();
  empty_cache();
  empty_device_cache();
}

// Operators that came after PyTorch's own: what a worker has at its first import is PyTorch's.
void Executor::import(mp::Reader& in) {
  uint64_t request = in.uint(), site = in.uint();
  auto module = in.str(), file = in.str();
  std::vector<std::string_view> paths;
  for (size_t n = in.array(); n-- > 0;) paths.push_back(in.str());
  auto& dispatcher = c10::Dispatcher::singleton();
  static const auto own = [&] {
    std::unordered_set<std::string> names;
    for (auto& n : dispatcher.getAllOpNames()) names.insert(c10::toString(n));
    return names;
  }();
  std::optional<PythonError> error;
  {
    c10::InferenceMode as_a_program(false);
    error = import_module(module, file, paths);
  }
  if (error)
    return answer_error(request, make_cause("op", error->type, error->message, "import of " + std::string(module), "", site));
  std::vector<c10::OperatorName> fresh;
  for (auto& n : dispatcher.getAllOpNames())
    if (!own.count(c10::toString(n))) fresh.push_back(n);
  Buffer b;
  mp::put_array(b, 4);
  b.push(static_cast<uint8_t>(Message::DONE));
  mp::put_uint(b, request);
  mp::put_int(b, worker_);
  mp::put_array(b, fresh.size());
  for (auto& n : fresh) {
    mp::put_array(b, 2);
    mp::put_str(b, n.name);
    mp::put_str(b, n.overload_name);
  }
  reply(b);
}

// Together where they are alike: PyTorch tells torch.backends.cudnn.allow_tf32 only of what was set so.
void set_cudnn_tf32(bool convolutions, bool recurrence) {
  using at::Float32Backend, at::Float32Op, at::Float32Precision;
  auto& c = at::globalContext();
  if (convolutions == recurrence) return c.setAllowTF32CuDNN(convolutions);
  auto precision = [](bool tf32) { return tf32 ? Float32Precision::TF32 : Float32Precision::IEEE; };
  c.setFloat32Precision(Float32Backend::CUDA, Float32Op::CONV, precision(convolutions));
  c.setFloat32Precision(Float32Backend::CUDA, Float32Op::RNN, precision(recurrence));
}

// As the client's attention_order packs it; 0: the order that was there before the client had another.
void set_attention_order(uint32_t order) {
  static std::vector<int64_t> own;
  auto& c = at::globalContext();
  if (order && own.empty())
    for (auto backend : c.sDPPriorityOrder()) own.push_back(static_cast<int64_t>(backend));
  std::vector<int64_t> backends(at::num_sdp_backends);
  for (auto b = backends.rbegin(); b != backends.rend(); ++b, order >>= 3) *b = order & 7;
  bool usual = std::all_of(backends.begin(), backends.end(), [](int64_t b) { return b == 0; });
  if (usual) backends = std::exchange(own, {});
  if (!backends.empty()) c.setSDPPriorityOrder(backends);
}

// PyTorch's switches for GPUs, set by the client as the program has them.
bool Executor::set_switch(std::string_view name, int64_t value) {
  auto& c = at::globalContext();
  bool on = value != 0;
  if (name == "cudnn.benchmark") c.setBenchmarkCuDNN(on);
  else if (name == "cudnn.deterministic") c.setDeterministicCuDNN(on);
  else if (name == "cudnn.enabled") c.setUserEnabledCuDNN(on);
  else if (name == "cudnn.tf32") set_cudnn_tf32(value & 1, value & 2);
  else if (name == "cublas.allow_tf32") c.setAllowTF32CuBLAS(on);
  else if (name == "sdp.flash") c.setSDPUseFlash(on);
  else if (name == "sdp.mem_efficient") c.setSDPUseMemEfficient(on);
  else if (name == "sdp.cudnn") c.setSDPUseCuDNN(on);
  else if (name == "sdp.math") c.setSDPUseMath(on);
  else if (name == "sdp.order") set_attention_order(static_cast<uint32_t>(value));
  else return false;
  return true;
}

void Executor::option(mp::Reader& in) {
  auto name = in.str();
  int64_t value = in.integer();
  if (name == "deterministic") at::globalContext().setDeterministicAlgorithms(value != 0, value == 2);
  else if (name == "threads") at::set_num_threads(static_cast<int>(value));
  else if (name == "default_dtype") c10::set_default_dtype(c10::scalarTypeToTypeMeta(static_cast<at::ScalarType>(value)));
  else if (name == "flush_denormal") at::globalContext().setFlushDenormal(value != 0);
  else if (name == "grad_mode") grad_mode_ = value != 0;
  else if (name == "memory_limit" && on_host()) pool().set_limit(static_cast<size_t>(value));
  else if (name == "memory_limit") limit_device_memory(device_limit_ = static_cast<size_t>(value));
  else if (set_switch(name, value)) return;
  else if (name == "lookahead_us") lookahead_ns_ = value * 1000;
  else if (name == "record_allocations") log_allocations_ = value != 0, log_.clear();
  else if (name == "trace") value > 0 ? trace_.start(static_cast<uint64_t>(value)) : trace_.clear();
  else throw mp::FormatError("the worker has no option " + std::string(name));
}

}  // namespace dtorch::worker

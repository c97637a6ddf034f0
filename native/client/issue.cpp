// See issue.h.
#include "client/issue.h"

#include <ATen/Context.h>
#include <ATen/core/grad_mode.h>
#include <ATen/native/Resize.h>

#include "client/python_error.h"
#include "client/sites.h"
#include "common/decode.h"
#include "common/sparse_parts.h"

namespace dtorch {

int deterministic_mode() {
  const auto& context = at::globalContext();
  return !context.deterministicAlgorithms() ? 0 : context.deterministicAlgorithmsWarnOnly() ? 2 : 1;
}

uint32_t attention_order() {
  auto packed = [](at::Context& c) {
    uint32_t order = 0;
    for (auto backend : c.sDPPriorityOrder()) order = order << 3 | static_cast<uint32_t>(backend);
    return order;
  };
  static const uint32_t usual = [&] {
    at::Context fresh;
    return packed(fresh);
  }();
  uint32_t order = packed(at::globalContext());
  return order == usual ? 0 : order;
}

namespace {

// PyTorch's switches for GPUs, by the names that the worker has for them.
void tell_device_switches(Session::Writer& w, WorkerState& state, int worker) {
  auto& c = at::globalContext();
  using at::Float32Backend, at::Float32Op;
  auto tf32 = [&c](Float32Op op) { return c.float32Precision(Float32Backend::CUDA, op) == at::Float32Precision::TF32; };
  struct Switch {
    const char* name;
    uint32_t value;
    int bits = 1;
  };
  const Switch switches[] = {{"cudnn.benchmark", c.benchmarkCuDNN()},
                             {"cudnn.deterministic", c.deterministicCuDNN()},
                             {"cudnn.enabled", c.userEnabledCuDNN()},
                             {"cudnn.tf32", tf32(Float32Op::CONV) | static_cast<uint32_t>(tf32(Float32Op::RNN)) << 1, 2},
                             {"cublas.allow_tf32", tf32(Float32Op::MATMUL)},
                             {"sdp.flash", c.userEnabledFlashSDP()},
                             {"sdp.mem_efficient", c.userEnabledMemEfficientSDP()},
                             {"sdp.cudnn", c.userEnabledCuDNNSDP()},
                             {"sdp.math", c.userEnabledMathSDP()},
                             {"sdp.order", attention_order(), kAttentionOrderBits}};
  static_assert(std::size(switches) + kAttentionOrderBits < 32);
  uint32_t now = 1;  // never 0: the worker has not been told anything
  for (const auto& s : switches) now = now << s.bits | s.value;
  if (__builtin_expect(now == state.device_switches, 1)) return;
  uint32_t known = std::exchange(state.device_switches, now);
  int below = 0;  // bits of the switches behind this one
  for (size_t i = std::size(switches); i-- > 0;) {
    const auto& s = switches[i];
    bool same = known && ((now ^ known) >> below & ((1u << s.bits) - 1)) == 0;
    below += s.bits;
    if (same) continue;
    w.begin(Record::OPTION, worker, 2);
    mp::put_str(w.buf(), s.name);
    mp::put_int(w.buf(), s.value);
    w.end();
  }
}

// Global switches of PyTorch that the worker must share for equal results.
void tell_switches(Session::Writer& w, const OpInfo& info, int worker) {
  auto& state = w.worker(worker);
  if (Session::get().accelerated()) tell_device_switches(w, state, worker);
  auto option = [&](const char* name, int value) {
    w.begin(Record::OPTION, worker, 2);
    mp::put_str(w.buf(), name);
    mp::put_int(w.buf(), value);
    w.end();
  };
  int dtype = static_cast<int>(c10::typeMetaToScalarType(c10::get_default_dtype()));
  if (__builtin_expect(dtype != state.default_dtype, 0)) option("default_dtype", state.default_dtype = dtype);
  int deterministic = deterministic_mode();
  if (__builtin_expect(deterministic != state.deterministic, 0)) option("deterministic", state.deterministic = deterministic);
  if (__builtin_expect(info.reads_grad_mode && at::GradMode::is_enabled() != state.grad_mode, 0))
    option("grad_mode", state.grad_mode = at::GradMode::is_enabled());
}

void materialise_all(Session::Writer& w, const OpInfo& info, const Scratch& s) {
  for (auto* ctx : s.refs) {
    if (__builtin_expect(!ctx->lazy, 1)) continue;
    materialise(w, ctx);
    if (info.overwrites) contents::blank(ctx);
  }
}

void define(Session::Writer& w, const OpInfo& info, int worker) {
  tell_switches(w, info, worker);
  auto& known = w.worker(worker).knows_op;
  if (info.number < known.size() && known[info.number]) return;
  if (known.size() <= info.number) known.resize(info.number + 64);
  known[info.number] = true;
  w.begin(Record::DEFINE_OP, worker, 3);
  mp::put_uint(w.buf(), info.number);
  mp::put_str(w.buf(), info.name);
  mp::put_str(w.buf(), info.overload);
  w.end();
}

void upload_indices(torch::jit::Stack* stack, size_t n_args) {
  int worker = -1;
  for (size_t i = stack->size() - n_args; i < stack->size(); ++i) {
    const auto& v = (*stack)[i];
    if (worker < 0 && v.isTensor() && is_ours(v.toTensor())) worker = ctx_of(v.toTensor())->worker;
    if (!v.isOptionalTensorList() || worker < 0) continue;
    auto list = v.toOptionalTensorVector();
    bool changed = false;
    for (auto& t : list) {
      if (!t || !t->defined() || !t->device().is_cpu()) continue;
      t = upload(*t, worker);
      changed = true;
    }
    if (changed) (*stack)[i] = list;
  }
}

void rewrite(const at::Tensor& t, const Rewrite& r, bool was_first) {
  if (t.numel() != 0) at::native::resize_output_check(t, r.sizes);  // warns, in PyTorch's words, when sizes differ
  auto* impl = t.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(r.sizes, r.strides);
  auto* storage = impl->unsafe_storage().unsafeGetStorageImpl();
  size_t need = storage_bytes(r.sizes, r.strides, impl->storage_offset(), t.element_size());
  if (need > storage->nbytes()) resize_storage(storage, need, /*tell_worker=*/false);
  if (!was_first) return;
  auto* ctx = ctx_of(t);
  ctx->first.sizes = r.sizes;
  ctx->first.strides = r.strides;
}

// What a META reply names: new storages from `first` on, and the arguments' own.
struct Answered {
  int worker;
  uint64_t seq, first;
  at::ArrayRef<c10::IValue> args;

  // An argument's storage, by its number.
  c10::Storage storage_of(uint64_t id) const {
    c10::Storage found;
    auto look = [&](auto&& self, const at::Tensor& t) -> void {
      if (is_sparse(t)) {
        for (const auto& part : take_apart(t).parts) self(self, part);
      } else if (is_ours(t) && ctx_of(t)->id == id) {
        found = t.storage();
      }
    };
    for (const auto& v : args) {
      if (v.isTensor()) look(look, v.toTensor());
      if (v.isTensorList())
        for (const auto& t : v.toTensorVector()) look(look, t);
    }
    TORCH_CHECK(found, "dtorch: a result stands on storage ", id, ", which is no argument's (a bug of dtorch)");
    return found;
  }

  at::Tensor read(mp::Reader& in) const {
    if (in.try_nil()) return at::Tensor();
    size_t length = in.array();
    if (length != kViewLength) {
      auto s = read_sparse_head(in, length);
      for (auto& part : s.parts) part = read(in);
      return put_together(s);
    }
    uint64_t id = in.uint();
    auto g = read_geometry(in);
    return id < first ? on_argument(storage_of(id), g) : fresh(id, g);
  }

  at::Tensor fresh(uint64_t id, const Geometry& g) const {
    auto t = make_result(worker, g);
    auto* ctx = ctx_of(t);
    ctx->id = id;
    ctx->lazy = false;
    ctx->last_seq = seq;
    return t;
  }

  at::Tensor on_argument(c10::Storage storage, const Geometry& g) const {
    size_t need = storage_bytes(g.sizes, g.strides, g.offset, c10::elementSize(g.dtype));
    if (need > storage.nbytes()) resize_storage(storage.unsafeGetStorageImpl(), need, /*tell_worker=*/false);
    return tensor_on(std::move(storage), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), g);
  }
};

c10::IValue read_value(mp::Reader& in) {
  switch (in.kind()) {
    case mp::Kind::Bool: return in.boolean();
    case mp::Kind::Int: return in.integer();
    case mp::Kind::Float: return in.real();
    case mp::Kind::Str: return std::string(in.str());
    case mp::Kind::Ext: return read_complex(in);
    default: in.skip(); return c10::IValue();
  }
}

// Takes the geometry, or the parts, that an operator gave to a tensor it wrote; true when the geometry changed.
bool follow(mp::Reader& in, int arg, const at::Tensor& t, const Answered& answered) {
  if (is_sparse(t)) {
    auto before = take_apart(t), now = read_sparse_head(in, in.array());
    auto same = [](const at::Tensor& a, const at::Tensor& b) {
      return a.storage().unsafeGetStorageImpl() == b.storage().unsafeGetStorageImpl() && a.sizes() == b.sizes() &&
             a.strides() == b.strides() && a.storage_offset() == b.storage_offset();
    };
    for (size_t i = 0; i < now.parts.size(); ++i) {
      now.parts[i] = answered.read(in);
      if (same(now.parts[i], before.parts[i])) now.parts[i] = before.parts[i];
    }
    replace_parts(t, now);
    return false;
  }
  auto g = read_geometry(in);
  Rewrite r{arg, std::move(g.sizes), std::move(g.strides)};
  if (!t.defined() || !is_ours(t)) return false;
  if (t.sizes() == c10::IntArrayRef(r.sizes) && t.strides() == c10::IntArrayRef(r.strides)) return false;
  rewrite(t, r, is_first(t.unsafeGetTensorImpl(), ctx_of(t)));
  return true;
}

// Keeps what the worker told, so that the next call with this key need not ask.
void learn(const OpInfo& info, const Buffer& key, at::ArrayRef<c10::IValue> args, const std::vector<c10::IValue>& results) {
  auto e = std::make_shared<Entry>();
  auto add = [&](const at::Tensor& t) { e->outs.push_back(make_spec(t)); };
  for (size_t i = 0; i < results.size(); ++i) {
    const auto& r = info.returns[i];
    int first = static_cast<int>(e->outs.size());
    if (r.kind == OpInfo::Result::Alias) {
      e->returns.push_back({ReturnSpec::Kind::Alias, r.arg, 1});
    } else if (r.kind == OpInfo::Result::List) {
      auto list = results[i].toTensorVector();
      for (auto& t : list) add(t);
      e->returns.push_back({ReturnSpec::Kind::List, first, static_cast<int>(list.size())});
    } else if (r.kind == OpInfo::Result::Tensor && results[i].isTensor() && results[i].toTensor().defined()) {
      if (is_sparse(results[i].toTensor())) return;  // of as many elements as the data says
      add(results[i].toTensor());
      e->returns.push_back({ReturnSpec::Kind::New, first, 1});
    } else if (r.kind == OpInfo::Result::Tensor) {
      e->returns.push_back({ReturnSpec::Kind::None, 0, 0});
    } else if (info.values_follow) {
      e->returns.push_back({ReturnSpec::Kind::Value, static_cast<int>(e->values.size()), 1});
      e->values.push_back(results[i]);
    } else {
      return;  // a plain value: known only by asking
    }
  }
  for (int i : info.writes) {
    const auto& v = args[static_cast<size_t>(i)];
    if (!v.isTensor() || !v.toTensor().defined()) continue;
    const auto& t = v.toTensor();
    e->rewrites.push_back({i, Dims(t.sizes().begin(), t.sizes().end()), Dims(t.strides().begin(), t.strides().end())});
  }
  learn_geometry(info, key, args, std::move(e));
}

// An entry's results in the schema's order.
std::vector<c10::IValue> results_of(const Entry& entry, c10::SmallVectorImpl<at::Tensor>& outs,
                                    at::ArrayRef<c10::IValue> args) {
  std::vector<c10::IValue> results;
  for (const auto& r : entry.returns) {
    auto at = static_cast<size_t>(r.index);
    switch (r.kind) {
      case ReturnSpec::Kind::New: results.emplace_back(std::move(outs[at])); break;
      case ReturnSpec::Kind::Alias: results.push_back(args[at]); break;
      case ReturnSpec::Kind::None: results.emplace_back(at::Tensor()); break;
      case ReturnSpec::Kind::Value: results.push_back(entry.values[at]); break;
      case ReturnSpec::Kind::List:
        results.emplace_back(std::vector<at::Tensor>(outs.begin() + r.index, outs.begin() + r.index + r.count));
        break;
    }
  }
  return results;
}

}  // namespace

void ask(const OpInfo& info, Scratch& s, torch::jit::Stack* stack, at::ArrayRef<c10::IValue> args, bool dynamic) {
  auto& session = Session::get();
  uint32_t site = sites::current();
  auto request = session.new_request(s.worker, site);
  request->op = info.number;
  struct Abandon {
    const RequestPtr& request;
    bool taken = false;
    ~Abandon() { taken ? Session::get().forget(request->id) : Session::get().abandon(request); }
  } abandon{request};
  uint64_t first = session.new_storage_ids(1 << 16);
  uint64_t seq;
  session.admit(s.worker);
  {
    Session::Writer w(session);
    define(w, info, s.worker);
    materialise_all(w, info, s);
    seq = w.begin(Record::ASK, request, 5);
    w.about(info.number, site);
    mp::put_uint(w.buf(), info.number);
    mp::put_uint(w.buf(), site);
    w.buf().append(s.record.data(), s.record.size());
    mp::put_uint(w.buf(), first);
    for (auto* ctx : s.refs) {
      ctx->last_seq = seq;
      if (!info.writes.empty()) ctx->contents.reset();
    }
    w.end();
  }
  session.wait(request);
  if (request->state.load() == Request::State::Failed) {
    if (request->reply.empty()) throw_failure({}, request->failure, s.worker);
    throw_remote(request->reply, /*at_call=*/true);
  }
  const Answered answered{s.worker, seq, first, args};
  auto in = reply_body(request->reply);
  size_t n = in.array();
  TORCH_CHECK(n == info.returns.size() + 1, "dtorch: ", info.name, " came back with ", n, " results");
  std::vector<c10::IValue> results;
  for (const auto& r : info.returns) {
    if (r.kind == OpInfo::Result::Alias) {
      in.skip();
      results.push_back(args[static_cast<size_t>(r.arg)]);
    } else if (r.kind == OpInfo::Result::Tensor) {
      results.emplace_back(answered.read(in));
    } else if (r.kind == OpInfo::Result::List) {
      std::vector<at::Tensor> list;
      for (size_t i = in.array(); i-- > 0;) list.push_back(answered.read(in));
      results.emplace_back(std::move(list));
    } else {
      results.push_back(read_value(in));
    }
  }
  abandon.taken = true;
  // The last element: the geometry of each written argument now (out= arguments that were resized).
  size_t written = in.array();
  bool list_resized = false;
  for (size_t i = 0; i < written; ++i) {
    const auto& v = args[static_cast<size_t>(info.writes[i])];
    std::vector<at::Tensor> tensors;
    if (v.isTensorList()) tensors = v.toTensorVector();
    else if (v.isTensor()) tensors.push_back(v.toTensor());
    for (size_t k = 0, n_tensors = in.array(); k < n_tensors; ++k) {
      if (in.try_nil()) continue;
      bool changed = follow(in, info.writes[i], tensors.at(k), answered);
      list_resized = list_resized || (changed && v.isTensorList());
    }
  }
  if (!dynamic && !list_resized) learn(info, s.key, args, results);
  torch::jit::drop(*stack, info.n_args);
  for (auto& r : results) stack->push_back(std::move(r));
}

namespace {

// While inferring: results without records. In-place and out= operators have nothing to tell.
void infer_only(const OpInfo& info, torch::jit::Stack* stack, at::ArrayRef<c10::IValue> args) {
  if (info.asks && !info.asks_for_masks) throw Uninferable(true);
  bool makes = false;
  for (const auto& r : info.returns) makes = makes || r.kind != OpInfo::Result::Alias;
  std::vector<c10::IValue> results;
  if (makes) {
    ScratchLease s(info);
    Encoder encode(*s, info);
    for (size_t i = 0; i < info.n_args; ++i) encode.ivalue(args[i], i);
    if (s->worker < 0) s->worker = worker_of(std::nullopt);
    const Entry* entry = find_geometry(info, s->key);
    if (!entry) entry = infer_geometry(info, s->key, args);
    if (entry->ask) throw Uninferable(entry->dynamic);
    c10::SmallVector<at::Tensor, 4> outs;
    for (const auto& spec : entry->outs) outs.push_back(make_out(s->worker, spec));
    results = results_of(*entry, outs, args);
  } else {
    // An empty out= is one that the operator is expected to resize, to sizes that are not known here.
    for (int i : info.writes)
      if (!Inferring::sizes_known(info.name) && info.handle.schema().arguments()[static_cast<size_t>(i)].kwarg_only() &&
          args[static_cast<size_t>(i)].isTensor() && args[static_cast<size_t>(i)].toTensor().numel() == 0)
        throw Uninferable(false);
    // What an in-place kernel would refuse, the composite must not pass over.
    if (info.in_place && !rehearse(info, args)) throw Uninferable(false);
    for (const auto& r : info.returns) results.push_back(args[static_cast<size_t>(r.arg)]);
  }
  torch::jit::drop(*stack, info.n_args);
  for (auto& r : results) stack->push_back(std::move(r));
}

}  // namespace

void check_alive(const StorageCtx* ctx) {
  if (Session::get().active() && ctx->generation == Session::get().generation()) return;
  throw_engine_error("");
}

void materialise(Session::Writer& w, StorageCtx* ctx) {
  ctx->last_seq = w.begin(Record::ALLOC, ctx->worker, 4);
  mp::put_uint(w.buf(), ctx->id);
  put_geometry(w.buf(), ctx->first.dtype, ctx->first.sizes, ctx->first.strides, ctx->first.offset, 0);
  mp::put_uint(w.buf(), ctx->nbytes);
  mp::put_uint(w.buf(), ctx->site);
  ctx->lazy = false;
  w.end();
}

void check_written(const OpInfo& info, const at::Tensor& t) {
  TORCH_CHECK(!t.defined() || is_ours(t), "Expected all tensors to be on the same device, but found at least two devices, ",
              c10::Device(kDevice, static_cast<c10::DeviceIndex>(current_worker())), " and ", t.device(),
              "! (when checking the argument that ", info.name, " writes)");
}

void check_written(const OpInfo& info, const c10::IValue& v) {
  if (v.isTensor()) check_written(info, v.toTensor());
  if (v.isTensorList())
    for (const auto& t : v.toTensorVector()) check_written(info, t);
}

void check_running(Scratch& s) {
  uint32_t generation = Session::get().generation();
  if (__builtin_expect(!s.refs.empty() && !Session::get().active(), 0)) check_alive(s.refs[0]);  // a child made by fork, say
  for (auto* ctx : s.refs)
    if (__builtin_expect(ctx->generation != generation, 0)) check_alive(ctx);
  if (__builtin_expect(s.worker < 0, 0)) s.worker = worker_of(std::nullopt);
}

void emit(const OpInfo& info, Scratch& s, const Entry& entry, at::ArrayRef<at::Tensor> outs) {
  auto& session = Session::get();
  uint32_t site = sites::current();
  session.admit(s.worker);
  Session::Writer w(session);
  define(w, info, s.worker);
  materialise_all(w, info, s);
  uint64_t seq = w.begin(Record::OP, s.worker, 4);
  w.about(info.number, site);
  auto& b = w.buf();
  mp::put_uint(b, info.number);
  mp::put_uint(b, site);
  b.append(s.record.data(), s.record.size());
  mp::put_array(b, outs.size());
  for (size_t i = 0; i < outs.size(); ++i) {
    auto* ctx = static_cast<StorageCtx*>(outs[i].unsafeGetTensorImpl()->unsafe_storage().data_ptr().get_context());
    b.push(0x92);
    mp::put_uint(b, ctx->id);
    b.append(entry.outs[i].wire.data(), entry.outs[i].wire.size());
    ctx->lazy = false;
    ctx->last_seq = seq;
  }
  bool any = false;
  for (auto* ctx : s.refs) {
    ctx->last_seq = seq;
    any = any || ctx->contents;
  }
  w.end();
  if (__builtin_expect(any, 0)) contents::after(info, s, entry, outs);
}

namespace {

// PyTorch's autograd counts the versions of a tensor that an operator writes, but not of those in a list.
void count_versions(const OpInfo& info, at::ArrayRef<c10::IValue> args) {
  if (c10::impl::tls_is_dispatch_key_excluded(c10::DispatchKey::ADInplaceOrView)) return;
  for (int i : info.writes)
    for (const auto& t : args[static_cast<size_t>(i)].toTensorVector())
      if (!t.is_inference()) t.unsafeGetTensorImpl()->bump_version();
}

}  // namespace

void issue_boxed(const OpInfo& info, torch::jit::Stack* stack) {
  if (info.uploads_cpu_indices) upload_indices(stack, info.n_args);
  auto args = torch::jit::last(*stack, info.n_args);
  if (__builtin_expect(Inferring::active(), 0)) return infer_only(info, stack, args);
  ScratchLease s(info);
  Encoder encode(*s, info);
  for (size_t i = 0; i < info.n_args; ++i) encode.ivalue(args[i], i);
  check_running(*s);
  for (int i : info.writes) check_written(info, args[static_cast<size_t>(i)]);

  static const Entry nothing;
  const Entry* entry = &nothing;
  if (info.infers || info.asks) {
    entry = find_geometry(info, s->key);
    if (!entry) {
      Issuing issuing;
      entry = infer_geometry(info, s->key, args);
    }
    if (entry->ask) return ask(info, *s, stack, args, entry->dynamic);
  } else {
    bool doubtful;
    {
      Issuing issuing;
      doubtful = is_doubtful(info, args);
    }
    if (doubtful) {
      std::vector<c10::IValue> kept(args.begin(), args.end());
      ask(info, *s, stack, args, /*dynamic=*/true);
      if (info.counts_versions) count_versions(info, kept);
      return trust(info, kept);
    }
  }
  c10::SmallVector<at::Tensor, 4> outs;
  for (const auto& spec : entry->outs) outs.push_back(make_out(s->worker, spec));
  bool told = info.values_follow && outs.empty() && info.writes.empty();  // the worker has answered it before
  if (!told) emit(info, *s, *entry, outs);
  if (__builtin_expect(info.counts_versions, 0)) count_versions(info, args);
  for (const auto& r : entry->rewrites) {
    const auto& t = args[static_cast<size_t>(r.arg)].toTensor();
    if (t.sizes() == c10::IntArrayRef(r.sizes) && t.strides() == c10::IntArrayRef(r.strides)) continue;
    rewrite(t, r, is_first(t.unsafeGetTensorImpl(), ctx_of(t)));
  }

  auto results = results_of(*entry, outs, args);
  torch::jit::drop(*stack, info.n_args);
  for (auto& r : results) stack->push_back(std::move(r));
}

}  // namespace dtorch

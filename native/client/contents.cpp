// See contents.h.
#include "client/contents.h"

#include <ATen/EmptyTensor.h>
#include <ATen/record_function.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <utility>
#include <vector>

#include "client/issue.h"
#include "common/decode.h"

namespace dtorch {

namespace {

constexpr uint32_t kMostDepth = 128;  // of calls that read what another made
constexpr int kMostCalls = 1024;      // made for one answer
// Of all contents together: values that were uploaded, values that were computed, and recipes' calls. A program that keeps a
// data set's worth of small uploads shall not spoil the rest.
constexpr size_t kMostBytes = size_t{8} << 20, kMostAllCalls = 1 << 16;
constexpr size_t kMostStorages = 32, kMostArgumentBytes = 4096;  // of one call

bool small_integers(at::ScalarType dtype, size_t nbytes) {
  return c10::isIntegralType(dtype, /*includeBool=*/true) && nbytes <= kInlineBytes;
}

std::atomic<size_t> uploaded_bytes{0}, computed_bytes{0}, held_calls{0};

// An operator's record with what it reads.
struct Call {
  const OpInfo* info = nullptr;
  int switches = 0;
  std::vector<uint8_t> arguments;
  std::vector<std::pair<uint64_t, ContentsPtr>> reads;   // every storage it names, before
  std::vector<std::pair<uint64_t, Geometry>> made;       // the new ones
  std::vector<uint64_t> written;

  Call() { held_calls.fetch_add(1, std::memory_order_relaxed); }
  Call(const Call&) = delete;
  Call& operator=(const Call&) = delete;
  ~Call() { held_calls.fetch_sub(1, std::memory_order_relaxed); }
};

std::atomic<uint64_t> tellings{0};

// Takes room for a value; false when there is none.
bool hold(std::atomic<size_t>& bytes, size_t n) {
  if (bytes.fetch_add(n, std::memory_order_relaxed) + n <= kMostBytes) return true;
  bytes.fetch_sub(n, std::memory_order_relaxed);
  return false;
}

// What PyTorch's switches do to integers: the type of the comparison with a float, and whether an operator is refused.
int switches() {
  return static_cast<int>(c10::typeMetaToScalarType(c10::get_default_dtype())) * 4 + deterministic_mode();
}

}  // namespace

// What one storage holds at one time. `value` and `call` are guarded by Session::mu_.
struct Contents {
  ~Contents() {
    if (!value.defined()) return;
    (uploaded ? uploaded_bytes : computed_bytes).fetch_sub(value.storage().nbytes(), std::memory_order_relaxed);
  }

  mutable at::Tensor value;                  // the storage's first tensor, on the CPU; nobody writes it. Once it is known
  mutable std::shared_ptr<const Call> call;  // until then: the call after which it is so, or
  Geometry blank;                            // a storage that nothing has written
  bool uploaded = false;
  bool is_blank = false;                     // for an operator that overwrites all of it, and for none that reads
  uint64_t storage = 0;
  mutable std::atomic<uint32_t> depth{0};    // of the calls that must be made

  Contents() = default;
  Contents(const Contents&) = delete;
  Contents& operator=(const Contents&) = delete;
};

namespace {

// The same elements in a storage of its own.
at::Tensor copied(const at::Tensor& t) {
  size_t n = t.storage().nbytes();
  at::Tensor bytes = at::detail::empty_cpu({static_cast<int64_t>(n)}, at::kByte);
  if (n) std::memcpy(bytes.mutable_data_ptr(), t.storage().data(), n);
  return view_of(bytes, geometry_of(t));
}

at::Tensor zeros(const Geometry& g) {
  auto t = at::detail::empty_strided_cpu(g.sizes, g.strides, g.dtype);
  if (t.storage().nbytes()) std::memset(t.mutable_data_ptr(), 0, t.storage().nbytes());
  return t;
}

// The worker runs what stands here too, so a mistake is left to it; but here memory is at stake.
void check_arguments(const torch::jit::Stack& stack) {
  auto one = [](const at::Tensor& t) {
    if (!t.defined()) return;
    TORCH_CHECK(c10::isIntegralType(t.scalar_type(), /*includeBool=*/true), "not an integer");  // CON-1
    size_t need = storage_bytes(t.sizes(), t.strides(), t.storage_offset(), t.element_size());
    TORCH_CHECK(need <= t.storage().nbytes(), "too short");
  };
  for (const auto& v : stack) {
    if (v.isTensor()) one(v.toTensor());
    if (v.isTensorList())
      for (const auto& t : v.toTensorVector()) one(t);
    if (v.isOptionalTensorList())
      for (const auto& t : v.toOptionalTensorVector())
        if (t) one(*t);
  }
}

at::Tensor follow(const Contents& c, int& budget);

at::Tensor make(const Call& call, uint64_t wanted, int& budget) {
  TORCH_CHECK(--budget >= 0, "too many calls");
  TORCH_CHECK(call.switches == switches(), "PyTorch's switches are not what they were");
  Store store;
  for (const auto& [id, before] : call.reads) {
    auto t = follow(*before, budget);
    bool written = std::find(call.written.begin(), call.written.end(), id) != call.written.end();
    store.put(id, written ? copied(t) : t, 0);
  }
  Generators none;
  mp::Reader in(call.arguments.data(), call.arguments.size());
  Decoder decode(in, store, none);
  torch::jit::Stack stack;
  in.array();
  for (const auto& arg : call.info->handle.schema().arguments()) stack.push_back(decode.ivalue(*arg.real_type()));
  check_arguments(stack);
  auto kept = stack;  // as in call_boxed of worker/operators.cpp
  call.info->handle.callBoxed(stack);
  size_t next = 0;
  auto keep = [&](const at::Tensor& t) {
    TORCH_CHECK(next < call.made.size(), "more results than the client foretold");
    const auto& [id, g] = call.made[next++];
    TORCH_CHECK(t.device().is_cpu() && t.layout() == at::kStrided && t.scalar_type() == g.dtype &&
                t.sizes() == c10::IntArrayRef(g.sizes) && t.strides() == c10::IntArrayRef(g.strides) &&
                t.storage_offset() == 0, "not the result the client foretold");
    store.put(id, copied(t), 0);  // memory of its own, and of PyTorch's allocator
  };
  for (size_t i = 0; i < stack.size(); ++i) {
    if (call.info->returns[i].kind == OpInfo::Result::Alias) continue;
    if (stack[i].isTensor()) keep(stack[i].toTensor());
    else for (const auto& t : stack[i].toTensorVector()) keep(t);
  }
  return store.at(wanted).first;
}

at::Tensor follow(const Contents& c, int& budget) {
  std::shared_ptr<const Call> call;
  {
    Session::Writer lock(Session::get());
    if (c.value.defined()) return c.value;
    call = c.call;
  }
  auto value = call ? make(*call, c.storage, budget) : zeros(c.blank);
  TORCH_CHECK(hold(computed_bytes, value.storage().nbytes()), "no room");
  Session::Writer lock(Session::get());
  if (c.value.defined()) {  // another thread was faster
    computed_bytes.fetch_sub(value.storage().nbytes(), std::memory_order_relaxed);
    return c.value;
  }
  c.value = value;
  c.call.reset();
  c.depth.store(0, std::memory_order_relaxed);
  return value;  // `call`, and all that only it still held, goes without the lock
}

// The storages that it names as a whole among the arguments it writes: by number alone (STO-2).
std::vector<uint64_t> whole_arguments(const OpInfo& info, mp::Reader record) {
  std::vector<uint64_t> found;
  size_t n = record.array();
  for (size_t i = 0; i < n; ++i) {
    bool written = std::find(info.writes.begin(), info.writes.end(), static_cast<int>(i)) != info.writes.end();
    if (written && record.kind() == mp::Kind::Int) found.push_back(record.uint());
    else record.skip();
  }
  return found;
}

StorageCtx* find(const Scratch& s, uint64_t id) {
  for (auto* ctx : s.refs)
    if (ctx->id == id) return ctx;
  return nullptr;
}

}  // namespace

namespace contents {

void blank(StorageCtx* ctx) {
  const auto& g = ctx->first;
  if (!small_integers(g.dtype, ctx->nbytes)) return;
  if (storage_bytes(g.sizes, g.strides, g.offset, c10::elementSize(g.dtype)) != ctx->nbytes) return;  // grown since
  auto c = std::make_shared<Contents>();
  c->blank = ctx->first;
  c->is_blank = true;
  ctx->contents = std::move(c);
}

ContentsPtr given(const at::Tensor& cpu) {
  size_t n = static_cast<size_t>(cpu.numel()) * cpu.element_size();
  if (!small_integers(cpu.scalar_type(), n) || !hold(uploaded_bytes, n)) return nullptr;
  auto c = std::make_shared<Contents>();
  c->uploaded = true;
  c->value = at::detail::empty_strided_cpu(cpu.sizes(), cpu.strides(), cpu.scalar_type());
  if (n) std::memcpy(c->value.mutable_data_ptr(), cpu.const_data_ptr(), n);
  return c;
}

void after(const OpInfo& info, const Scratch& s, const Entry& entry, at::ArrayRef<at::Tensor> outs) {
  std::vector<StorageCtx*> written;
  std::vector<std::pair<uint64_t, ContentsPtr>> reads;
  bool told = info.exact && s.refs.size() <= kMostStorages && s.record.size() <= kMostArgumentBytes &&
              held_calls.load(std::memory_order_relaxed) < kMostAllCalls;
  mp::Reader record(s.record.data(), s.record.size());
  auto overwritten = info.overwrites ? whole_arguments(info, record) : std::vector<uint64_t>();
  uint32_t depth = 1;
  for (auto* ctx : s.refs) {
    told = told && ctx->contents;
    if (!told) break;
    if (std::any_of(reads.begin(), reads.end(), [ctx](auto& r) { return r.first == ctx->id; })) continue;
    const auto& c = ctx->contents;
    if (c->is_blank) told = std::find(overwritten.begin(), overwritten.end(), ctx->id) != overwritten.end();
    depth = std::max(depth, c->depth.load(std::memory_order_relaxed) + 1);
    reads.emplace_back(ctx->id, c);
  }
  if (!info.writes.empty())
    for (uint64_t id : storages_of(info.handle.schema(), info.writes, record))
      if (auto* ctx = find(s, id)) {
        written.push_back(ctx);
        ctx->contents.reset();  // until it is told (CON-2)
      }
  told = told && depth <= kMostDepth;
  for (size_t i = 0; i < outs.size() && told; ++i)
    told = entry.outs[i].geometry.offset == 0 && entry.outs[i].geometry.flags == 0;
  if (!told) return;

  auto worth = [](const StorageCtx* ctx) { return small_integers(ctx->first.dtype, ctx->nbytes); };
  if (std::none_of(outs.begin(), outs.end(), [&](auto& t) { return worth(ctx_of(t)); }) &&
      std::none_of(written.begin(), written.end(), worth))
    return;
  auto call = std::make_shared<Call>();
  call->info = &info;
  call->switches = switches();
  call->arguments.assign(s.record.data(), s.record.data() + s.record.size());
  call->reads = std::move(reads);
  for (size_t i = 0; i < outs.size(); ++i) call->made.emplace_back(ctx_of(outs[i])->id, entry.outs[i].geometry);
  for (auto* ctx : written) call->written.push_back(ctx->id);
  auto knows = [&](StorageCtx* ctx) {
    if (!worth(ctx)) return;
    auto c = std::make_shared<Contents>();
    c->call = call;
    c->storage = ctx->id;
    c->depth.store(depth, std::memory_order_relaxed);
    ctx->contents = std::move(c);
  };
  for (const auto& t : outs) knows(ctx_of(t));
  for (auto* ctx : written) knows(ctx);
}

at::Tensor of(const at::Tensor& t) {
  ContentsPtr c;
  {
    Session::Writer w(Session::get());
    c = ctx_of(t)->contents;
  }
  if (!c || c->is_blank || !c10::isIntegralType(t.scalar_type(), /*includeBool=*/true) || t.is_neg()) return {};
  try {
    // As the worker runs it: neither autograd, modes nor profilers of the program have a part in it, nor are they told.
    auto above = c10::autograd_dispatch_keyset_with_ADInplaceOrView;
    auto included = c10::default_included_set.remove(c10::DispatchKey::ADInplaceOrView);
    c10::impl::ForceDispatchKeyGuard plain(included, c10::default_excluded_set | above);
    at::DisableRecordFunctionGuard unseen;
    struct Quiet final : c10::WarningHandler {
      void process(const c10::Warning&) override {}
    } silence;
    c10::WarningUtils::WarningHandlerGuard warnings(&silence);
    int budget = kMostCalls;
    auto first = follow(*c, budget);
    size_t need = storage_bytes(t.sizes(), t.strides(), t.storage_offset(), t.element_size());
    return need <= first.storage().nbytes() ? view_of(first, geometry_of(t)) : at::Tensor();
  } catch (const std::exception&) {  // a mistake of the program's, most likely: the worker raises it in eager's words
    return {};
  }
}

at::Tensor tell(const at::Tensor& t) {
  auto known = of(t);
  if (known.defined()) tellings.fetch_add(1, std::memory_order_relaxed);
  return known;
}

uint64_t told() { return tellings.load(std::memory_order_relaxed); }

}  // namespace contents
}  // namespace dtorch

// See geometry.h.
#include "client/geometry.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/ExpandUtils.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/flat_hash_map.h>

#include <algorithm>
#include <mutex>
#include <optional>
#include <unordered_map>
#include <unordered_set>

#include "client/python_error.h"

namespace dtorch {

thread_local bool Inferring::active_ = false;
thread_local const std::string* Inferring::structured_ = nullptr;

namespace {

constexpr size_t kCacheEntries = 32768;  // per generation

uint64_t hash_bytes(const uint8_t* p, size_t n) {
  uint64_t h = 0x9E3779B97F4A7C15ull ^ n;
  auto step = [&h](uint64_t v) {
    __uint128_t m = static_cast<__uint128_t>(h ^ v) * 0xD6E8FEB86659FD93ull;
    h = static_cast<uint64_t>(m) ^ static_cast<uint64_t>(m >> 64);
  };
  for (; n >= 8; p += 8, n -= 8) {
    uint64_t v;
    std::memcpy(&v, p, 8);
    step(v);
  }
  uint64_t tail = 0;
  std::memcpy(&tail, p, n);
  step(tail ^ (uint64_t{n} << 56));
  return h;
}

struct KeyHash {
  size_t operator()(const std::string& s) const { return hash_bytes(reinterpret_cast<const uint8_t*>(s.data()), s.size()); }
};
using Map = ska::flat_hash_map<std::string, EntryPtr, KeyHash>;

struct Cache {
  std::mutex mu;
  Map young, old;                               // GEO-2
  std::unordered_set<std::string> signatures;   // of calls that were accepted
  GeometryStats stats;

  bool known(const std::string& signature) {
    std::lock_guard lock(mu);
    return signatures.count(signature) != 0;
  }
  void accept(std::string&& signature) {
    std::lock_guard lock(mu);
    if (signatures.size() < kCacheEntries) signatures.insert(std::move(signature));
  }
};
Cache& cache() {
  static Cache* c = new Cache;
  return *c;
}

// The thread's last answer per operator: the same op on the same geometry again, which is the common case, costs one
// comparison.
struct Last {
  std::vector<uint8_t> key;
  EntryPtr entry;
};
Last& last_of(const OpInfo& info) {
  static thread_local std::vector<Last> own;
  DTORCH_TLS std::vector<Last>* found = nullptr;
  if (__builtin_expect(!found, 0)) found = &own;
  auto& slots = *found;
  if (info.number >= slots.size()) slots.resize(info.number + 64);
  return slots[info.number];
}

const Entry* remember(Last& last, const Buffer& key, EntryPtr entry) {
  last.key.assign(key.data(), key.data() + key.size());
  last.entry = std::move(entry);
  return last.entry.get();
}

// Called with the cache's lock held.
void insert(Cache& c, const Buffer& key, const EntryPtr& entry) {
  if (c.young.size() >= kCacheEntries) {
    c.old.swap(c.young);
    c.young.clear();
  }
  c.young[std::string(reinterpret_cast<const char*>(key.data()), key.size())] = entry;
}

void add_spec(Entry& e, const at::Tensor& t) { e.outs.push_back(make_spec(t)); }

// Reads the results off the stack; false when they cannot be predicted after all.
bool read_results(const OpInfo& info, Entry& e, const torch::jit::Stack& stack, c10::DeviceType on = kDevice) {
  if (stack.size() != info.returns.size()) return false;
  auto is_here = [on](const at::Tensor& t) { return t.device().type() == on && t.layout() == at::kStrided; };
  for (size_t i = 0; i < stack.size(); ++i) {
    const auto& r = info.returns[i];
    const auto& v = stack[i];
    int first = static_cast<int>(e.outs.size());
    if (r.kind == OpInfo::Result::Alias) {
      e.returns.push_back({ReturnSpec::Kind::Alias, r.arg, 1});
    } else if (r.kind == OpInfo::Result::List) {
      if (!v.isTensorList()) return false;
      auto list = v.toTensorVector();
      for (auto& t : list) {
        if (!t.defined() || !is_here(t)) return false;
        add_spec(e, t);
      }
      e.returns.push_back({ReturnSpec::Kind::List, first, static_cast<int>(list.size())});
    } else if (v.isNone() || (v.isTensor() && !v.toTensor().defined())) {
      e.returns.push_back({ReturnSpec::Kind::None, 0, 0});
    } else {
      if (!v.isTensor() || !is_here(v.toTensor())) return false;
      add_spec(e, v.toTensor());
      e.returns.push_back({ReturnSpec::Kind::New, first, 1});
    }
  }
  return true;
}

// Which dtypes an operator takes is decided in its kernel, not in its geometry. The first call with a combination of dtypes
// and dimensions is therefore rehearsed here, on miniature CPU tensors; when that fails, for whatever reason, the worker is
// asked, and a wrong call raises in eager's words. A right combination is known from then on.
std::string signature(const OpInfo& info, at::ArrayRef<c10::IValue> args) {
  std::string s(reinterpret_cast<const char*>(&info.number), sizeof info.number);
  auto tensor = [&s](const at::Tensor& t) {
    if (!t.defined()) return s.push_back('-');
    s.push_back(static_cast<char>(t.scalar_type()));
    s.push_back(static_cast<char>(t.dim()));
    s.push_back(is_ours(t) ? 'd' : 'c');
  };
  for (const auto& v : args) {
    s.push_back('|');
    if (v.isTensor()) tensor(v.toTensor());
    else if (v.isTensorList())
      for (const auto& t : v.toTensorVector()) tensor(t);
    else if (v.isOptionalTensorList())
      for (const auto& t : v.toOptionalTensorVector()) tensor(t ? *t : at::Tensor());
    else if (v.isScalar()) s.push_back(v.isDouble() ? 'D' : v.isInt() ? 'I' : 'S');
    else s.push_back(v.isNone() ? 'N' : 'V');
  }
  return s;
}

// A CPU tensor of the same dtype and rank, every size but 1 made small, equal sizes staying equal.
class Miniature {
 public:
  int64_t first_index = 0;  // what integers are

  at::Tensor of(const at::Tensor& t) {
    Dims sizes;
    for (int64_t n : t.sizes()) sizes.push_back(n <= 2 ? n : small_.emplace(n, 2 + static_cast<int64_t>(small_.size())).first->second);
    at::Tensor m = at::detail::empty_cpu(sizes, t.scalar_type());
    // Integers are 0, for they may be indices; complex numbers are not real, so that what would drop the imaginary part
    // shows; the rest is 1.
    if (c10::isComplexType(t.scalar_type())) m.fill_(c10::complex<double>(1, 1));
    else m.fill_(c10::isIntegralType(t.scalar_type(), /*includeBool=*/false) ? first_index : 1);
    if (t.unsafeGetTensorImpl()->is_wrapped_number()) m.unsafeGetTensorImpl()->set_wrapped_number(true);
    return m;
  }
  c10::IValue of(const c10::IValue& v) {
    if (v.isTensor() && v.toTensor().defined())
      return is_ours(v.toTensor()) ? of(v.toTensor()) : v.toTensor().unsafeGetTensorImpl()->is_wrapped_number() ? v.toTensor() : v.toTensor().clone();
    if (v.isTensorList()) {
      auto list = v.toTensorVector();
      for (auto& t : list)
        if (is_ours(t)) t = of(t);
      return list;
    }
    if (v.isOptionalTensorList()) {
      auto list = v.toOptionalTensorVector();
      for (auto& t : list)
        if (t && is_ours(*t)) t = of(*t);
      return list;
    }
    return v;
  }

 private:
  std::unordered_map<int64_t, int64_t> small_;
};

// Sizes and repeats are not made small with the tensors: a rehearsal with large ones would compute at full size here.
bool has_large_integers(at::ArrayRef<c10::IValue> args) {
  constexpr int64_t kLarge = 64;
  for (const auto& v : args) {
    if (v.isInt() && std::abs(v.toInt()) > kLarge) return true;
    if (v.isIntList())
      for (int64_t n : v.toIntVector())
        if (std::abs(n) > kLarge) return true;
  }
  return false;
}

// The addmm family checks only in its kernel that the added tensor broadcasts.
bool added_fits(const OpInfo& info, const Entry& e, at::ArrayRef<c10::IValue> args) {
  static const std::unordered_set<std::string> family{"aten::addmm", "aten::addbmm", "aten::baddbmm", "aten::addmv",
                                                      "aten::addr",  "aten::_addmm_activation"};
  if (!family.count(info.name) || e.outs.empty()) return true;
  return at::is_expandable_to(args[0].toTensor().sizes(), e.outs[0].geometry.sizes);
}

// Whether the results' shapes depend on the values of the arguments.
bool depends_on_data(const OpInfo& info, at::ArrayRef<c10::IValue> args) {
  if (!info.asks_for_masks) return info.asks;
  auto is_mask = [](const std::optional<at::Tensor>& t) {
    return t && t->defined() && (t->scalar_type() == at::kBool || t->scalar_type() == at::kByte);
  };
  for (const auto& v : args) {
    if (!v.isOptionalTensorList()) continue;
    auto list = v.toOptionalTensorVector();
    if (std::any_of(list.begin(), list.end(), is_mask)) return true;
  }
  return false;
}

// A backend without kernels of its own: its slot in the dispatch table is the operator's composite kernel.
constexpr auto kComposite = c10::DispatchKey::IPU;

// A custom operator's results, by its own fake kernel (torch.library.register_fake). Without one, and where the fake kernel
// raises, which may be because the size depends on the data, the worker is asked each time: nothing says what the result
// depends on.
EntryPtr answer_by_fake(const OpInfo& info, at::ArrayRef<c10::IValue> args) {
  bool makes = false;
  auto written = std::make_shared<Entry>();
  for (size_t i = 0; i < info.returns.size(); ++i) {
    const auto* alias = info.handle.schema().returns()[i].alias_info();
    TORCH_CHECK_NOT_IMPLEMENTED(!alias || alias->isWrite(), "dtorch: ", info.name, " gives a view of an argument. Views exist on the "
                                "client alone: write the operator with PyTorch's own (CompositeImplicitAutograd), or clone");
    if (info.returns[i].kind == OpInfo::Result::Alias) written->returns.push_back({ReturnSpec::Kind::Alias, info.returns[i].arg, 1});
    else makes = true;
  }
  if (!makes) return written;
  auto asking = std::make_shared<Entry>();
  asking->ask = asking->dynamic = true;
  if (!info.handle.hasKernelForDispatchKey(c10::DispatchKey::Meta)) return asking;
  auto fake = [](const at::Tensor& t) -> at::Tensor {
    if (!t.defined()) return t;
    return at::detail::empty_strided_meta(t.sizes(), t.strides(), t.scalar_type());
  };
  torch::jit::Stack stack;
  for (const auto& v : args) {
    if (v.isTensor()) {
      stack.emplace_back(fake(v.toTensor()));
    } else if (v.isTensorList()) {
      auto list = v.toTensorVector();
      for (auto& t : list) t = fake(t);
      stack.emplace_back(std::move(list));
    } else if (v.isOptionalTensorList()) {
      auto list = v.toOptionalTensorVector();
      for (auto& t : list)
        if (t) t = fake(*t);
      stack.emplace_back(std::move(list));
    } else {
      stack.push_back(v);
    }
  }
  try {
    at::AutoDispatchBelowADInplaceOrView below;
    c10::impl::ExcludeDispatchKeyGuard no_modes(c10::DispatchKeySet({c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot}));
    info.handle.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::Meta), &stack);
    auto found = std::make_shared<Entry>();
    if (read_results(info, *found, stack, c10::DeviceType::Meta)) return found;
  } catch (const std::exception&) {
    clear_python_error();
  }
  return asking;
}

EntryPtr answer(const OpInfo& info, at::ArrayRef<c10::IValue> args) {
  auto e = std::make_shared<Entry>();
  e->ask = true;
  e->dynamic = depends_on_data(info, args);
  if (e->dynamic) return e;
  if (info.custom && !info.values_follow) return answer_by_fake(info, args);
  if (info.rule && !Session::get().accelerated()) {  // the rules are CPU kernels' layouts
    auto ruled = std::make_shared<Entry>();
    if (info.rule(args, *ruled)) {
      for (size_t i = 0; i < ruled->outs.size() && ruled->returns.size() < info.returns.size(); ++i)
        ruled->returns.push_back({ReturnSpec::Kind::New, static_cast<int>(i), 1});
      return ruled;
    }
  }
  if (info.in_place) {
    // Nothing to foretell; what can be wrong shows in miniature, sizes included, for equal sizes stay equal there.
    if (!rehearse(info, args)) return e;
    auto alias = std::make_shared<Entry>();
    for (const auto& r : info.returns) alias->returns.push_back({ReturnSpec::Kind::Alias, r.arg, 1});
    return alias;
  }
  if (!info.composite) return e;
  if (!Inferring::active()) {
    auto s = signature(info, args);
    if (!cache().known(s)) {
      if (!rehearse(info, args)) return e;
      cache().accept(std::move(s));
    }
  }
  try {
    torch::jit::Stack stack(args.begin(), args.end());
    Inferring inferring(info.checks_itself ? &info.name : nullptr);
    at::AutoDispatchBelowADInplaceOrView below;
    info.handle.redispatchBoxed(c10::DispatchKeySet(kComposite), &stack);
    auto found = std::make_shared<Entry>();
    if (read_results(info, *found, stack) && added_fits(info, *found, args)) return found;
  } catch (const Uninferable& u) {
    e->dynamic = u.dynamic;
  } catch (const std::exception&) {  // a wrong call, most likely: the worker raises it in eager's words
  }
  return e;
}

}  // namespace

bool rehearse(const OpInfo& info, at::ArrayRef<c10::IValue> args) {
  if (!info.in_place && !info.checks_itself && has_large_integers(args)) return false;
  // Random operators must not draw from the program's own generator.
  static auto* own = new at::Generator(at::detail::createCPUGenerator());
  const auto& schema = info.handle.schema().arguments();
  bool random = info.handle.hasTag(at::Tag::nondeterministic_seeded), takes_generator = false;
  try {
    Miniature miniature;
    torch::jit::Stack stack;
    for (size_t i = 0; i < args.size(); ++i) {
      bool generator = schema[i].name() == "generator";
      takes_generator = takes_generator || generator;
      // LAPACK counts rows from 1, and would write before the matrix if it were told 0.
      miniature.first_index = schema[i].name() == "pivots" || schema[i].name() == "LU_pivots";
      stack.push_back(generator ? c10::IValue(*own) : miniature.of(args[i]));
    }
    if (random && !takes_generator) return true;
    at::AutoDispatchBelowADInplaceOrView below;
    auto kept = stack;  // as in call_boxed of worker/operators.cpp
    info.handle.callBoxed(stack);
    return true;
  } catch (const std::exception&) {
    return false;
  }
}

namespace {

OutSpec spec_of(Geometry g) {
  Buffer b;
  put_geometry(b, g.dtype, g.sizes, g.strides, g.offset, g.flags);
  return {std::move(g), std::vector<uint8_t>(b.data(), b.data() + b.size())};
}

}  // namespace

OutSpec make_spec(at::ScalarType dtype, c10::IntArrayRef sizes, c10::IntArrayRef strides) {
  return spec_of({dtype, Dims(sizes.begin(), sizes.end()), Dims(strides.begin(), strides.end())});
}

OutSpec make_spec(const at::Tensor& like) { return spec_of(geometry_of(like)); }

const Entry* find_geometry(const OpInfo& info, const Buffer& key) {
  auto& last = last_of(info);
  if (last.key.size() == key.size() && std::memcmp(last.key.data(), key.data(), key.size()) == 0) return last.entry.get();
  std::string k(reinterpret_cast<const char*>(key.data()), key.size());
  auto& c = cache();
  std::lock_guard lock(c.mu);
  auto it = c.young.find(k);
  if (it != c.young.end()) return remember(last, key, it->second);
  it = c.old.find(k);
  if (it == c.old.end()) return nullptr;
  auto entry = it->second;
  c.young.emplace(std::move(k), entry);
  return remember(last, key, std::move(entry));
}

namespace {

// Whether an index that the client can tell (contents.h) points beside what it indexes. The worker is asked to do such a call,
// and its exception is raised at once. Only while the shapes are new: looking at every call would cost every right one.
bool points_outside(const OpInfo& info, at::ArrayRef<c10::IValue> args) {
  if (Inferring::active()) return false;
  // A long tensor of ours with a value that is neither in [least, n) nor ignored.
  auto outside = [](const at::Tensor& index, int64_t least, int64_t n, std::optional<int64_t> ignored = {}) {
    if (!is_ours(index) || index.numel() == 0 || index.scalar_type() != at::kLong) return false;
    auto known = contents::of(index);
    if (!known.defined()) return false;
    known = known.contiguous();
    const int64_t* values = known.const_data_ptr<int64_t>();
    return std::any_of(values, values + known.numel(), [&](int64_t v) { return (v < least || v >= n) && v != ignored; });
  };
  if (info.uploads_cpu_indices) {  // x[i, j]: counted from the end, too; a mask stands for as many dimensions as it has
    if (!args[0].isTensor() || args.size() < 2 || !args[1].isOptionalTensorList()) return false;
    const auto& of = args[0].toTensor();
    int64_t dim = 0;
    for (const auto& index : args[1].toOptionalTensorVector()) {
      if (index && index->defined() && dim < of.dim() && outside(*index, -of.size(dim), of.size(dim))) return true;
      bool mask = index && index->defined() && (index->scalar_type() == at::kBool || index->scalar_type() == at::kByte);
      dim += mask ? index->dim() : 1;
    }
    return false;
  }
  const auto& p = info.points;
  const auto& second = args[static_cast<size_t>(p.index)];
  if (!args[0].isTensor() || !is_ours(args[0].toTensor()) || !second.isTensor()) return false;
  const at::Tensor &of = args[0].toTensor(), &index = second.toTensor();
  int64_t dim = p.dim >= 0 ? args[static_cast<size_t>(p.dim)].toInt() : p.ignored >= 0 && of.dim() > 1 ? 1 : 0;
  if (dim < 0) dim += of.dim();
  int64_t n = of.dim() == 0 ? 1 : dim >= 0 && dim < of.dim() ? of.size(dim) : -1;
  std::optional<int64_t> ignored;
  if (p.ignored >= 0) ignored = args[static_cast<size_t>(p.ignored)].toInt();
  return n >= 0 && outside(index, info.name == "aten::index_fill" ? -n : 0, n, ignored);
}

}  // namespace

const Entry* infer_geometry(const OpInfo& info, const Buffer& key, at::ArrayRef<c10::IValue> args) {
  if ((info.points.index >= 0 || info.uploads_cpu_indices) && points_outside(info, args)) {
    static const Entry asked = [] {
      Entry e;
      e.ask = e.dynamic = true;
      return e;
    }();
    return &asked;  // GEO-3
  }
  uint64_t start = now_ns();
  auto entry = answer(info, args);
  uint64_t ns = now_ns() - start;
  if (trace::on()) trace::add({start, 0, 0, 0, 0, info.number, 0, 0, -1, static_cast<uint8_t>(Trace::INFER), 0});
  auto& c = cache();
  std::lock_guard lock(c.mu);
  ++c.stats.misses;
  c.stats.asks += entry->ask;
  c.stats.miss_ns += ns;
  insert(c, key, entry);
  return remember(last_of(info), key, std::move(entry));
}

bool is_doubtful(const OpInfo& info, at::ArrayRef<c10::IValue> args) {
  auto s = signature(info, args);
  auto& c = cache();
  if (c.known(s)) return false;
  bool right = rehearse(info, args);
  if (right) c.accept(std::move(s));
  std::lock_guard lock(c.mu);
  ++c.stats.misses;
  c.stats.asks += !right;
  return !right;
}

void trust(const OpInfo& info, at::ArrayRef<c10::IValue> args) { cache().accept(signature(info, args)); }

void learn_geometry(const OpInfo& info, const Buffer& key, at::ArrayRef<c10::IValue> args, EntryPtr entry) {
  trust(info, args);
  auto& c = cache();
  std::lock_guard lock(c.mu);
  insert(c, key, entry);
  remember(last_of(info), key, std::move(entry));
}

void count_ask() {
  auto& c = cache();
  std::lock_guard lock(c.mu);
  ++c.stats.asks;
}

GeometryStats geometry_stats() {
  auto& c = cache();
  std::lock_guard lock(c.mu);
  auto s = c.stats;
  s.entries = c.young.size() + c.old.size();
  return s;
}

}  // namespace dtorch

// See geometry.h.
#include "client/geometry.h"

#include <ATen/EmptyTensor.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/util/flat_hash_map.h>

#include <chrono>
#include <mutex>
#include <string_view>

namespace dtorch {

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
  Map young, old;  // GEO-2
  GeometryStats stats;
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
  static thread_local std::vector<Last> slots;
  if (info.number >= slots.size()) slots.resize(info.number + 64);
  return slots[info.number];
}

const Entry* remember(Last& last, const Buffer& key, EntryPtr entry) {
  last.key.assign(key.data(), key.data() + key.size());
  last.entry = std::move(entry);
  return last.entry.get();
}

at::Tensor to_meta(const at::Tensor& t) {
  auto m = at::detail::empty_strided_meta(t.sizes(), t.strides(), t.scalar_type());
  auto* impl = m.unsafeGetTensorImpl();
  if (t.unsafeGetTensorImpl()->is_wrapped_number()) impl->set_wrapped_number(true);
  if (t.is_conj()) impl->_set_conj(true);
  if (t.is_neg()) impl->_set_neg(true);
  return m;
}

c10::IValue to_meta(const c10::IValue& v) {
  if (v.isTensor()) return is_ours(v.toTensor()) ? c10::IValue(to_meta(v.toTensor())) : v;
  if (v.isTensorList()) {
    auto list = v.toTensorVector();
    for (auto& t : list)
      if (is_ours(t)) t = to_meta(t);
    return list;
  }
  if (v.isOptionalTensorList()) {
    auto list = v.toOptionalTensorVector();
    for (auto& t : list)
      if (t && is_ours(*t)) t = to_meta(*t);
    return list;
  }
  if (v.isDevice()) return c10::Device(c10::DeviceType::Meta);
  if (v.isGenerator()) return c10::IValue();
  return v;
}

void add_spec(Entry& e, const at::Tensor& t) { e.outs.push_back(make_spec(t.scalar_type(), t.sizes(), t.strides())); }

// Reads the results off the meta stack; false when they cannot be predicted after all.
bool read_results(const OpInfo& info, Entry& e, const torch::jit::Stack& stack) {
  if (stack.size() != info.returns.size()) return false;
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
        if (!t.defined() || !t.is_meta()) return false;
        add_spec(e, t);
      }
      e.returns.push_back({ReturnSpec::Kind::List, first, static_cast<int>(list.size())});
    } else if (v.isNone() || (v.isTensor() && !v.toTensor().defined())) {
      e.returns.push_back({ReturnSpec::Kind::None, 0, 0});
    } else {
      if (!v.isTensor() || !v.toTensor().is_meta()) return false;
      add_spec(e, v.toTensor());
      e.returns.push_back({ReturnSpec::Kind::New, first, 1});
    }
  }
  return true;
}

bool same(c10::IntArrayRef a, c10::IntArrayRef b) { return a == b; }

EntryPtr run_meta(const OpInfo& info, at::ArrayRef<c10::IValue> args) {
  auto e = std::make_shared<Entry>();
  if (info.asks) {
    e->ask = true;
    return e;
  }
  try {
    torch::jit::Stack stack;
    stack.reserve(args.size());
    for (const auto& v : args) stack.push_back(to_meta(v));
    std::vector<std::pair<int, at::Tensor>> writes;
    for (int i : info.writes)
      if (stack[static_cast<size_t>(i)].isTensor()) writes.emplace_back(i, stack[static_cast<size_t>(i)].toTensor());
    {
      at::AutoDispatchBelowADInplaceOrView below;
      info.handle.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::Meta), &stack);
    }
    e->ask = !read_results(info, *e, stack);
    for (auto& [i, after] : writes) {
      const auto& before = args[static_cast<size_t>(i)].toTensor();
      if (!same(before.sizes(), after.sizes()) || !same(before.strides(), after.strides()))
        e->rewrites.push_back({i, Dims(after.sizes().begin(), after.sizes().end()),
                               Dims(after.strides().begin(), after.strides().end())});
    }
  } catch (const std::exception&) {  // no meta, or a wrong call: the worker knows which (and says so in eager's words)
    *e = Entry{};
    e->ask = true;
  }
  return e;
}

}  // namespace

OutSpec make_spec(at::ScalarType dtype, c10::IntArrayRef sizes, c10::IntArrayRef strides) {
  OutSpec o{dtype, Dims(sizes.begin(), sizes.end()), Dims(strides.begin(), strides.end()), {}};
  Buffer b;
  put_geometry(b, dtype, sizes, strides, 0, 0);
  o.wire.assign(b.data(), b.data() + b.size());
  return o;
}

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

const Entry* infer_geometry(const OpInfo& info, const Buffer& key, at::ArrayRef<c10::IValue> args) {
  auto start = std::chrono::steady_clock::now();
  auto entry = run_meta(info, args);
  auto ns = std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now() - start).count();
  auto& c = cache();
  std::lock_guard lock(c.mu);
  ++c.stats.misses;
  c.stats.asks += entry->ask;
  c.stats.miss_ns += static_cast<uint64_t>(ns);
  if (c.young.size() >= kCacheEntries) {
    c.old.swap(c.young);
    c.young.clear();
  }
  c.young.emplace(std::string(reinterpret_cast<const char*>(key.data()), key.size()), entry);
  return remember(last_of(info), key, std::move(entry));
}

GeometryStats geometry_stats() {
  auto& c = cache();
  std::lock_guard lock(c.mu);
  auto s = c.stats;
  s.entries = c.young.size() + c.old.size();
  return s;
}

}  // namespace dtorch

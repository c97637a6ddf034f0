// See encode.h.
#include "client/encode.h"

#include <ATen/Context.h>
#include <ATen/core/grad_mode.h>

#include <ATen/core/Generator.h>

#include <algorithm>
#include <memory>
#include <vector>

#include "client/generator.h"
#include "client/issue.h"
#include "common/protocol.h"
#include "common/sparse_parts.h"

namespace dtorch {

namespace {

struct Pool {
  std::vector<std::unique_ptr<Scratch>> all;
  size_t used = 0;
};
Pool& pool() {
  static thread_local Pool p;
  DTORCH_TLS Pool* found = nullptr;
  if (__builtin_expect(!found, 0)) found = &p;
  return *found;
}

}  // namespace

ScratchLease::ScratchLease(const OpInfo& info) {
  auto& p = pool();
  if (p.used == p.all.size()) p.all.push_back(std::make_unique<Scratch>());
  s_ = p.all[p.used++].get();
  s_->record.clear();
  s_->key.clear();
  s_->refs.clear();
  s_->worker = -1;
  std::memcpy(s_->key.reserve(5), &info.number, 4);
  s_->key.data()[4] = static_cast<uint8_t>(c10::typeMetaToScalarType(c10::get_default_dtype()));  // results may follow it
  if (__builtin_expect(info.reads_grad_mode && at::GradMode::is_enabled(), 0)) s_->key.data()[4] |= 0x80;
  if (__builtin_expect(Session::get().accelerated(), 0)) s_->key.data()[4] |= 0x40;  // other devices give other strides
  s_->key.advance(5);
  if (__builtin_expect(info.reads_kernel_switches, 0)) {
    auto& c = at::globalContext();
    const bool switches[] = {c.userEnabledFlashSDP(), c.userEnabledMemEfficientSDP(), c.userEnabledCuDNNSDP(),
                             c.userEnabledMathSDP(), c.userEnabledCuDNN()};
    uint32_t all = attention_order() << 2 | static_cast<uint32_t>(deterministic_mode());
    for (bool on : switches) all = all << 1 | on;
    s_->key.append(reinterpret_cast<const uint8_t*>(&all), sizeof all);
  }
}

ScratchLease::~ScratchLease() { --pool().used; }

void put_tensor(Buffer& b, const at::TensorImpl* t, const StorageCtx* ctx) {
  if (is_first(t, ctx)) return mp::put_uint(b, ctx->id);
  mp::put_array(b, 2);
  mp::put_uint(b, ctx->id);
  put_geometry(b, c10::typeMetaToScalarType(t->dtype()), t->sizes(), t->strides(), t->storage_offset(),
               (t->is_conj() ? kFlagConj : 0) | (t->is_neg() ? kFlagNeg : 0));
}

void Encoder::mismatch(const at::Tensor& t) {
  TORCH_CHECK(t.layout() == at::kStrided || is_sparse(t), "dtorch: ", info_.name, " was given a ", t.layout(),
              " tensor, which dtorch does not hold; use .to_dense() before moving it");
  std::string here = s_.worker >= 0 ? "dtorch:" + std::to_string(s_.worker) : "dtorch:" + std::to_string(current_worker());
  TORCH_CHECK(false, "Expected all tensors to be on the same device, but found at least two devices, ", here, " and ",
              t.device(), "! (when checking arguments of ", info_.name, ")");
}

namespace {

// A tensor that stands for zeros gets them, once: PyTorch's kernels for such tensors let few operators through to us.
void write_zeros(const at::Tensor& t) {
  auto* ctx = ctx_of(t);
  if (!ctx->lazy || Inferring::active()) return;
  static const OpInfo& zero = op_info("aten::zero_", "");
  const auto& g = ctx->first;
  auto whole = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(t.storage()),
                                                        c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                                        c10::scalarTypeToTypeMeta(g.dtype));
  whole.unsafeGetTensorImpl()->set_sizes_and_strides(g.sizes, g.strides);
  torch::jit::Stack stack{whole};
  issue_boxed(zero, &stack);
}

}  // namespace

inline void Encoder::name(const at::Tensor& t) {
  auto* impl = t.unsafeGetTensorImpl();
  auto* ctx = ctx_of(impl->unsafe_storage().unsafeGetStorageImpl());
  if (s_.worker != ctx->worker) {
    if (s_.worker >= 0) mismatch(t);
    s_.worker = ctx->worker;
  }
  s_.refs.push_back(ctx);
  put_tensor(s_.record, impl, ctx);
}

void Encoder::arg(const at::Tensor& t) {
  if (!t.defined()) return nil();
  auto* impl = t.unsafeGetTensorImpl();
  if (__builtin_expect(impl->device_type() != kDevice, 0)) return cpu_tensor(t);
  constexpr auto unusual = c10::python_ks | c10::DispatchKeySet(c10::DispatchKey::ZeroTensor);
  if (__builtin_expect(impl->layout() != at::kStrided || impl->key_set().has_any(unusual), 0)) {
    if (parts_in(impl->layout()) && !impl->is_python_dispatch()) return sparse(t);
    if (impl->layout() != at::kStrided || impl->is_python_dispatch()) mismatch(t);
    write_zeros(t);
  }
  name(t);

  auto sizes = impl->sizes();
  auto strides = impl->strides();
  size_t n = sizes.size() * 8;
  uint8_t* p = s_.key.reserve(4 + 2 * n);
  p[0] = 't';
  p[1] = static_cast<uint8_t>(c10::typeMetaToScalarType(impl->dtype()));
  p[2] = static_cast<uint8_t>(sizes.size());
  p[3] = static_cast<uint8_t>(impl->is_conj() | (impl->is_neg() << 1) | (impl->is_wrapped_number() << 2));
  std::memcpy(p + 4, sizes.data(), n);
  std::memcpy(p + 4 + n, strides.data(), n);
  s_.key.advance(4 + 2 * n);
}

// By its parts. Its key has no number of elements: no dense result's geometry follows from that.
void Encoder::sparse(const at::Tensor& t) {
  auto s = take_apart(t);
  auto known = std::find(sparse_.begin(), sparse_.end(), t.unsafeGetTensorImpl());
  if (known != sparse_.end()) s.same = known - sparse_.begin();
  else sparse_.push_back(t.unsafeGetTensorImpl());
  put_sparse_head(s_.record, s);
  for (const auto& part : s.parts) {
    if (!is_ours(part)) mismatch(part);
    if (part.unsafeGetTensorImpl()->key_set().has(c10::DispatchKey::ZeroTensor)) write_zeros(part);
    name(part);
  }
  uint8_t head[] = {'S', static_cast<uint8_t>(s.same + 1), static_cast<uint8_t>(s.layout), static_cast<uint8_t>(t.scalar_type()), s.coalesced,
                    static_cast<uint8_t>(s.parts[0].size(0)), static_cast<uint8_t>(s.sizes.size())};
  if (s.layout != at::kSparse) head[5] = static_cast<uint8_t>(s.parts.back().dim());
  s_.key.append(head, sizeof head);
  s_.key.append(s.sizes.data(), s.sizes.size() * sizeof(int64_t));
}

// A CPU tensor may stand among ours where PyTorch allows it beside any device: a single number.
void Encoder::cpu_tensor(const at::Tensor& t) {
  if (t.device().type() != c10::DeviceType::CPU || t.dim() != 0 || t.layout() != at::kStrided) mismatch(t);
  bool wrapped = t.unsafeGetTensorImpl()->is_wrapped_number();
  size_t n = t.element_size();
  uint8_t bytes[3 + 16];
  bytes[0] = static_cast<uint8_t>(t.scalar_type());
  bytes[1] = wrapped;
  bytes[2] = 0;
  std::memcpy(bytes + 3, t.const_data_ptr(), n);
  mp::put_ext(s_.record, static_cast<int8_t>(Ext::CPU_TENSOR), bytes, 3 + n);
  s_.key.push('c');
  s_.key.push(bytes[0]);
  s_.key.push(static_cast<uint8_t>(wrapped));
}

void Encoder::arg(const c10::Scalar& v) {
  if (v.isComplex()) {
    auto c = v.toComplexDouble();
    double parts[2] = {c.real(), c.imag()};
    mp::put_ext(s_.record, static_cast<int8_t>(Ext::COMPLEX), parts, sizeof parts);
    s_.key.push('C');
  } else if (v.isBoolean()) {
    mp::put_bool(s_.record, v.toBool());
    s_.key.push('L');
  } else if (v.isIntegral(false)) {
    mp::put_int(s_.record, v.toLong());
    s_.key.push('I');
  } else {
    mp::put_double(s_.record, v.toDouble());
    s_.key.push('D');
  }
}

void Encoder::arg(double v) {
  int64_t bits;
  std::memcpy(&bits, &v, 8);
  key('d', bits);
  mp::put_double(s_.record, v);
}

void Encoder::arg(std::string_view v) {
  key('s', static_cast<int64_t>(v.size()));
  s_.key.append(v.data(), v.size());
  mp::put_str(s_.record, v);
}

void Encoder::arg(c10::IntArrayRef v) {
  key('a', static_cast<int64_t>(v.size()));
  s_.key.append(v.data(), v.size() * 8);
  mp::put_array(s_.record, v.size());
  for (int64_t x : v) mp::put_int(s_.record, x);
}

void Encoder::arg(c10::SymIntArrayRef v) { arg(C10_AS_INTARRAYREF_SLOW(v)); }

void Encoder::arg(c10::ArrayRef<double> v) {
  key('f', static_cast<int64_t>(v.size()));
  s_.key.append(v.data(), v.size() * 8);
  mp::put_array(s_.record, v.size());
  for (double x : v) mp::put_double(s_.record, x);
}

void Encoder::arg(at::TensorList v) {
  key('l', static_cast<int64_t>(v.size()));
  mp::put_array(s_.record, v.size());
  for (const auto& t : v) arg(t);
}

void Encoder::arg(const at::ITensorListRef& v) {
  key('l', static_cast<int64_t>(v.size()));
  mp::put_array(s_.record, v.size());
  for (const auto& t : v) arg(t);
}

void Encoder::arg(const c10::List<std::optional<at::Tensor>>& v) {
  key('o', static_cast<int64_t>(v.size()));
  mp::put_array(s_.record, v.size());
  for (const std::optional<at::Tensor> t : v) arg(t);
}

void Encoder::arg(c10::Device v) {
  TORCH_CHECK(v.type() == kDevice || v.is_cpu(), "dtorch: ", info_.name, " cannot make a tensor on ", v, " from dtorch tensors");
  uint8_t code = v.is_cpu() ? 1 : 0;
  if (code == 0 && s_.worker < 0) s_.worker = worker_of(v);
  mp::put_ext(s_.record, static_cast<int8_t>(Ext::DEVICE), &code, 1);
  key('v', code);
}

void Encoder::arg(const at::Generator& g) {
  if (!g.defined()) return nil();
  uint32_t number = generator_number(g, info_.name);
  int worker = g.device().index();
  if (s_.worker < 0) s_.worker = worker;
  TORCH_CHECK(s_.worker == worker, "Expected a 'dtorch:", s_.worker, "' generator device but found 'dtorch:", worker, "'");
  mp::put_ext(s_.record, static_cast<int8_t>(Ext::GENERATOR), &number, 4);
  s_.key.push('g');
}

void Encoder::ivalue(const c10::IValue& v, size_t index) {
  if (v.isTensor()) return arg(v.toTensor());
  if (v.isNone()) return nil();
  bool by_type = info_.scalar_by_type[index];
  if (v.isInt()) return by_type ? arg(c10::Scalar(v.toInt())) : arg(v.toInt());
  if (v.isDouble()) return by_type ? arg(c10::Scalar(v.toDouble())) : arg(v.toDouble());
  if (v.isBool()) return by_type ? arg(c10::Scalar(v.toBool())) : arg(v.toBool());
  if (v.isComplexDouble()) {
    auto c = v.toComplexDouble();
    if (!by_type) s_.key.append(&c, sizeof c);
    return arg(c10::Scalar(c));
  }
  if (v.isSymInt()) return arg(v.toSymInt());
  if (v.isIntList()) {
    auto list = v.toIntList();
    c10::SmallVector<int64_t, 8> ints(list.begin(), list.end());
    return arg(c10::IntArrayRef(ints));
  }
  if (v.isSymIntList()) {
    auto list = v.toSymIntVector();
    return arg(c10::SymIntArrayRef(list));
  }
  if (v.isTensorList()) {
    auto list = v.toTensorVector();
    return arg(at::TensorList(list));
  }
  if (v.isOptionalTensorList()) return arg(v.toOptionalTensorList());
  if (v.isDoubleList()) {
    auto list = v.toDoubleVector();
    return arg(c10::ArrayRef<double>(list));
  }
  if (v.isBoolList()) {
    auto list = v.toBoolList();
    key('B', static_cast<int64_t>(list.size()));
    mp::put_array(s_.record, list.size());
    for (bool b : list) arg(b);
    return;
  }
  if (v.isString()) return arg(std::string_view(v.toStringRef()));
  if (v.isDevice()) return arg(v.toDevice());
  if (v.isGenerator()) return arg(v.toGenerator());
  if (v.isList()) {  // Scalar[] and the like
    auto list = v.toList();
    key('m', static_cast<int64_t>(list.size()));
    mp::put_array(s_.record, list.size());
    for (size_t i = 0; i < list.size(); ++i) {
      const c10::IValue item = list.get(i);
      if (item.isScalar() && !info_.custom) arg(item.toScalar());
      else ivalue(item, index);
    }
    return;
  }
  TORCH_CHECK_NOT_IMPLEMENTED(false, "dtorch: ", info_.name, " has an argument of a kind that cannot be sent (", v.tagKind(),
                              "); move the tensors to the CPU for this operator");
}

}  // namespace dtorch

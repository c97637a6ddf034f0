// Kernels written by hand, and who gets the boxed one.
//
// By hand: making empty tensors, the dense views that have no composite kernel, set_ and resize_, copies and item().
// Everything else is a record: the boxed kernel is the fallback of PrivateUse1, and it is also registered
// directly for composite operators with an autograd formula of their own ("explicit"), which would otherwise fall apart
// into several records below autograd, where nothing is gained by it.
#include "client/device.h"

#include <ATen/Context.h>
#include <ATen/ExpandUtils.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/native/Resize.h>
#include <ATen/native/ResizeCommon.h>
#include <ATen/native/TensorFactories.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/_to_copy_compositeexplicitautograd_dispatch.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/is_set_to_native.h>
#include <ATen/ops/kaiser_window_ops.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/MemoryFormat.h>
#include <torch/library.h>

#include <string>
#include <string_view>
#include <unordered_set>

#include "client/issue.h"
#include "client/sites.h"
#include "client/value.h"

namespace dtorch {

namespace {

using c10::SymInt;

void boxed(const c10::OperatorHandle& op, torch::jit::Stack* stack) { issue_boxed(op_info(op), stack); }

// --- making ----------------------------------------------------------------------------------------------------------

void check_options(std::optional<c10::Layout> layout, std::optional<bool> pin) {
  TORCH_CHECK_NOT_IMPLEMENTED(!layout || *layout == at::kStrided, "dtorch: ", layout.value_or(at::kStrided),
                              " tensors are not supported on the dtorch device; keep them on the CPU or use .to_dense()");
  TORCH_CHECK(!pin || !*pin, "Only dense CPU tensors can be pinned");
}

at::ScalarType checked_dtype(std::optional<at::ScalarType> dtype) {
  auto d = dtype.value_or(c10::typeMetaToScalarType(c10::get_default_dtype()));
  TORCH_CHECK_NOT_IMPLEMENTED(!c10::isQIntType(d), "dtorch: quantized tensors (", d,
                              ") are not supported on the dtorch device; call .dequantize() or keep them on the CPU");
  return d;
}

// In deterministic mode PyTorch fills memory that nothing has written yet.
bool fills_memory() {
  const auto& context = at::globalContext();
  return __builtin_expect(context.deterministicAlgorithms(), 0) && context.deterministicFillUninitializedMemory() &&
         !Inferring::active();
}

at::Tensor located(at::Tensor t) {
  if (!Inferring::active()) ctx_of(t)->site = sites::current();
  if (fills_memory()) at::native::fill_empty_deterministic_(t);
  return t;
}

at::Tensor empty(c10::SymIntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<c10::Layout> layout,
                 std::optional<c10::Device> device, std::optional<bool> pin, std::optional<c10::MemoryFormat> format) {
  check_options(layout, pin);
  auto sizes = C10_AS_INTARRAYREF_SLOW(size);
  for (int64_t n : sizes)
    TORCH_CHECK(n >= 0, "Trying to create tensor with negative dimension ", n, ": ", sizes);
  int worker = worker_of(device);
  auto d = checked_dtype(dtype);
  auto f = format.value_or(c10::MemoryFormat::Contiguous);
  if (f == c10::MemoryFormat::ChannelsLast) return located(make_tensor(worker, d, sizes, c10::get_channels_last_strides_2d(sizes)));
  if (f == c10::MemoryFormat::ChannelsLast3d)
    return located(make_tensor(worker, d, sizes, c10::get_channels_last_strides_3d(sizes)));
  return located(make_tensor(worker, d, sizes));
}

at::Tensor empty_strided(c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<at::ScalarType> dtype,
                         std::optional<c10::Layout> layout, std::optional<c10::Device> device, std::optional<bool> pin) {
  check_options(layout, pin);
  auto sizes = C10_AS_INTARRAYREF_SLOW(size);
  auto strides = C10_AS_INTARRAYREF_SLOW(stride);
  TORCH_CHECK(sizes.size() == strides.size(), "dimensionality of sizes (", sizes.size(), ") must match dimensionality of strides (",
              strides.size(), ")");
  return located(make_tensor(worker_of(device), checked_dtype(dtype), sizes, strides));
}

// A tensor that stands for zeros. PyTorch's kernels for such tensors go on without their memory, and autograd leaves out what
// they would add; the encoder writes the zeros should an operator need them after all (encode.cpp).
at::Tensor zero_tensor(c10::SymIntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<c10::Layout> layout,
                       std::optional<c10::Device> device, std::optional<bool> pin) {
  check_options(layout, pin);
  auto sizes = C10_AS_INTARRAYREF_SLOW(size);
  auto d = checked_dtype(dtype);
  auto memory = make_tensor(worker_of(device), d, sizes);
  auto keys = c10::DispatchKeySet(c10::DispatchKey::PrivateUse1) | c10::DispatchKeySet(c10::DispatchKey::ZeroTensor);
  auto t = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(memory.storage()), keys, c10::scalarTypeToTypeMeta(d));
  t.unsafeGetTensorImpl()->set_sizes_contiguous(sizes);
  return t;
}

// Its explicit composite ends in a kernel stub that looks for one of ours: made on the CPU, then moved.
at::Tensor kaiser_window(int64_t length, bool periodic, double beta, std::optional<at::ScalarType> dtype,
                         std::optional<c10::Layout> layout, std::optional<c10::Device> device, std::optional<bool> pin) {
  check_options(layout, pin);
  auto cpu = at::_ops::kaiser_window_beta::call(length, periodic, beta, dtype, layout, c10::Device(c10::DeviceType::CPU), pin);
  return upload(cpu, worker_of(device));
}

at::Tensor kaiser_window_periodic(int64_t length, bool periodic, std::optional<at::ScalarType> dtype,
                                  std::optional<c10::Layout> layout, std::optional<c10::Device> device,
                                  std::optional<bool> pin) {
  return kaiser_window(length, periodic, 12.0, dtype, layout, device, pin);
}
at::Tensor kaiser_window_default(int64_t length, std::optional<at::ScalarType> dtype, std::optional<c10::Layout> layout,
                                 std::optional<c10::Device> device, std::optional<bool> pin) {
  return kaiser_window(length, true, 12.0, dtype, layout, device, pin);
}

// --- views: metadata of the client's tensor only -----------------------------------------------------------------------

at::Tensor as_strided(const at::Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride,
                      std::optional<SymInt> offset) {
  std::optional<int64_t> at_;
  if (offset) at_ = offset->guard_int(__FILE__, __LINE__);
  return at::native::as_strided_tensorimpl(self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), at_);
}
at::Tensor view(const at::Tensor& self, c10::SymIntArrayRef size) {
  return at::native::view(self, C10_AS_INTARRAYREF_SLOW(size));
}
at::Tensor reshape_alias(const at::Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  return at::native::_reshape_alias(self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
}

at::Tensor& set_storage_range(at::Tensor& self, at::Storage storage, SymInt offset, c10::SymIntArrayRef size,
                              c10::SymIntArrayRef stride) {
  auto sizes = C10_AS_INTARRAYREF_SLOW(size);
  auto strides = stride.empty() && !size.empty() ? row_major(sizes) : Dims(C10_AS_INTARRAYREF_SLOW(stride).begin(),
                                                                           C10_AS_INTARRAYREF_SLOW(stride).end());
  TORCH_CHECK(storage.device().type() == kDevice, "dtorch: cannot make a dtorch tensor of a storage on ", storage.device());
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(storage));
  int64_t at_ = offset.guard_int(__FILE__, __LINE__);
  impl->set_storage_offset(at_);
  impl->set_sizes_and_strides(sizes, strides);
  auto* s = impl->unsafe_storage().unsafeGetStorageImpl();
  size_t need = storage_bytes(sizes, strides, at_, self.element_size());
  if (need > s->nbytes()) resize_storage(s, need, true);
  return self;
}

at::Tensor& set_nothing(at::Tensor& self) {
  auto t = make_tensor(self.device().index(), self.scalar_type(), {0});
  return set_storage_range(self, t.storage(), 0, c10::SymIntArrayRef{SymInt(0)}, {});
}

const at::Tensor& resize(const at::Tensor& self, c10::SymIntArrayRef size, std::optional<c10::MemoryFormat> format) {
  check_alive(ctx_of(self));
  auto sizes = C10_AS_INTARRAYREF_SLOW(size);
  auto* impl = self.unsafeGetTensorImpl();
  bool same_format = !format || *format == c10::MemoryFormat::Preserve;
  if (same_format && impl->sizes() == sizes) return self;  // as eager: the strides stay
  auto* ctx = ctx_of(self);
  bool whole = is_first(impl, ctx);
  impl->set_sizes_contiguous(sizes);
  if (format && *format != c10::MemoryFormat::Preserve) impl->empty_tensor_restride(*format);
  auto* storage = impl->unsafe_storage().unsafeGetStorageImpl();
  size_t need = storage_bytes(impl->sizes(), impl->strides(), impl->storage_offset(), self.element_size());
  size_t before = storage->nbytes();
  if (need > before) resize_storage(storage, need, true);
  if (whole && ctx->lazy) {  // nobody knows the old geometry: the new one is its first
    ctx->first.sizes.assign(impl->sizes().begin(), impl->sizes().end());
    ctx->first.strides.assign(impl->strides().begin(), impl->strides().end());
  }
  if (need > before && fills_memory()) at::native::fill_resize_deterministic_(self, static_cast<int64_t>(before));
  return self;
}

// --- values ----------------------------------------------------------------------------------------------------------

// Raises what eager's copy_ raises when `self` does not broadcast to `dst`.
void check_broadcast(const at::Tensor& self, const at::Tensor& dst) {
  if (self.sizes() == dst.sizes()) return;
  auto together = at::infer_size(dst.sizes(), self.sizes());
  TORCH_CHECK(dst.sizes() == c10::IntArrayRef(together), "output with shape ", dst.sizes(),
              " doesn't match the broadcast shape ", c10::IntArrayRef(together));
}

at::Tensor copy_from(const at::Tensor& self, const at::Tensor& dst, bool non_blocking) {
  check_broadcast(self, dst);
  if (Inferring::active()) return dst;
  dtorch::copy(self, dst, non_blocking);
  return dst;
}
at::Tensor copy_from_and_resize(const at::Tensor& self, const at::Tensor& dst) {
  if (Inferring::active()) return dst;
  dst.resize_(self.sizes());
  dtorch::copy(self, dst);
  return dst;
}

// To the CPU: the value as it was fetched, mapped where it is large, instead of a copy of it. All else as ever.
at::Tensor to_copy(const at::Tensor& self, std::optional<at::ScalarType> dtype, std::optional<c10::Layout> layout,
                   std::optional<c10::Device> device, std::optional<bool> pin, bool non_blocking,
                   std::optional<c10::MemoryFormat> format) {
  bool fetches = device && device->is_cpu() && dtype.value_or(self.scalar_type()) == self.scalar_type() &&
                 layout.value_or(at::kStrided) == at::kStrided && !pin.value_or(false) && !Inferring::active();
  if (!fetches)
    return at::compositeexplicitautograd::_to_copy(self, dtype, layout, device, pin, non_blocking, format);
  auto value = fetch_now(self);
  if (format && *format != c10::MemoryFormat::Preserve) return value.contiguous(*format);
  if (self.is_non_overlapping_and_dense()) return value;
  auto strides = at::infer_dense_strides(self.sizes(), self.strides());  // what the worker packed row-major
  if (value.strides() == c10::IntArrayRef(strides)) return value;
  return at::empty_strided(self.sizes(), strides, value.options()).copy_(value);
}

c10::Scalar item(const at::Tensor& self) {
  if (Inferring::active()) throw Uninferable(true);
  check_alive(ctx_of(self));
  Session::get().admit(ctx_of(self)->worker);
  auto known = contents::tell(self);
  return known.defined() ? known.item() : fetch_now(self).item();
}

void record_stream(at::Tensor&, c10::Stream) {}  // a release already waits for the last use (WIRE-2)

bool shallow_copy_ok(const at::Tensor&, const at::Tensor&) { return true; }

// --- registration ----------------------------------------------------------------------------------------------------

// Explicit composites that must stay composite: they change metadata, look at it, or end in a kernel above.
bool stays_composite(const std::string& name) {
  static const std::unordered_set<std::string> names{
      "aten::copy_",          "aten::_unsafe_view", "aten::lift",           "aten::_lazy_clone", "aten::resize_as_",
      "aten::resize",         "aten::resize_as",    "aten::set",            "aten::_print",      "aten::_reshape_copy",
      "aten::_pack_padded_sequence",                "aten::detach_",        "aten::_assert_async", "aten::record_stream",
      "aten::unsafe_split",   "aten::unsafe_split_with_sizes",
      "aten::as_strided_scatter"};  // refuses by requires_grad, which a worker does not see
  std::string_view n = name;
  auto has = [&](std::string_view p) { return n.find(p) != std::string_view::npos; };
  return names.count(name) || has("sparse") || has("_test_") || has("sym_constrain") || has("_assert") || has("nested") ||
         has("coalesce") || has("quantize") || has("mkldnn") || has("overrideable");
}

bool forced(const c10::OperatorHandle& op) {
  const auto& schema = op.schema();
  if (op.hasTag(at::Tag::inplace_view) || stays_composite(schema.name())) return false;
  bool structured = op.hasKernelForDispatchKey(c10::DispatchKey::CompositeExplicitAutogradNonFunctional);
  bool explicit_ = op.hasKernelForDispatchKey(c10::DispatchKey::CompositeExplicitAutograd);
  // Three operators have a CPU kernel beside an implicit composite (silu_backward, ...): eager on the CPU runs the kernel.
  bool implicit_beside_cpu = op.hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd) &&
                             op.hasKernelForDispatchKey(c10::DispatchKey::CPU);
  if (!structured && !explicit_ && !implicit_beside_cpu) return false;
  bool takes_tensor = false;
  for (const auto& a : schema.arguments()) {
    auto text = a.type()->str();
    if (text == "Device" || text == "Device?" || text == "Layout?" || text == "Storage" || text == "Stream") return false;
    takes_tensor = takes_tensor || text.find("Tensor") != std::string::npos;
    if (a.alias_info() && !a.alias_info()->isWrite()) return false;  // a view
  }
  bool writes = false;
  for (const auto& a : schema.arguments()) {
    if (!a.alias_info() || !a.alias_info()->isWrite()) continue;
    writes = true;
    // A list given as out=: PyTorch counts the changes of such tensors only where the composite resizes and copies.
    if (a.kwarg_only() && a.type()->kind() == c10::TypeKind::ListType) return false;
  }
  if (schema.returns().empty() && !writes) return false;  // a check (_linalg_check_errors): it must look at the value now
  for (const auto& r : schema.returns())
    if (r.type()->str().find("Tensor") == std::string::npos) return false;
  return takes_tensor;
}

// Nested and quantized tensors have dispatch keys of their own; so have sparse ones (sparse.cpp).
void unsupported(const c10::OperatorHandle& op, torch::jit::Stack*) {
  TORCH_CHECK_NOT_IMPLEMENTED(false, "dtorch: ", op.schema().name(),
                              " on a nested or quantized tensor is not supported on the dtorch device. Keep such tensors on "
                              "the CPU, or make them dense first: torch.nested.to_padded_tensor, .dequantize()");
}

torch::Library& keep(torch::Library&& lib) {
  static auto* all = new std::vector<std::unique_ptr<torch::Library>>;
  all->push_back(std::make_unique<torch::Library>(std::move(lib)));
  return *all->back();
}

}  // namespace

void run_on_workers(const std::string& name, const std::string& overload) {
  auto op = c10::Dispatcher::singleton().findSchema({name, overload});
  if (!op || name.compare(0, 6, "aten::") == 0 || op->hasKernelForDispatchKey(c10::DispatchKey::PrivateUse1)) return;
  if (!op->hasKernelForDispatchKey(c10::DispatchKey::CompositeExplicitAutograd)) return;  // the fallback's, or takes itself apart
  size_t colon = name.find("::");
  auto& m = keep(torch::Library(torch::Library::IMPL, name.substr(0, colon), c10::DispatchKey::PrivateUse1, __FILE__, __LINE__));
  std::string full = name.substr(colon + 2) + (overload.empty() ? "" : "." + overload);
  m.impl(full.c_str(), torch::CppFunction::makeFromBoxedFunction<&boxed>());
}

void register_kernels() {
  using torch::Library;
  watch_operators();
  auto& m = keep(Library(Library::IMPL, "aten", c10::DispatchKey::PrivateUse1, __FILE__, __LINE__));
  m.impl("empty.memory_format", TORCH_FN(empty));
  m.impl("empty_strided", TORCH_FN(empty_strided));
  m.impl("_efficientzerotensor", TORCH_FN(zero_tensor));
  m.impl("kaiser_window.beta", TORCH_FN(kaiser_window));
  m.impl("kaiser_window.periodic", TORCH_FN(kaiser_window_periodic));
  m.impl("kaiser_window", TORCH_FN(kaiser_window_default));
  m.impl("as_strided", TORCH_FN(as_strided));
  m.impl("view", TORCH_FN(view));
  m.impl("_reshape_alias", TORCH_FN(reshape_alias));
  m.impl("unfold", TORCH_FN(at::native::unfold));
  m.impl("view_as_real", TORCH_FN(at::native::view_as_real));
  m.impl("view_as_complex", TORCH_FN(at::native::view_as_complex));
  m.impl("set_.source_Tensor", TORCH_FN(at::native::set_tensor_));
  m.impl("set_.source_Storage", TORCH_FN(static_cast<at::Tensor& (*)(at::Tensor&, at::Storage)>(at::native::set_)));
  m.impl("set_.source_Storage_storage_offset", TORCH_FN(set_storage_range));
  m.impl("set_", TORCH_FN(set_nothing));
  m.impl("is_set_to", TORCH_FN(at::native::is_set_to));
  m.impl("resize_", TORCH_FN(resize));
  m.impl("_copy_from", TORCH_FN(copy_from));
  m.impl("_copy_from_and_resize", TORCH_FN(copy_from_and_resize));
  m.impl("_to_copy", TORCH_FN(to_copy));
  m.impl("_local_scalar_dense", TORCH_FN(item));
  m.impl("record_stream", TORCH_FN(record_stream));
  m.impl("_has_compatible_shallow_copy_type", TORCH_FN(shallow_copy_ok));

  register_hot_kernels();
  register_whole_kernels();
  serve_accelerators(false);
  register_counts();
  register_recurrent();
  register_autocast();
  register_attention();
  register_accelerators();
  register_sparse();
  register_nested();

  auto& dispatcher = c10::Dispatcher::singleton();
  for (const auto& name : dispatcher.getAllOpNames()) {
    if (name.name.compare(0, 6, "aten::") != 0) continue;
    auto op = dispatcher.findSchema(name);
    if (!op || op->hasKernelForDispatchKey(c10::DispatchKey::PrivateUse1) || !forced(*op)) continue;
    std::string full = name.name.substr(6) + (name.overload_name.empty() ? "" : "." + name.overload_name);
    m.impl(full.c_str(), torch::CppFunction::makeFromBoxedFunction<&boxed>());
  }
  auto& any = keep(Library(Library::IMPL, "_", c10::DispatchKey::PrivateUse1, __FILE__, __LINE__));
  any.fallback(torch::CppFunction::makeFromBoxedFunction<&boxed>());

  for (auto key : {c10::DispatchKey::NestedTensorPrivateUse1, c10::DispatchKey::QuantizedPrivateUse1}) {
    auto& none = keep(Library(Library::IMPL, "_", key, __FILE__, __LINE__));
    none.fallback(torch::CppFunction::makeFromBoxedFunction<&unsupported>());
  }

  // A conjugate or negative view reaches the copy as it is; materialising it first would copy again, without end.
  for (auto key : {c10::DispatchKey::Conjugate, c10::DispatchKey::Negative}) {
    auto& lazy = keep(Library(Library::IMPL, "aten", key, __FILE__, __LINE__));
    lazy.impl("_copy_from", torch::CppFunction::makeFallthrough());
    lazy.impl("_copy_from_and_resize", torch::CppFunction::makeFallthrough());
  }
}

}  // namespace dtorch

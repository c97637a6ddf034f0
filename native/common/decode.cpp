// See decode.h.
#include "common/decode.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/List.h>
#include <ATen/core/grad_mode.h>
#include <ATen/core/jit_type.h>

#include "common/device.h"
#include "common/protocol.h"
#include "common/sparse_parts.h"

namespace dtorch {

Slot& Store::at(uint64_t id) {
  auto* s = find(id);
  TORCH_CHECK(s, "storage ", id, " is unknown to the worker (a bug of dtorch)");
  return *s;
}

at::Tensor view_of(const at::Tensor& first, const Geometry& g) {
  // Some operators of accelerators give tensors on the CPU too.
  return tensor_on(c10::Storage(first.unsafeGetTensorImpl()->unsafe_storage()),
                   first.is_cpu() ? c10::DispatchKeySet(c10::DispatchKey::CPU) : computing.keys, g);
}

at::Tensor tensor_on(c10::Storage storage, c10::DispatchKeySet keys, const Geometry& g) {
  auto t = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), keys, c10::scalarTypeToTypeMeta(g.dtype));
  auto* impl = t.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(g.sizes, g.strides, g.offset);
  if (g.flags & kFlagConj) impl->_set_conj(true);
  if (g.flags & kFlagNeg) impl->_set_neg(true);
  return t;
}

c10::complex<double> read_complex(mp::Reader& in) {
  int8_t type;
  auto bytes = in.ext(&type);
  double parts[2];
  TORCH_CHECK(type == static_cast<int8_t>(Ext::COMPLEX) && bytes.size() == sizeof parts, "dtorch: not a complex number");
  std::memcpy(parts, bytes.data(), sizeof parts);
  return {parts[0], parts[1]};
}

std::vector<uint64_t> storages_of(const c10::FunctionSchema& schema, const std::vector<int>& arguments, mp::Reader in) {
  std::vector<uint64_t> out;
  size_t n = in.array();
  auto one = [&out](auto&& self, mp::Reader& r) -> void {
    if (r.kind() == mp::Kind::Int) {
      out.push_back(r.uint());
    } else if (r.kind() == mp::Kind::Array) {
      size_t length = r.array();
      if (length == kViewLength) {
        out.push_back(r.uint());
        return r.skip();
      }
      for (size_t parts = read_sparse_head(r, length).parts.size(); parts-- > 0;) self(self, r);
    } else {
      r.skip();
    }
  };
  size_t next = 0;
  for (size_t i = 0; i < n; ++i) {
    if (next >= arguments.size() || static_cast<size_t>(arguments[next]) != i) {
      in.skip();
      continue;
    }
    ++next;
    if (schema.arguments()[i].real_type()->kind() == c10::TypeKind::ListType)
      for (size_t k = in.array(); k-- > 0;) one(one, in);
    else
      one(one, in);
  }
  return out;
}

std::vector<int> tensor_arguments(const c10::FunctionSchema& schema) {
  std::vector<int> found;
  for (size_t i = 0; i < schema.arguments().size(); ++i) {
    auto type = schema.arguments()[i].real_type();
    for (auto kind = type->kind(); kind == c10::TypeKind::OptionalType || kind == c10::TypeKind::ListType; kind = type->kind())
      type = type->containedType(0);
    if (type->kind() == c10::TypeKind::TensorType) found.push_back(static_cast<int>(i));
  }
  return found;
}

at::Generator& Generators::get(uint32_t number) {
  auto it = made.find(number);
  if (it != made.end()) return it->second;
  if (on_host()) {
    if (number == 0) return made.emplace(0u, at::detail::getDefaultCPUGenerator()).first->second;
    return made.emplace(number, at::detail::createCPUGenerator()).first->second;
  }
  const auto& hooks = at::globalContext().getAcceleratorHooksInterface(computing.device.type());
  auto index = computing.device.index();
  return made.emplace(number, number == 0 ? hooks.getDefaultGenerator(index) : hooks.getNewGenerator(index)).first->second;
}

at::Tensor Decoder::cpu_tensor(std::string_view bytes) {
  TORCH_CHECK(bytes.size() > 3, "bad CPU tensor argument");
  auto dtype = static_cast<at::ScalarType>(bytes[0]);
  auto t = at::detail::empty_cpu({}, dtype);
  TORCH_CHECK(bytes.size() == 3 + static_cast<size_t>(t.element_size()), "bad CPU tensor argument");
  std::memcpy(t.mutable_data_ptr(), bytes.data() + 3, t.element_size());
  if (bytes[1]) t.unsafeGetTensorImpl()->set_wrapped_number(true);
  return t;
}

at::Tensor Decoder::tensor() {
  switch (in_.kind()) {
    case mp::Kind::Nil: in_.skip(); return at::Tensor();
    case mp::Kind::Int: {
      uint64_t id = in_.uint();
      auto& s = store_.at(id);
      if (__builtin_expect(s.poison != nullptr, 0)) {
        if (!poison_) poison_ = s.poison;
        return at::Tensor();
      }
      needs_dispatch_ |= !on_host() && s.first.is_cpu();
      return s.first;
    }
    case mp::Kind::Array: {
      size_t length = in_.array();
      if (__builtin_expect(length != kViewLength, 0)) return sparse(length);
      uint64_t id = in_.uint();
      auto g = read_geometry(in_);
      auto& s = store_.at(id);
      if (__builtin_expect(s.poison != nullptr, 0)) {
        if (!poison_) poison_ = s.poison;
        return at::Tensor();
      }
      needs_dispatch_ = needs_dispatch_ || g.flags != 0 || (!on_host() && s.first.is_cpu());
      return view_of(s.first, g);
    }
    case mp::Kind::Ext: {
      int8_t type;
      auto bytes = in_.ext(&type);
      TORCH_CHECK(type == static_cast<int8_t>(Ext::CPU_TENSOR), "bad tensor argument");
      return cpu_tensor(bytes);
    }
    default: TORCH_CHECK(false, "bad tensor argument");
  }
}

at::Tensor Decoder::sparse(size_t length) {
  auto s = read_sparse_head(in_, length);
  for (auto& part : s.parts) part = tensor();
  if (poison_) return at::Tensor();
  // Under names of their own: an operator may change the sizes of what a sparse tensor is made of.
  for (auto& part : s.parts) part = view_of(part, geometry_of(part));
  needs_dispatch_ = true;
  if (s.same >= 0) {  // in-place operators ask whether two arguments are one
    TORCH_CHECK(static_cast<size_t>(s.same) < sparse_.size(), "bad sparse argument");
    return sparse_[static_cast<size_t>(s.same)];
  }
  if (on_host()) check_indices(s);
  auto t = put_together(s);
  // Where gradients are enabled the operator's kernel looks whether a tensor wants one (operators.h: reads_grad_mode).
  bool differentiable = c10::isFloatingType(t.scalar_type()) || c10::isComplexType(t.scalar_type());
  if (at::GradMode::is_enabled() && differentiable) t.set_requires_grad(true);
  sparse_.push_back(t);
  return t;
}

c10::Scalar Decoder::scalar() {
  switch (in_.kind()) {
    case mp::Kind::Bool: return in_.boolean();
    case mp::Kind::Int: return in_.integer();
    case mp::Kind::Float: return in_.real();
    default: return read_complex(in_);
  }
}

Dims Decoder::ints() {
  Dims out;
  for (size_t i = in_.array(); i-- > 0;) out.push_back(in_.integer());
  return out;
}

at::Generator Decoder::generator() {
  if (in_.try_nil()) return {};
  int8_t type;
  auto bytes = in_.ext(&type);
  uint32_t number;
  TORCH_CHECK(type == static_cast<int8_t>(Ext::GENERATOR) && bytes.size() == sizeof number, "bad generator argument");
  std::memcpy(&number, bytes.data(), sizeof number);
  return generators_.get(number);
}

c10::IValue Decoder::ivalue(const c10::Type& type) {
  if (type.kind() == c10::TypeKind::OptionalType) {
    if (in_.try_nil()) return {};
    return ivalue(*type.containedType(0));
  }
  switch (type.kind()) {
    case c10::TypeKind::TensorType: return tensor();
    case c10::TypeKind::IntType:
    case c10::TypeKind::SymIntType:
    case c10::TypeKind::ScalarTypeType:
    case c10::TypeKind::LayoutType:
    case c10::TypeKind::MemoryFormatType: return in_.integer();
    case c10::TypeKind::FloatType: return in_.real();
    case c10::TypeKind::BoolType: return in_.boolean();
    case c10::TypeKind::NumberType: return scalar();
    case c10::TypeKind::StringType: return std::string(in_.str());
    case c10::TypeKind::GeneratorType: {
      auto g = generator();
      return g.defined() ? c10::IValue(g) : c10::IValue();
    }
    case c10::TypeKind::DeviceObjType: {
      int8_t kind;
      auto bytes = in_.ext(&kind);
      TORCH_CHECK(kind == static_cast<int8_t>(Ext::DEVICE) && bytes.size() == 1, "bad device argument");
      return bytes[0] == 0 ? computing.device : c10::Device(c10::DeviceType::CPU);
    }
    case c10::TypeKind::ListType: {
      const auto& element = *type.containedType(0);
      size_t n = in_.array();
      switch (element.kind()) {
        case c10::TypeKind::TensorType: {
          std::vector<at::Tensor> list;
          list.reserve(n);
          for (size_t i = 0; i < n; ++i) list.push_back(tensor());
          return list;
        }
        case c10::TypeKind::OptionalType: {
          c10::List<std::optional<at::Tensor>> list;
          for (size_t i = 0; i < n; ++i) {
            auto t = tensor();
            list.push_back(t.defined() ? std::optional<at::Tensor>(t) : std::nullopt);
          }
          return list;
        }
        case c10::TypeKind::IntType:
        case c10::TypeKind::SymIntType: {
          std::vector<int64_t> list;
          for (size_t i = 0; i < n; ++i) list.push_back(in_.integer());
          return list;
        }
        case c10::TypeKind::FloatType: {
          std::vector<double> list;
          for (size_t i = 0; i < n; ++i) list.push_back(in_.real());
          return list;
        }
        case c10::TypeKind::BoolType: {
          c10::List<bool> list;
          for (size_t i = 0; i < n; ++i) list.push_back(in_.boolean());
          return list;
        }
        case c10::TypeKind::StringType: {
          c10::List<std::string> list;
          for (size_t i = 0; i < n; ++i) list.push_back(std::string(in_.str()));
          return list;
        }
        case c10::TypeKind::NumberType: {
          c10::impl::GenericList list(c10::NumberType::get());
          for (size_t i = 0; i < n; ++i) list.push_back(scalar());
          return list;
        }
        default: break;
      }
      [[fallthrough]];
    }
    default: TORCH_CHECK(false, "dtorch cannot read an argument of type ", type.str());
  }
}

}  // namespace dtorch

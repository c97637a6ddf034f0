// See operators.h.
#include "worker/operators.h"

#include <ATen/EmptyTensor.h>
#include <ATen/core/jit_type.h>

#include <algorithm>
#include <sstream>
#include <unordered_map>
#include <unordered_set>

#include "common/protocol.h"
#include "worker/device.h"

namespace dtorch::worker {

namespace {

// Operators whose schema does not say that they write an argument.
const std::unordered_map<std::string, std::vector<int>> kSilentWrites = {
    {"aten::native_batch_norm", {3, 4}},  // running mean and variance
    {"aten::cudnn_batch_norm", {3, 4}},
    {"aten::_cudnn_rnn_backward", {20}},  // the reserve
};

// Pointwise operators that PyTorch does not tag so.
const std::unordered_set<std::string> kUntagged = {"aten::hardswish",         "aten::hardswish_backward",
                                                   "aten::softplus_backward", "aten::leaky_relu_backward",
                                                   "aten::elu_backward",      "aten::floor_divide",
                                                   "aten::leaky_relu"};

// Pointwise operators without an out= overload whose in-place overload computes the very same. Not all do: mul_.Scalar
// rounds its number to the tensor's type, mul.Scalar does not.
const std::unordered_set<std::string> kSameInPlace = {"aten::relu", "aten::relu6", "aten::selu", "aten::celu",
                                                      "aten::masked_fill"};

bool same_arguments(const c10::FunctionSchema& a, const c10::FunctionSchema& b, size_t n) {
  for (size_t i = 0; i < n; ++i)
    if (a.arguments()[i].name() != b.arguments()[i].name() || *a.arguments()[i].real_type() != *b.arguments()[i].real_type())
      return false;
  return true;
}

bool written(const c10::Argument& a) { return a.alias_info() && a.alias_info()->isWrite(); }

// PyTorch's own operators by name, without overload.
const std::vector<c10::OperatorName>& overloads(const std::string& name) {
  static const auto all = [] {
    std::unordered_map<std::string, std::vector<c10::OperatorName>> m;
    for (auto& n : c10::Dispatcher::singleton().getAllOpNames())
      if (n.name.rfind("aten::", 0) == 0) m[n.name].push_back(n);
    return m;
  }();
  static const std::vector<c10::OperatorName> none;
  auto it = all.find(name);
  return it == all.end() ? none : it->second;
}

// The overload of a pointwise operator that writes its result where it is told. Generated ones do not count: they compute
// elsewhere and copy.
void find_twin(Operator& op) {
  const auto& schema = op.handle.schema();
  size_t n = schema.arguments().size();
  bool functional = schema.returns().size() == 1 && schema.returns()[0].type()->kind() == c10::TypeKind::TensorType &&
                    !schema.returns()[0].alias_info() && op.writes.empty();
  bool pointwise = op.handle.hasTag(at::Tag::pointwise) || kUntagged.count(schema.name());
  if (!functional || !pointwise || op.handle.hasTag(at::Tag::nondeterministic_seeded)) return;
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const auto& name : overloads(schema.name())) {
    auto out = dispatcher.findSchema(name);
    if (!out || !out->hasSchema() || out->hasTag(at::Tag::generated)) continue;
    const auto& s = out->schema();
    if (s.arguments().size() != n + 1 || !written(s.arguments()[n]) || !same_arguments(schema, s, n)) continue;
    op.twin = out;
    op.donation = Operator::Donation::Out;
    return;
  }
  if (!kSameInPlace.count(schema.name())) return;
  auto in_place = dispatcher.findSchema({schema.name() + "_", schema.overload_name()});
  if (!in_place || in_place->hasTag(at::Tag::generated)) return;
  const auto& s = in_place->schema();
  if (s.arguments().size() != n || !written(s.arguments()[0]) || !same_arguments(schema, s, n)) return;
  op.twin = in_place;
  op.donation = Operator::Donation::InPlace;
}

}  // namespace

Operator::Operator(const c10::OperatorHandle& h) : handle(h) {
  const auto& schema = h.schema();
  name = schema.name();
  reads_grad_mode = dtorch::reads_grad_mode(name);
  custom = name.rfind("aten::", 0) != 0;
  if (auto silent = kSilentWrites.find(name); silent != kSilentWrites.end()) mutates = silent->second;
  if (!schema.overload_name().empty()) name += "." + schema.overload_name();
  for (size_t i = 0; i < schema.arguments().size(); ++i)
    if (written(schema.arguments()[i])) writes.push_back(static_cast<int>(i));
  mutates.insert(mutates.end(), writes.begin(), writes.end());
  std::sort(mutates.begin(), mutates.end());
  for (const auto& r : schema.returns()) result_alias.push_back(r.alias_info() && r.alias_info()->isWrite());
  unboxed = find_unboxed(schema.name(), schema.overload_name());
  find_twin(*this);
}

namespace {

// A custom kernel is given names of its own for the store's tensors: what it does to their sizes or strides is its affair.
at::Tensor renamed(const at::Tensor& t) {
  if (!t.defined() || !t.has_storage()) return t;
  Geometry g{t.scalar_type(), Dims(t.sizes().begin(), t.sizes().end()), Dims(t.strides().begin(), t.strides().end()),
             t.storage_offset(), (t.is_conj() ? kFlagConj : 0) | (t.is_neg() ? kFlagNeg : 0)};
  return view_of(t, g);
}

c10::IValue renamed(const c10::IValue& v) {
  if (v.isTensor()) return renamed(v.toTensor());
  if (v.isTensorList()) {
    auto list = v.toTensorVector();
    for (auto& t : list) t = renamed(t);
    return list;
  }
  return v;
}

// What a custom kernel gives becomes a storage of its own: it may have handed an argument back, or two views of one tensor.
c10::IValue owned(const Operator& op, const c10::IValue& v) {
  auto one = [&op](const at::Tensor& t) {
    TORCH_CHECK(t.defined(), op.name, " returned None where its schema says Tensor");
    require_plain(op, t);
    return sole(t) ? t : t.clone();
  };
  if (v.isTensor()) return one(v.toTensor());
  if (v.isTensorList()) {
    std::vector<at::Tensor> list;
    for (const auto& t : v.toTensorVector()) list.push_back(one(t));
    return list;
  }
  return v;
}

}  // namespace

void call_boxed(const Operator& op, Decoder& d, torch::jit::Stack& stack, const at::Tensor* donor,
                std::vector<at::Tensor>& made, std::vector<c10::IValue>* written) {
  const auto& schema = op.handle.schema();
  size_t n = d.in().array();
  TORCH_CHECK(n == schema.arguments().size(), op.name, " came with ", n, " arguments");
  stack.reserve(n + 1);
  for (const auto& arg : schema.arguments()) stack.push_back(d.ivalue(*arg.real_type()));
  if (d.poison()) {
    stack.clear();
    return;
  }
  if (__builtin_expect(op.custom, 0))
    for (auto& v : stack) v = renamed(v);
  if (written)
    for (int i : op.writes) written->push_back(stack[static_cast<size_t>(i)]);
  // Where an operator writes several results, PyTorch reads those arguments once more after it has dropped them from the stack
  // (mended in torch 2.13): a view that only the stack holds would be gone.
  std::vector<c10::IValue> kept;
  if (op.result_alias.size() > 1)
    for (int i : op.writes) kept.push_back(stack[static_cast<size_t>(i)]);
  if (donor && sole(*donor) && !d.needs_dispatch()) {
    if (op.donation == Operator::Donation::Out) stack.emplace_back(*donor);
    op.twin->callBoxed(stack);
    made.push_back(*donor);
    return;
  }
  op.handle.callBoxed(stack);
  for (size_t i = 0; i < stack.size(); ++i) {
    if (op.result_alias[i]) continue;
    if (__builtin_expect(op.custom, 0)) stack[i] = owned(op, stack[i]);
    const auto& v = stack[i];
    if (v.isTensor() && v.toTensor().defined()) made.push_back(v.toTensor());
    if (v.isTensorList())
      for (auto& t : v.toTensorVector()) made.push_back(t);
  }
}

void describe(std::ostream& out, at::ScalarType dtype, c10::IntArrayRef sizes) {
  out << "Tensor[" << c10::getDtypeNames(dtype).first << ", (";
  for (size_t i = 0; i < sizes.size(); ++i) out << (i ? ", " : "") << sizes[i];
  out << (sizes.size() == 1 ? ",)]" : ")]");
}

namespace {

void describe_tensor(std::ostream& out, mp::Reader& in, Store& store) {
  switch (in.kind()) {
    case mp::Kind::Nil: in.skip(); out << "None"; return;
    case mp::Kind::Int: {
      auto* s = store.find(in.uint());
      if (s && s->first.defined()) describe(out, s->first.scalar_type(), s->first.sizes());
      else out << "Tensor";
      return;
    }
    case mp::Kind::Array: {
      size_t length = in.array();
      if (length != kViewLength) {
        auto s = read_sparse_head(in, length);
        out << "Tensor[" << s.layout << ", " << c10::IntArrayRef(s.sizes) << ", of ";
        for (size_t i = 0; i < s.parts.size(); ++i) {
          if (i) out << ", ";
          describe_tensor(out, in, store);
        }
        out << "]";
        return;
      }
      in.uint();
      auto g = read_geometry(in);
      describe(out, g.dtype, g.sizes);
      return;
    }
    default: in.skip(); out << "Tensor[CPU scalar]";
  }
}

void describe_value(std::ostream& out, mp::Reader& in) {
  switch (in.kind()) {
    case mp::Kind::Nil: in.skip(); out << "None"; return;
    case mp::Kind::Bool: out << (in.boolean() ? "True" : "False"); return;
    case mp::Kind::Int: out << in.integer(); return;
    case mp::Kind::Float: out << in.real(); return;
    case mp::Kind::Str: out << '"' << in.str() << '"'; return;
    case mp::Kind::Array: {
      size_t n = in.array();
      out << "[";
      for (size_t i = 0; i < n; ++i) {
        if (i) out << ", ";
        describe_value(out, in);
      }
      out << "]";
      return;
    }
    default: in.skip(); out << "..."; return;
  }
}

}  // namespace

std::string describe_arguments(const Operator& op, mp::Reader in, Store& store) {
  std::ostringstream out;
  const auto& args = op.handle.schema().arguments();
  size_t n = in.array();
  out << "(";
  for (size_t i = 0; i < n && i < args.size(); ++i) {
    if (i) out << ", ";
    auto type = args[i].real_type();
    if (type->kind() == c10::TypeKind::OptionalType && in.kind() != mp::Kind::Nil) type = type->containedType(0);
    bool is_list = type->kind() == c10::TypeKind::ListType;
    auto element = is_list ? type->containedType(0) : type;
    if (element->kind() == c10::TypeKind::OptionalType) element = element->containedType(0);
    if (element->kind() != c10::TypeKind::TensorType || in.kind() == mp::Kind::Nil) {
      describe_value(out, in);
    } else if (!is_list) {
      describe_tensor(out, in, store);
    } else {
      size_t m = in.array();
      out << "[";
      for (size_t k = 0; k < m; ++k) {
        if (k) out << ", ";
        describe_tensor(out, in, store);
      }
      out << "]";
    }
  }
  out << ")";
  return out.str();
}

void require_plain(const Operator& op, const at::Tensor& t) {
  TORCH_CHECK_NOT_IMPLEMENTED(t.layout() == at::kStrided && t.has_storage() && !t.is_nested() && !t.is_quantized() &&
                                  (t.device().is_cpu() || t.device() == computing.device), "dtorch: ",
                              op.name, " gives a ", t.toString(), " tensor where dtorch holds dense ones only. Keep such "
                              "tensors on the CPU: call .cpu() before this operator");
}

at::Tensor conform(const Operator& op, at::Tensor t, const Geometry& g) {
  require_plain(op, t);
  auto* impl = t.unsafeGetTensorImpl();
  int flags = (t.is_conj() ? kFlagConj : 0) | (t.is_neg() ? kFlagNeg : 0);
  if (__builtin_expect(impl->sizes() == c10::IntArrayRef(g.sizes) && impl->strides() == c10::IntArrayRef(g.strides) &&
                           t.scalar_type() == g.dtype && impl->storage_offset() == g.offset && flags == g.flags, 1))
    return flags || g.offset ? view_of(t, first_of(g)) : t;
  bool fits = t.sizes() == c10::IntArrayRef(g.sizes) && t.scalar_type() == g.dtype;
  TORCH_CHECK(fits || !op.custom, op.name, " gave ", t.scalar_type(), t.sizes(), " where its fake kernel says ", g.dtype,
              c10::IntArrayRef(g.sizes), "; correct the one that torch.library.register_fake got");
  TORCH_CHECK(fits, op.name, " gave ", t.toString(),
              t.sizes(), " where ", c10::toString(g.dtype), c10::IntArrayRef(g.sizes),
              " was predicted (a bug of dtorch: its shape inference is wrong for this operator)");
  auto first = first_of(g);
  at::Tensor as_predicted = make_empty(first);
  view_of(as_predicted, g).copy_(t);
  return as_predicted;
}

}  // namespace dtorch::worker

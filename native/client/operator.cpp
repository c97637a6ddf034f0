// See operator.h.
#include "client/operator.h"

#include "client/geometry.h"
#include "common/decode.h"

#include <c10/util/flat_hash_map.h>

#include <atomic>
#include <deque>
#include <mutex>
#include <string_view>

namespace dtorch {

namespace {

bool starts_with(std::string_view s, std::string_view prefix) { return s.substr(0, prefix.size()) == prefix; }

struct Table {
  std::mutex mu;
  std::deque<OpInfo> ops;
  ska::flat_hash_map<const c10::FunctionSchema*, OpInfo*> by_schema;
};
Table& table() {
  static Table* t = new Table;
  return *t;
}

// A library that defines an operator may go (torch.library.Library) and its schema's address serve another: what was known
// by that address goes too.
std::atomic<uint64_t> deregistrations{0};

struct Forgetting final : c10::OpRegistrationListener {
  void onOperatorRegistered(const c10::OperatorHandle&) override {}
  void onOperatorDeregistered(const c10::OperatorHandle& op) override {
    auto& t = table();
    std::lock_guard lock(t.mu);
    if (t.by_schema.erase(&op.schema())) deregistrations.fetch_add(1, std::memory_order_release);
  }
};

}  // namespace

OpInfo::OpInfo(const c10::OperatorHandle& op, uint32_t number_) : handle(op), number(number_) {
  const auto& schema = op.schema();
  name = schema.name();
  overload = schema.overload_name();
  n_args = schema.arguments().size();
  reads_grad_mode = dtorch::reads_grad_mode(name);
  reads_kernel_switches = name == "aten::_fused_sdp_choice" || name == "aten::cudnn_is_acceptable" ||
                          name == "dtorch::batch_norm_by_cudnn";
  values_follow = reads_kernel_switches || name == "aten::_scaled_dot_product_flash_attention" ||
                  name == "aten::_scaled_dot_product_cudnn_attention";
  asks = op.hasTag(at::Tag::dynamic_output_shape) || op.hasTag(at::Tag::data_dependent_output) ||
         (name == "aten::_unique" && overload.empty());  // torch 2.11 has not tagged it yet

  // arange and its kin take their length from Scalars, custom operators may; everywhere else a Scalar's value is only data.
  custom = !starts_with(name, "aten::");
  bool by_value = custom || starts_with(name, "aten::arange") || starts_with(name, "aten::range");
  uploads_cpu_indices = false;
  for (size_t i = 0; i < n_args; ++i) {
    const auto& arg = schema.arguments()[i];
    auto text = arg.real_type()->str();
    scalar_by_type.push_back(!by_value && (text == "Scalar" || text == "Scalar?" || text == "number"));
    if (arg.alias_info() && arg.alias_info()->isWrite()) writes.push_back(static_cast<int>(i));
    uploads_cpu_indices = uploads_cpu_indices || text == "List[Optional[Tensor]]" || text == "Tensor?[]";
  }
  bool has_new = false;
  for (const auto& ret : schema.returns()) {
    Return r{Result::Value, -1};
    auto kind = ret.real_type()->kind();
    if (ret.alias_info() && ret.alias_info()->isWrite()) {
      r.kind = Result::Alias;
      for (size_t i = 0; i < n_args; ++i) {
        const auto* a = schema.arguments()[i].alias_info();
        if (a && a->isWrite() && a->beforeSets() == ret.alias_info()->beforeSets()) r.arg = static_cast<int>(i);
      }
    } else if (kind == c10::TypeKind::TensorType || kind == c10::TypeKind::OptionalType) {
      r.kind = Result::Tensor;
      has_new = true;
    } else if (kind == c10::TypeKind::ListType && ret.real_type()->containedType(0)->kind() == c10::TypeKind::TensorType) {
      r.kind = Result::List;
      has_new = true;
    } else {
      asks = asks || !values_follow;
      has_new = has_new || values_follow;
    }
    returns.push_back(r);
  }
  bool draws = op.hasTag(at::Tag::nondeterministic_seeded);
  for (const auto& arg : schema.arguments()) draws = draws || arg.name() == "generator";
  exact = !custom && !draws;
  for (size_t i = 0; i < n_args && !custom; ++i) {
    const auto& arg = schema.arguments()[i];
    bool tensor = arg.real_type()->kind() == c10::TypeKind::TensorType;
    int at = static_cast<int>(i);
    if (tensor && arg.name() == "index") points.index = at;
    if (arg.name() == "dim" && arg.real_type()->kind() == c10::TypeKind::IntType) points.dim = at;
    if ((tensor && arg.name() == "indices" && name == "aten::embedding") || (arg.name() == "target" && starts_with(name, "aten::nll_loss")))
      points.index = at;
    if (arg.name() == "ignore_index") points.ignored = at;
  }
  if (points.index >= 0 && points.dim < 0 && points.ignored < 0 && name != "aten::embedding") points.index = -1;
  // With a CPU kernel beside an explicit composite one, the CPU's results may be laid out otherwise. Structured operators
  // have both and share the geometry; they are told from the few others (pixel_shuffle) by their out=, which is their own.
  bool on_cpu = op.hasKernelForDispatchKey(c10::DispatchKey::CPU);
  auto out = c10::Dispatcher::singleton().findSchema({name, overload.empty() ? "out" : overload + "_out"});
  bool generated = out && out->hasTag(at::Tag::generated);
  bool structured = op.hasKernelForDispatchKey(c10::DispatchKey::CompositeExplicitAutogradNonFunctional) &&
                    !(on_cpu && generated);
  bool explicit_only = op.hasKernelForDispatchKey(c10::DispatchKey::CompositeExplicitAutograd) && !on_cpu;
  composite = structured || explicit_only;
  checks_itself = structured;
  // With out= the composite would resize the caller's own tensor while it infers.
  bool out_variant = false;
  for (int i : writes) out_variant = out_variant || schema.arguments()[static_cast<size_t>(i)].kwarg_only();
  if (out_variant) composite = false;
  overwrites = out_variant || name == "aten::fill_" || name == "aten::zero_" || name == "aten::copy_";
  counts_versions = starts_with(name, "aten::_foreach_") && !out_variant && !writes.empty();
  in_place = !structured && !out_variant && !has_new && !asks && !writes.empty();
  if (custom) composite = in_place = false;
  rule = find_rule(name, overload);
  // The lengths in the data decide the size of a result, and no tag says so.
  asks = asks || name == "aten::_ctc_loss";
  asks_for_masks = asks && uploads_cpu_indices && composite;
  exact = exact && (!asks || asks_for_masks);
  overwrites = overwrites && exact;
  // Without results and out= (_foreach_add_, _fused_adamw_) there is nothing to predict.
  infers = has_new || !returns.empty() || (out_variant && !custom);
}

OpInfo& op_info(const c10::OperatorHandle& op) {
  const auto* key = &op.schema();
  static thread_local ska::flat_hash_map<const c10::FunctionSchema*, OpInfo*> seen;
  static thread_local uint64_t seen_at = 0;
  if (uint64_t now = deregistrations.load(std::memory_order_acquire); __builtin_expect(now != seen_at, 0)) {
    seen.clear();
    seen_at = now;
  }
  auto it = seen.find(key);
  if (it != seen.end()) return *it->second;
  auto& t = table();
  std::lock_guard lock(t.mu);
  auto found = t.by_schema.find(key);
  OpInfo* info;
  if (found != t.by_schema.end()) {
    info = found->second;
  } else {
    info = &t.ops.emplace_back(op, static_cast<uint32_t>(t.ops.size()));
    t.by_schema.emplace(key, info);
  }
  seen.emplace(key, info);
  return *info;
}

void watch_operators() {
  // Kept for good.
  static auto* registration =
      new c10::RegistrationHandleRAII(c10::Dispatcher::singleton().addRegistrationListener(std::make_unique<Forgetting>()));
  (void)registration;
}

OpInfo& op_info(const char* name, const char* overload) {
  return op_info(c10::Dispatcher::singleton().findSchemaOrThrow(name, overload));
}

std::string op_name(uint32_t number) {
  auto& t = table();
  std::lock_guard lock(t.mu);
  if (number >= t.ops.size()) return {};
  const auto& op = t.ops[number];
  return op.overload.empty() ? op.name : op.name + "." + op.overload;
}

}  // namespace dtorch

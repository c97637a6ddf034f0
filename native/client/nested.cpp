// The one use of nested tensors that unmodified programs make without saying so: nn.TransformerEncoder packs a padded batch
// into one for evaluation, gives it from layer to layer, and pads it again.
//
// Here such a tensor is a real NestedTensorImpl, but over the padded batch's own memory, row by row with gaps, so a worker
// needs to know nothing of it: each layer is one record with the padded batch and its lengths (native/common/nested.h), and
// the worker packs, computes what eager's CPU kernel does, and pads. All other operators on nested tensors are refused
// (kernels.cpp). The lengths are values: the client waits for the mask once a batch, as every accelerator does.
#include "common/nested.h"

#include <ATen/NestedTensorImpl.h>
#include <ATen/ops/_nested_tensor_from_mask.h>
#include <ATen/ops/_transformer_encoder_layer_fwd_ops.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/as_strided.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/where.h>
#include <torch/library.h>

#include <algorithm>

#include "client/device.h"
#include "client/issue.h"
#include "client/value.h"

namespace dtorch {

namespace {

constexpr const char* kName = "dtorch::encoder_layer_of_lengths";

const at::native::NestedTensorImpl* nested_impl(const at::Tensor& t) {
  return static_cast<const at::native::NestedTensorImpl*>(t.unsafeGetTensorImpl());
}

// A nested tensor of the first lengths[i] rows of each padded[i]; `padded` is contiguous.
at::Tensor nested_of(const at::Tensor& padded, const at::Tensor& sizes) {
  int64_t n = padded.size(0), rows = padded.size(1), width = padded.size(2);
  at::Tensor strides = at::empty({n, 2}, at::kLong), offsets = at::empty({n}, at::kLong);
  for (int64_t i = 0; i < n; ++i) {
    strides.mutable_data_ptr<int64_t>()[2 * i] = width;
    strides.mutable_data_ptr<int64_t>()[2 * i + 1] = 1;
    offsets.mutable_data_ptr<int64_t>()[i] = padded.storage_offset() + i * rows * width;
  }
  return at::detail::make_tensor<at::native::NestedTensorImpl>(
      c10::Storage(padded.storage()), c10::DispatchKeySet(c10::DispatchKey::NestedTensorPrivateUse1), padded.dtype(), sizes,
      strides, offsets);
}

std::vector<int64_t> lengths_of(const at::Tensor& nested) {
  const auto& sizes = nested_impl(nested)->get_nested_sizes();
  std::vector<int64_t> lengths;
  for (int64_t i = 0; i < sizes.size(0); ++i) lengths.push_back(sizes.const_data_ptr<int64_t>()[2 * i]);
  return lengths;
}

// The padded batch that nested_of() was given; of a single one, the rows that it uses.
at::Tensor padded_of(const at::Tensor& nested) {
  auto* impl = nested_impl(nested);
  int64_t n = impl->get_nested_sizes().size(0), width = impl->get_nested_sizes().const_data_ptr<int64_t>()[1];
  const auto* offsets = impl->get_storage_offsets().const_data_ptr<int64_t>();
  int64_t rows = n > 1 ? (offsets[1] - offsets[0]) / width : lengths_of(nested)[0];
  auto whole = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(impl->unsafe_storage()),
                                                        c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), impl->dtype());
  int64_t sizes[] = {n, rows, width}, strides[] = {rows * width, width, 1};
  whole.unsafeGetTensorImpl()->set_sizes_and_strides(c10::IntArrayRef(sizes), c10::IntArrayRef(strides), offsets[0]);
  return whole;
}

// What there is to check in the arguments, and the lengths, by eager's own kernel: on the mask, and a batch of no width.
at::Tensor from_mask(const at::Tensor& t, const at::Tensor& mask, bool check) {
  Dims sizes(t.sizes().begin(), t.sizes().end());
  if (!sizes.empty()) sizes.back() = 1;
  auto outline = at::_nested_tensor_from_mask(at::empty(sizes, t.scalar_type()), mask.cpu(), check);
  auto lengths = nested_impl(outline)->get_nested_sizes().clone();
  for (int64_t i = 0; i < lengths.size(0); ++i) lengths.mutable_data_ptr<int64_t>()[2 * i + 1] = t.size(2);
  TORCH_CHECK(t.numel() > 0, "dtorch: a batch without elements cannot be made a nested tensor");
  return nested_of(t.clone(at::MemoryFormat::Contiguous), lengths);
}

at::Tensor to_padded(const at::Tensor& nested, double padding, c10::OptionalArrayRef<c10::SymInt> wanted) {
  auto padded = padded_of(nested);
  auto lengths = lengths_of(nested);
  int64_t longest = *std::max_element(lengths.begin(), lengths.end());
  Dims sizes{padded.size(0), longest, padded.size(2)};
  if (wanted) {
    Dims asked(C10_AS_INTARRAYREF_SLOW(*wanted).begin(), C10_AS_INTARRAYREF_SLOW(*wanted).end());
    TORCH_CHECK(asked.size() == 3, "Tensor::to_padded_tensor: expected 3 dimensions in output_size, got ", asked.size());
    for (size_t i = 0; i < 3; ++i)
      TORCH_CHECK(asked[i] >= sizes[i], "Value in output_size is less than NestedTensor padded size. Truncation is not supported.");
    sizes = asked;
  }
  padded = padded.narrow(1, 0, longest);
  at::Tensor used = at::arange(longest).unsqueeze(0).lt(nested_impl(nested)->get_nested_sizes().narrow(1, 0, 1));
  auto filled = at::where(upload(used, padded.device().index()).unsqueeze(2), padded, at::Scalar(padding)).to(padded.scalar_type());
  if (filled.sizes() == c10::IntArrayRef(sizes)) return filled;
  auto out = at::full(sizes, padding, padded.options());
  out.narrow(0, 0, filled.size(0)).narrow(1, 0, longest).narrow(2, 0, filled.size(2)).copy_(filled);
  return out;
}

// _transformer_encoder_layer_fwd of a nested tensor.
void encoder_layer(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  static const OpInfo& layer = op_info(kName, "");
  auto args = torch::jit::pop(*stack, op.schema().arguments().size());
  auto nested = args[0].toTensor();
  TORCH_CHECK_NOT_IMPLEMENTED(nested.is_nested() && nested.device().type() == kDevice, "dtorch: ", op.schema().name(),
                              " takes a nested tensor as its first argument only");
  torch::jit::Stack given{padded_of(nested), lengths_of(nested)};
  given.insert(given.end(), args.begin() + 1, args.end());
  issue_boxed(layer, &given);
  stack->emplace_back(nested_of(given[0].toTensor(), nested_impl(nested)->get_nested_sizes()));
}

void same_as_padded(const c10::OperatorHandle&, torch::jit::Stack* stack) {
  auto padded = (*stack)[stack->size() - 21].toTensor();
  torch::jit::drop(*stack, 21);
  stack->emplace_back(at::empty(padded.sizes(), padded.options()));
}

}  // namespace

void register_nested() {
  using torch::CppFunction;
  using torch::Library;
  auto library = [](Library::Kind kind, const char* name, std::optional<c10::DispatchKey> key) -> Library& {
    return *new Library(kind, name, key, __FILE__, __LINE__);  // kept for good
  };
  library(Library::FRAGMENT, "dtorch", std::nullopt).def(kEncoderLayer);
  library(Library::IMPL, "dtorch", c10::DispatchKey::Meta)
      .impl("encoder_layer_of_lengths", CppFunction::makeFromBoxedFunction<&same_as_padded>());
  library(Library::IMPL, "aten", c10::DispatchKey::PrivateUse1).impl("_nested_tensor_from_mask", TORCH_FN(from_mask));
  auto& nested = library(Library::IMPL, "aten", c10::DispatchKey::NestedTensorPrivateUse1);
  nested.impl("to_padded_tensor", TORCH_FN(to_padded));
  nested.impl("_transformer_encoder_layer_fwd", CppFunction::makeFromBoxedFunction<&encoder_layer>());
}

}  // namespace dtorch

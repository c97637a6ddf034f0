// The recurrent cells that PyTorch's composites ask of an accelerator (_thnn_fused_lstm_cell, _thnn_fused_gru_cell): only for
// what recurrent.cpp leaves to them. CPU workers have no such kernels: for those they are composites of ordinary operators, in
// the order of eager's CPU cells, with gradients from those operators. Hence the autograd key. GPUs have the kernels.
#include "client/device.h"

#include <ATen/core/Tensor.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/sigmoid.h>
#include <ATen/ops/tanh.h>
#include <torch/library.h>

#include <tuple>
#include <vector>

namespace dtorch {

namespace {

using Bias = const std::optional<at::Tensor>&;

at::Tensor with_bias(const at::Tensor& gates, Bias bias) { return bias && bias->defined() ? gates + *bias : gates; }

// Gates in the order input, forget, cell, output. The third result is the kernel's workspace; nothing here needs it.
std::tuple<at::Tensor, at::Tensor, at::Tensor> lstm_cell(const at::Tensor& igates, const at::Tensor& hgates,
                                                         const at::Tensor& cx, Bias ibias, Bias hbias) {
  auto gates = with_bias(hgates, hbias) + with_bias(igates, ibias);
  auto parts = gates.unsafe_chunk(4, 1);
  auto in = at::sigmoid(parts[0]), forget = at::sigmoid(parts[1]), cell = at::tanh(parts[2]), out = at::sigmoid(parts[3]);
  auto cy = forget * cx + in * cell;
  return {out * at::tanh(cy), cy, gates};
}

// Gates in the order reset, update, new.
std::tuple<at::Tensor, at::Tensor> gru_cell(const at::Tensor& igates, const at::Tensor& hgates, const at::Tensor& hx,
                                            Bias ibias, Bias hbias) {
  auto i = with_bias(igates, ibias).unsafe_chunk(3, 1);
  auto h = with_bias(hgates, hbias).unsafe_chunk(3, 1);
  auto reset = at::sigmoid(h[0] + i[0]), update = at::sigmoid(h[1] + i[1]);
  auto fresh = at::tanh(i[2] + h[2] * reset);
  return {(hx - fresh) * update + fresh, update};
}

}  // namespace

void serve_cells(bool cpus) {
  static auto& kernels = *new std::vector<torch::Library>;
  if (!cpus) return kernels.clear();
  if (!kernels.empty()) return;
  for (auto key : {c10::DispatchKey::AutogradPrivateUse1, c10::DispatchKey::PrivateUse1}) {
    auto& m = kernels.emplace_back(torch::Library::IMPL, "aten", key, __FILE__, __LINE__);
    m.impl("_thnn_fused_lstm_cell", TORCH_FN(lstm_cell));
    m.impl("_thnn_fused_gru_cell", TORCH_FN(gru_cell));
  }
}

}  // namespace dtorch

// RNN, GRU and LSTM layers and the GRU and LSTM cells, as eager runs them on the CPU, with gradients from the operators they
// consist of.
//
// PyTorch's own composites ask whether their input is a CPU tensor: there all steps' inputs are multiplied by the weights at
// once, and an LSTM without projections is oneDNN's. Elsewhere they multiply step by step and ask for fused cells, which
// gives other last bits, and other version counters, for the CPU's steps write in place.
// Here are the CPU's ways for workers that are CPUs. With GPUs a layer is cuDNN's, as eager's is there, or PyTorch's composite
// with its fused cells (cudnn_rnn.h). What these layers would refuse goes to the composite, which says so in its own words.
#include "client/device.h"

#include <ATen/Context.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/dropout.h>
#include <ATen/ops/gru_cell_compositeimplicitautograd_dispatch.h>
#include <ATen/ops/gru_compositeimplicitautograd_dispatch.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/lstm_cell_compositeimplicitautograd_dispatch.h>
#include <ATen/ops/lstm_compositeimplicitautograd_dispatch.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/mkldnn_rnn_layer.h>
#include <ATen/ops/relu.h>
#include <ATen/ops/rnn_relu_compositeimplicitautograd_dispatch.h>
#include <ATen/ops/rnn_tanh_compositeimplicitautograd_dispatch.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/tanh.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <algorithm>
#include <tuple>
#include <vector>

#include "client/cudnn_rnn.h"
#include "client/storage.h"

namespace dtorch {

namespace {

using Tensors = std::vector<at::Tensor>;
using Two = std::tuple<at::Tensor, at::Tensor>;
using Three = std::tuple<at::Tensor, at::Tensor, at::Tensor>;

// One direction of one layer. Biases and the projection may be undefined.
struct Weights {
  at::Tensor ih, hh, b_ih, b_hh, hr;

  at::Tensor of_input(const at::Tensor& x) const { return at::linear(x, ih, optional(b_ih)); }
  at::Tensor of_hidden(const at::Tensor& h) const { return at::linear(h, hh, optional(b_hh)); }
  static std::optional<at::Tensor> optional(const at::Tensor& t) {
    return t.defined() ? std::optional<at::Tensor>(t) : std::nullopt;
  }
};

// Of one direction of one layer, (batch, features); c only for an LSTM.
struct State {
  at::Tensor h, c;

  State rows(int64_t from, int64_t to) const {
    return {h.narrow(0, from, to - from), c.defined() ? c.narrow(0, from, to - from) : c};
  }
};

State together(const std::vector<State>& parts) {
  Tensors h, c;
  for (const auto& p : parts) {
    h.push_back(p.h);
    if (p.c.defined()) c.push_back(p.c);
  }
  return {at::cat(h, 0), c.empty() ? at::Tensor() : at::cat(c, 0)};
}

// --- a step; `x` has been multiplied by the input's weights already ----------------------------------------------------

using Step = State (*)(const at::Tensor& x, const State&, const Weights&);

State tanh_step(const at::Tensor& x, const State& s, const Weights& w) { return {at::tanh(w.of_hidden(s.h).add_(x)), {}}; }
State relu_step(const at::Tensor& x, const State& s, const Weights& w) { return {at::relu(w.of_hidden(s.h).add_(x)), {}}; }

// Gates in the order reset, update, new.
State gru_step(const at::Tensor& x, const State& s, const Weights& w) {
  auto from_x = x.unsafe_chunk(3, 1), from_h = w.of_hidden(s.h).unsafe_chunk(3, 1);
  auto reset = from_h[0].add_(from_x[0]).sigmoid_(), update = from_h[1].add_(from_x[1]).sigmoid_();
  auto fresh = from_x[2].add(from_h[2].mul_(reset)).tanh_();
  return {(s.h - fresh).mul_(update).add_(fresh), {}};
}

// Gates in the order input, forget, cell, output.
State lstm_step_of(const at::Tensor& sum, const State& s, const Weights& w) {
  auto gates = sum.unsafe_chunk(4, 1);
  auto in = gates[0].sigmoid_(), forget = gates[1].sigmoid_(), cell = gates[2].tanh_(), out = gates[3].sigmoid_();
  auto c = (forget * s.c).add_(in * cell);
  auto h = out * c.tanh();
  return {w.hr.defined() ? at::matmul(h, w.hr.t()) : h, c};
}

State lstm_step(const at::Tensor& x, const State& s, const Weights& w) { return lstm_step_of(w.of_hidden(s.h).add_(x), s, w); }

// --- a sequence, in one direction --------------------------------------------------------------------------------------

// (steps, batch, features), or the rows of all steps one after the other with the number of rows of each.
struct Sequence {
  at::Tensor data;
  const at::Tensor* batch_sizes = nullptr;  // not increasing; on the CPU
};

std::pair<at::Tensor, State> full(const at::Tensor& x, State s, const Weights& w, Step step, bool backwards) {
  auto steps = w.of_input(x).unbind(0);
  if (backwards) std::reverse(steps.begin(), steps.end());
  Tensors outputs;
  for (const auto& one : steps) {
    s = step(one, s, w);
    outputs.push_back(s.h);
  }
  if (backwards) std::reverse(outputs.begin(), outputs.end());
  return {at::stack(outputs, 0), s};
}

// Sequences that have ended leave the state; what they left with is part of the last state.
std::pair<at::Tensor, State> packed(const Sequence& x, const State& initial, const Weights& w, Step step) {
  const auto* sizes = x.batch_sizes->const_data_ptr<int64_t>();
  auto all = w.of_input(x.data);
  Tensors outputs;
  std::vector<State> ended;
  State s = initial;
  int64_t row = 0, running = sizes[0];
  for (int64_t i = 0; i < x.batch_sizes->numel(); ++i) {
    if (sizes[i] < running) {
      ended.push_back(s.rows(sizes[i], running));
      s = s.rows(0, sizes[i]);
    }
    running = sizes[i];
    s = step(all.narrow(0, row, running), s, w);
    row += running;
    outputs.push_back(s.h);
  }
  ended.push_back(s);
  std::reverse(ended.begin(), ended.end());
  return {at::cat(outputs, 0), together(ended)};
}

// Backwards, the longest sequences begin and the others join.
std::pair<at::Tensor, State> packed_backwards(const Sequence& x, const State& initial, const Weights& w, Step step) {
  const auto* sizes = x.batch_sizes->const_data_ptr<int64_t>();
  auto all = w.of_input(x.data);
  Tensors outputs;
  int64_t last = x.batch_sizes->numel() - 1, running = sizes[last], row = x.data.size(0);
  State s = initial.rows(0, running);
  for (int64_t i = last; i >= 0; --i) {
    if (sizes[i] > running) s = together({s, initial.rows(running, sizes[i])});
    running = sizes[i];
    row -= running;
    s = step(all.narrow(0, row, running), s, w);
    outputs.push_back(s.h);
  }
  std::reverse(outputs.begin(), outputs.end());
  return {at::cat(outputs, 0), s};
}

// --- all layers ----------------------------------------------------------------------------------------------------------

std::vector<Weights> weights_of(at::TensorList params, const Layers& l, bool projects) {
  std::vector<Weights> out;
  size_t each = (l.biases ? 4 : 2) + (projects ? 1 : 0);
  for (size_t i = 0; i < params.size(); i += each) {
    Weights w{params[i], params[i + 1], {}, {}, {}};
    if (l.biases) w.b_ih = params[i + 2], w.b_hh = params[i + 3];
    if (projects) w.hr = params[i + each - 1];
    out.push_back(w);
  }
  return out;
}

// The output, and the last states stacked.
Three run(Sequence x, at::TensorList initial, const std::vector<Weights>& weights, const Layers& l, Step step) {
  auto h = initial[0].unbind(0);
  auto c = initial.size() > 1 ? initial[1].unbind(0) : Tensors(h.size());
  Tensors last_h, last_c;
  for (size_t layer = 0; layer < static_cast<size_t>(l.count); ++layer) {
    Tensors outputs;
    for (size_t d = 0; d < l.directions(); ++d) {
      size_t i = layer * l.directions() + d;
      State s{h[i], c[i]};
      bool back = d == 1;
      auto [output, last] = !x.batch_sizes ? full(x.data, s, weights[i], step, back)
                            : back         ? packed_backwards(x, s, weights[i], step)
                                           : packed(x, s, weights[i], step);
      outputs.push_back(output);
      last_h.push_back(last.h);
      if (last.c.defined()) last_c.push_back(last.c);
    }
    x.data = l.bidirectional ? at::cat(outputs, -1) : outputs[0];
    if (l.dropout != 0 && l.train && layer + 1 < static_cast<size_t>(l.count)) x.data = at::dropout(x.data, l.dropout, true);
  }
  return {x.data, at::stack(last_h, 0), last_c.empty() ? at::Tensor() : at::stack(last_c, 0)};
}

// Whether everything fits together as these layers expect it.
bool fits(const at::Tensor& x, int64_t batch, at::TensorList states, at::TensorList params, const Layers& l, bool projects) {
  auto n = l.count * static_cast<int64_t>(l.directions());
  size_t each = (l.biases ? 4 : 2) + (projects ? 1 : 0);
  if (l.count < 1 || params.size() != static_cast<size_t>(n) * each || x.numel() == 0 || !is_ours(x)) return false;
  for (const auto& s : states)
    if (!is_ours(s) || s.dim() != 3 || s.size(0) != n || s.size(1) != batch || s.scalar_type() != x.scalar_type()) return false;
  for (const auto& p : params)
    if (!is_ours(p) || p.device() != x.device() || p.scalar_type() != x.scalar_type()) return false;
  return params[0].dim() == 2 && params[0].size(1) == x.size(-1) && params[1].dim() == 2 &&
         params[1].size(1) == states[0].size(2);
}

bool fits_full(const at::Tensor& x, at::TensorList states, at::TensorList params, const Layers& l, bool projects, bool batch_first) {
  return x.dim() == 3 && fits(x, x.size(batch_first ? 0 : 1), states, params, l, projects);
}

bool fits_packed(const at::Tensor& x, const at::Tensor& sizes, at::TensorList states, at::TensorList params, const Layers& l,
                 bool projects) {
  return x.dim() == 2 && sizes.device().is_cpu() && sizes.scalar_type() == at::kLong && sizes.numel() > 0 &&
         fits(x, sizes.const_data_ptr<int64_t>()[0], states, params, l, projects);
}

bool on_gpus() { return Session::get().accelerated(); }

// Eager hands an LSTM without projections to oneDNN, a layer and a direction at a time.
bool is_onednns(const at::Tensor& x) {
  if (!at::globalContext().userEnabledMkldnn()) return false;
  bool has_bf16 = __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq");
  return x.scalar_type() == at::kFloat || (x.scalar_type() == at::kBFloat16 && has_bf16);
}

Three onednn_lstm(const at::Tensor& input, at::TensorList initial, const std::vector<Weights>& weights, const Layers& l,
                  bool batch_first) {
  constexpr int64_t kLstm = 2;  // dnnl's kind of cell, as at::mkldnn_rnn_layer counts
  auto x = (batch_first ? input.transpose(0, 1) : input).contiguous();
  auto h = initial[0].contiguous(), c = initial[1].contiguous();
  Tensors last_h, last_c;
  for (int64_t layer = 0; layer < l.count; ++layer) {
    Tensors outputs;
    for (size_t d = 0; d < l.directions(); ++d) {
      auto i = layer * static_cast<int64_t>(l.directions()) + static_cast<int64_t>(d);
      const auto& w = weights[static_cast<size_t>(i)];
      auto bias = [&](const at::Tensor& b, const at::Tensor& of) { return l.biases ? b : at::zeros(of.sizes(), of.options()); };
      auto [output, hy, cy, workspace] =
          at::mkldnn_rnn_layer(x, w.ih, w.hh, bias(w.b_ih, w.ih), bias(w.b_hh, w.hh), h[i], c[i], /*reverse=*/d == 1,
                               /*batch_sizes=*/{}, kLstm, h.size(2), l.count, l.biases, l.bidirectional, batch_first, l.train);
      outputs.push_back(output);
      last_h.push_back(hy);
      last_c.push_back(cy);
    }
    x = l.bidirectional ? at::cat(outputs, -1) : outputs[0];
    if (l.dropout != 0 && l.train && layer + 1 < l.count) x = at::dropout(x, l.dropout, true);
  }
  return {batch_first ? x.transpose(0, 1) : x, at::stack(last_h, 0), at::stack(last_c, 0)};
}

// --- the operators ---------------------------------------------------------------------------------------------------------

Three lstm(const at::Tensor& x, at::TensorList hx, at::TensorList params, bool biases, int64_t layers, double dropout, bool train,
           bool bidirectional, bool batch_first) {
  Layers l{layers, dropout, train, bidirectional, biases};
  bool projects = hx.size() == 2 && hx[0].dim() == 3 && hx[1].dim() == 3 && hx[0].size(2) != hx[1].size(2);
  if (hx.size() == 2)
    if (auto done = cudnn_rnn(Cudnn::Lstm, x, nullptr, hx, params, l, batch_first)) return *done;
  if (on_gpus() || hx.size() != 2 || !fits_full(x, hx, params, l, projects, batch_first))
    return at::compositeimplicitautograd::lstm(x, hx, params, biases, layers, dropout, train, bidirectional, batch_first);
  auto weights = weights_of(params, l, projects);
  if (!projects && is_onednns(x)) return onednn_lstm(x, hx, weights, l, batch_first);
  auto [output, h, c] = run({batch_first ? x.transpose(0, 1) : x}, hx, weights, l, lstm_step);
  return {batch_first ? output.transpose(0, 1) : output, h, c};
}

Three lstm_packed(const at::Tensor& x, const at::Tensor& sizes, at::TensorList hx, at::TensorList params, bool biases, int64_t layers,
                  double dropout, bool train, bool bidirectional) {
  Layers l{layers, dropout, train, bidirectional, biases};
  bool projects = hx.size() == 2 && hx[0].dim() == 3 && hx[1].dim() == 3 && hx[0].size(2) != hx[1].size(2);
  if (hx.size() == 2 && sizes.device().is_cpu() && sizes.scalar_type() == at::kLong)
    if (auto done = cudnn_rnn(Cudnn::Lstm, x, &sizes, hx, params, l, false)) return *done;
  if (on_gpus() || hx.size() != 2 || !fits_packed(x, sizes, hx, params, l, projects))
    return at::compositeimplicitautograd::lstm(x, sizes, hx, params, biases, layers, dropout, train, bidirectional);
  return run({x, &sizes}, hx, weights_of(params, l, projects), l, lstm_step);
}

using Otherwise = Two (*)(const at::Tensor&, const at::Tensor&, at::TensorList, bool, int64_t, double, bool, bool, bool);
using OtherwisePacked = Two (*)(const at::Tensor&, const at::Tensor&, const at::Tensor&, at::TensorList, bool, int64_t, double, bool,
                                bool);

template <Step step, Otherwise otherwise, Cudnn mode>
Two simple(const at::Tensor& x, const at::Tensor& hx, at::TensorList params, bool biases, int64_t layers, double dropout, bool train,
           bool bidirectional, bool batch_first) {
  Layers l{layers, dropout, train, bidirectional, biases};
  if (auto done = cudnn_rnn(mode, x, nullptr, hx, params, l, batch_first)) return {std::get<0>(*done), std::get<1>(*done)};
  if (on_gpus() || !fits_full(x, hx, params, l, false, batch_first))
    return otherwise(x, hx, params, biases, layers, dropout, train, bidirectional, batch_first);
  auto [output, h, c] = run({batch_first ? x.transpose(0, 1) : x}, hx, weights_of(params, l, false), l, step);
  return {batch_first ? output.transpose_(0, 1) : output, h};  // in place: eager counts a version
}

template <Step step, OtherwisePacked otherwise, Cudnn mode>
Two simple_packed(const at::Tensor& x, const at::Tensor& sizes, const at::Tensor& hx, at::TensorList params, bool biases,
                  int64_t layers, double dropout, bool train, bool bidirectional) {
  Layers l{layers, dropout, train, bidirectional, biases};
  if (sizes.device().is_cpu() && sizes.scalar_type() == at::kLong)
    if (auto done = cudnn_rnn(mode, x, &sizes, hx, params, l, false)) return {std::get<0>(*done), std::get<1>(*done)};
  if (on_gpus() || !fits_packed(x, sizes, hx, params, l, false))
    return otherwise(x, sizes, hx, params, biases, layers, dropout, train, bidirectional);
  auto [output, h, c] = run({x, &sizes}, hx, weights_of(params, l, false), l, step);
  return {output, h};
}

// --- the cells -------------------------------------------------------------------------------------------------------------

// Whether a cell's arguments fit together as their composites expect it.
bool fits_cell(const at::Tensor& x, at::TensorList states, const Weights& w, int64_t gates) {
  if (!is_ours(x) || x.dim() != 2 || x.numel() == 0 || w.ih.dim() != 2 || w.hh.dim() != 2) return false;
  int64_t hidden = w.hh.size(1), rows = gates * hidden;
  auto alike = [&x](const at::Tensor& t) { return t.device() == x.device() && t.scalar_type() == x.scalar_type(); };
  for (const auto& s : states)
    if (!alike(s) || s.dim() != 2 || s.size(0) != x.size(0) || s.size(1) != hidden) return false;
  for (const auto& b : {w.b_ih, w.b_hh})
    if (b.defined() && (!alike(b) || b.dim() != 1 || b.size(0) != rows)) return false;
  return alike(w.ih) && alike(w.hh) && w.ih.size(0) == rows && w.ih.size(1) == x.size(1) && w.hh.size(0) == rows;
}

using Bias = const std::optional<at::Tensor>&;

Weights cell_weights(const at::Tensor& ih, const at::Tensor& hh, Bias b_ih, Bias b_hh) {
  return {ih, hh, b_ih.value_or(at::Tensor()), b_hh.value_or(at::Tensor()), {}};
}

Two lstm_cell(const at::Tensor& x, at::TensorList hx, const at::Tensor& ih, const at::Tensor& hh, Bias b_ih, Bias b_hh) {
  auto w = cell_weights(ih, hh, b_ih, b_hh);
  if (on_gpus() || hx.size() != 2 || !fits_cell(x, hx, w, 4))
    return at::compositeimplicitautograd::lstm_cell(x, hx, ih, hh, b_ih, b_hh);
  auto [h, c] = lstm_step_of(w.of_hidden(hx[0]).add_(w.of_input(x)), {hx[0], hx[1]}, w);
  return {h, c};
}

at::Tensor gru_cell(const at::Tensor& x, const at::Tensor& hx, const at::Tensor& ih, const at::Tensor& hh, Bias b_ih, Bias b_hh) {
  auto w = cell_weights(ih, hh, b_ih, b_hh);
  if (on_gpus() || !fits_cell(x, {hx}, w, 3)) return at::compositeimplicitautograd::gru_cell(x, hx, ih, hh, b_ih, b_hh);
  return gru_step(w.of_input(x), {hx, {}}, w).h;
}

}  // namespace

void register_recurrent() {
  namespace composite = at::compositeimplicitautograd;
  // In inference mode the autograd keys are skipped, hence both places.
  for (auto key : {c10::DispatchKey::AutogradPrivateUse1, c10::DispatchKey::PrivateUse1}) {
    auto* m = new torch::Library(torch::Library::IMPL, "aten", key, __FILE__, __LINE__);  // kept for good
    m->impl("lstm_cell", TORCH_FN(lstm_cell));
    m->impl("gru_cell", TORCH_FN(gru_cell));
    m->impl("lstm.input", TORCH_FN(lstm));
    m->impl("lstm.data", TORCH_FN(lstm_packed));
    m->impl("gru.input", TORCH_FN((simple<gru_step, &composite::gru, Cudnn::Gru>)));
    m->impl("gru.data", TORCH_FN((simple_packed<gru_step, &composite::gru, Cudnn::Gru>)));
    m->impl("rnn_tanh.input", TORCH_FN((simple<tanh_step, &composite::rnn_tanh, Cudnn::Tanh>)));
    m->impl("rnn_tanh.data", TORCH_FN((simple_packed<tanh_step, &composite::rnn_tanh, Cudnn::Tanh>)));
    m->impl("rnn_relu.input", TORCH_FN((simple<relu_step, &composite::rnn_relu, Cudnn::Relu>)));
    m->impl("rnn_relu.data", TORCH_FN((simple_packed<relu_step, &composite::rnn_relu, Cudnn::Relu>)));
  }
}

}  // namespace dtorch

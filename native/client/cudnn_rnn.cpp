// See cudnn_rnn.h. PyTorch's composites ask whether their input may go to cuDNN, and that of dtorch may not: its device has
// another name. The worker is asked instead.
//
// Weights are handed over one by one, so cuDNN's operator lays them out in one buffer at every call; eager's modules have them
// so laid out (flatten_parameters). The results are the same. Dropout between layers needs a state of cuDNN's on the device,
// which is not here: several layers with dropout, in training, take the composite, other than eager's.
#include "client/cudnn_rnn.h"

#include <ATen/autocast_mode.h>
#include <ATen/ops/_cudnn_rnn_ops.h>

#include <algorithm>

#include "client/issue.h"

namespace dtorch {

bool cudnn_takes(const at::Tensor& x) {
  static const OpInfo& choice = op_info("aten::cudnn_is_acceptable", "");
  torch::jit::Stack stack{x};
  issue_boxed(choice, &stack);
  return stack[0].toBool();
}

std::optional<std::tuple<at::Tensor, at::Tensor, at::Tensor>> cudnn_rnn(Cudnn mode, const at::Tensor& x, const at::Tensor* sizes,
                                                                        at::TensorList hidden, at::TensorList params,
                                                                        const Layers& l, bool batch_first) {
  auto with_x = [&x](const at::Tensor& t) { return is_plain(t) && t.device() == x.device(); };
  bool fits = x.dim() == (sizes ? 2 : 3) && !hidden.empty() && hidden[0].dim() == 3 && is_plain(x) && x.numel() != 0 &&
              std::all_of(hidden.begin(), hidden.end(), with_x) && std::all_of(params.begin(), params.end(), with_x);
  bool drops = l.train && l.dropout != 0 && l.count > 1;
  if (!Session::get().accelerated() || !fits || drops || !cudnn_takes(x)) return std::nullopt;
  // Under autocast PyTorch gives cuDNN's layers float16, whatever the lower precision is.
  auto cast = [autocast = at::autocast::is_autocast_enabled(kDevice)](const at::Tensor& t) {
    return autocast ? at::autocast::cached_cast(at::kHalf, t, kDevice) : t;
  };
  std::vector<at::Tensor> weights;
  for (const auto& p : params) weights.push_back(cast(p));
  const at::Tensor h = cast(hidden[0]);
  const std::optional<at::Tensor> c = hidden.size() > 1 ? std::optional<at::Tensor>(cast(hidden[1])) : std::nullopt;
  bool projects = c && c->size(2) != h.size(2);
  std::vector<c10::SymInt> batches;
  if (sizes)
    for (int64_t i = 0; i < sizes->numel(); ++i) batches.emplace_back(sizes->const_data_ptr<int64_t>()[i]);
  c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::DispatchKey::AutocastPrivateUse1);
  auto [out, last_h, last_c, reserve, buffer] = at::_ops::_cudnn_rnn::call(
      cast(x), weights, (l.biases ? 4 : 2) + projects, /*weight_buf=*/std::nullopt, h, c, static_cast<int64_t>(mode),
      projects ? c->sym_size(2) : h.sym_size(2), projects ? h.sym_size(2) : c10::SymInt(0), l.count, batch_first, /*dropout=*/0.0, l.train,
      l.bidirectional, batches, /*dropout_state=*/std::nullopt);
  return std::tuple(out, last_h, c ? last_c : at::Tensor());
}

}  // namespace dtorch

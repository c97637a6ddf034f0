// RNN, GRU and LSTM layers by cuDNN, as eager has them on a GPU.
#pragma once

#include <ATen/ATen.h>

#include <optional>
#include <tuple>

namespace dtorch {

// Whether PyTorch would give a tensor like this one to cuDNN, as the worker says.
bool cudnn_takes(const at::Tensor& x);

// As cuDNN numbers them.
enum class Cudnn : int64_t { Relu = 0, Tanh = 1, Lstm = 2, Gru = 3 };

struct Layers {
  int64_t count;
  double dropout;
  bool train, bidirectional, biases;

  size_t directions() const { return bidirectional ? 2 : 1; }
};

// Output, last hidden state and last cell state (of an LSTM). `sizes`: of a packed sequence, else null. Nothing where
// cuDNN does not take it here, or where the arguments do not belong together: PyTorch's composite is to go on.
std::optional<std::tuple<at::Tensor, at::Tensor, at::Tensor>> cudnn_rnn(Cudnn mode, const at::Tensor& x, const at::Tensor* sizes,
                                                                        at::TensorList hidden, at::TensorList params,
                                                                        const Layers& l, bool batch_first);

}  // namespace dtorch

// Makes PyTorch know the device: guard, hooks, allocator, kernels. Called once, from module.cpp.
#pragma once

#include <string>

namespace dtorch {
void register_device();   // device.cpp: guard, hooks, allocator, generators
void register_kernels();  // kernels.cpp: hand-written kernels, forced boxed ones, the fallback
// Has the workers run a custom operator, which they have too, where it would run its device-independent kernel here.
void run_on_workers(const std::string& name, const std::string& overload);
void register_hot_kernels();    // hot.cpp: unboxed ones
void register_whole_kernels();  // whole.cpp: linear and matmul as one record
void serve_cells(bool cpus);    // cells.cpp: one step of LSTM and GRU, for workers that are CPUs
void register_counts();         // counts.cpp: histc of whole numbers
void register_recurrent();      // recurrent.cpp: RNN, LSTM and GRU layers
void register_attention();      // attention.cpp: the backend of scaled_dot_product_attention
void register_accelerators();   // accelerators.cpp: what composites do on CUDA only
void serve_accelerators(bool accelerated);  // ... and what is registered for workers that have such, and for no others
void register_sparse();         // sparse.cpp: sparse tensors over dense ones
void register_nested();         // nested.cpp: the padded batches of nn.TransformerEncoder
void register_autocast();       // autocast.cpp
}  // namespace dtorch

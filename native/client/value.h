// Values crossing between the client's CPU tensors and the workers, and between workers.
#pragma once

#include <ATen/core/Tensor.h>

#include "client/session.h"

namespace dtorch {

// Asks for a tensor's elements. The answer's request completes when they are here.
RequestPtr fetch(const at::Tensor& t);
// The CPU tensor a completed fetch brought; throws what the request failed with. A large value is the mapping itself.
at::Tensor value_of(const RequestPtr& r);
// Fetches and waits.
at::Tensor fetch_now(const at::Tensor& t);

// A new tensor on `worker` with the elements and strides of a CPU tensor: at most one copy.
at::Tensor upload(const at::Tensor& cpu, int worker);

// A new tensor on `worker`, row-major, with the bytes of a file that this process has open as `fd`, from `offset` on. The
// request is answered when they are there; `fd` must stay open until then.
std::pair<at::Tensor, RequestPtr> read_file(int worker, at::ScalarType dtype, c10::IntArrayRef sizes, int fd, size_t offset);

// self.copy_(src) where at least one of them is ours.
void copy(const at::Tensor& src, const at::Tensor& dst, bool non_blocking = false);

// A request that the worker answers with DONE; its `result` as bytes (or empty).
std::string ask_done(const RequestPtr& r);
void synchronize(int worker);
std::string stats_of(int worker, const std::string& what);  // STATS: the reply's frame

}  // namespace dtorch

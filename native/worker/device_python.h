// What the executor asks of Python about its device: page-locked memory, memory lent between processes, properties. Per
// buffer or per transfer, never per operator. The object behind it is dtorch.worker.cuda.Hooks; on a CPU there is none, and
// nothing here is called.
//
// Each call takes the interpreter's lock; an exception comes back as std::runtime_error.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

struct _object;  // PyObject

namespace dtorch::worker {

void set_device_hooks(_object* hooks);  // a borrowed reference

void page_lock(const void* data, size_t n);
void page_unlock(const void* data);

// Memory of this worker's as another one finds it.
struct Lent {
  int device;
  std::string handle;  // of the allocation it lies in
  uint64_t offset;
  std::string event;  // what the other one's stream is to wait for
};
// Lends n bytes, as the current stream leaves them, to worker `dest`; nothing where the memory cannot be lent.
std::optional<Lent> lend_device_memory(const void* data, size_t n, int dest);
// Has the current stream copy what worker `source` lent.
void copy_lent(int source, void* target, size_t n, const Lent& lent);
using HandlesByPeer = std::vector<std::pair<int, std::vector<std::string>>>;
// Allocations that were lent and are about to be freed, none of whose addresses is in `lent`: their handles, by worker that
// got them.
HandlesByPeer revoked_allocations(const std::vector<const void*>& lent);
// The same of allocations that PyTorch's allocator has freed by itself.
HandlesByPeer freed_allocations();
void close_allocations(int source, const std::vector<std::string>& handles);
void forget_peer(int worker);

std::vector<std::pair<std::string, std::variant<int64_t, std::string>>> device_properties();
std::pair<size_t, size_t> device_memory_info();  // bytes free, and in all
void limit_device_memory(size_t n);

}  // namespace dtorch::worker

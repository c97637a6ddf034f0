// A worker's tensors: storage id -> the storage's first tensor, or why there is none. The client has one for the moment in which
// it follows a record (client/contents.cpp).
//
// STORE-1  A slot holds the only lasting reference to its storage: erasing it frees the memory (unless an operator that
//          runs right now still reads it).
// STORE-2  A poisoned slot has a cause and no usable contents; whatever reads it is poisoned with the same cause.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/flat_hash_map.h>

#include <cstdint>
#include <memory>
#include <string>

namespace dtorch {

// Why something failed: the first failure, shared by everything that depends on it.
struct Cause {
  std::string error;      // the ERROR message's `error` array, encoded
  bool reported = false;  // somebody has been told
};
using CausePtr = std::shared_ptr<Cause>;

struct Slot {
  at::Tensor first;
  CausePtr poison;
  uint32_t site = 0;  // the client's line that made it
};

class Store {
 public:
  Slot* find(uint64_t id) {
    auto it = slots_.find(id);
    return it == slots_.end() ? nullptr : &it->second;
  }
  // Throws when the id is unknown: the client and the worker disagree, which is a bug of ours.
  Slot& at(uint64_t id);
  void put(uint64_t id, at::Tensor t, uint32_t site) {
    auto& s = slots_[id];
    s.first = std::move(t);
    s.site = site;
    s.poison.reset();
  }
  void poison(uint64_t id, const CausePtr& cause) {
    auto& s = slots_[id];
    s.first = at::Tensor();
    s.poison = cause;
  }
  bool erase(uint64_t id) { return slots_.erase(id) != 0; }
  size_t size() const { return slots_.size(); }
  auto begin() const { return slots_.begin(); }
  auto end() const { return slots_.end(); }

 private:
  ska::flat_hash_map<uint64_t, Slot> slots_;
};

}  // namespace dtorch

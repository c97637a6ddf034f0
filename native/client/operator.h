// What the client knows about one operator: its number on the wire and how its results come about.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

#include <cstdint>
#include <string>
#include <vector>

namespace dtorch {

struct OpInfo {
  enum class Result : uint8_t { Tensor, List, Alias, Value };
  struct Return {
    Result kind;
    int arg;  // Alias: which argument comes back
  };

  // Which argument has indices into the first one, and along which dimension: that of an argument, or -1: the first (embedding)
  // or, with an argument for what is ignored, the classes (nll_loss).
  struct Points {
    int index = -1, dim = -1, ignored = -1;
  };

  explicit OpInfo(const c10::OperatorHandle& op, uint32_t number);

  c10::OperatorHandle handle;
  uint32_t number;
  std::string name, overload;
  size_t n_args;
  std::vector<Return> returns;
  std::vector<int> writes;         // arguments it writes (in place or out=)
  std::vector<bool> scalar_by_type;// arguments whose value cannot change the geometry: only their type is in the key
  bool reads_kernel_switches;     // its result follows from which kernels the program lets PyTorch choose, too
  bool values_follow;             // its plain results follow from its arguments' geometry, as tensors' sizes do
  bool asks;       // results that only the worker can tell: data-dependent shapes, plain values
  bool asks_for_masks;  // an index: its result's shape depends on the data where a mask is among the indices only
  bool custom;     // not PyTorch's own; its fake kernel, if any, tells its results' geometry
  bool infers;     // has new tensors, or arguments whose sizes must be checked
  bool overwrites; // exact, and all that it writes it writes anew: out=, fill_, zero_, copy_
  Points points;   // for mistakes in the data that the client can see (geometry.cpp: points_outside)
  bool exact;      // what it makes of integers and booleans is the same on every device, and every time (contents.h)
  bool composite;  // its composite kernel computes the geometry that the CPU kernel gives (geometry.h)
  bool in_place;       // not structured, writes its arguments and gives nothing else
  bool checks_itself;  // structured: its composite raises what is wrong with the arguments
  bool (*rule)(at::ArrayRef<c10::IValue>, struct Entry&);  // or null
  bool counts_versions;      // writes lists of tensors in place by the CPU's in-place operators, which count each one's version
  bool reads_grad_mode;      // its kernel does other work, and gives other results, where gradients are enabled
  bool uploads_cpu_indices;  // takes Tensor?[] indices, which may be CPU tensors as everywhere in PyTorch
};

// The one OpInfo of an operator, made at first use and never freed.
OpInfo& op_info(const c10::OperatorHandle& op);
OpInfo& op_info(const char* name, const char* overload);
// "aten::add.Tensor"; empty for a number that no operator has.
std::string op_name(uint32_t number);
// From now on an operator that is deregistered is forgotten.
void watch_operators();

}  // namespace dtorch

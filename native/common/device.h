// The device that this process computes on: the CPU, or in a worker what its engine was started for.
//
// Nothing here or elsewhere is built against an accelerator's own libraries: PyTorch's interfaces for devices
// (DeviceGuardImplInterface, DeviceAllocator, AcceleratorHooksInterface) say all that is needed.
#pragma once

#include <ATen/core/Generator.h>
#include <c10/core/Device.h>
#include <c10/core/DispatchKeySet.h>

namespace dtorch {

struct Computing {
  c10::Device device{c10::DeviceType::CPU};
  c10::DispatchKeySet keys{c10::DispatchKey::CPU};  // of its dense tensors, without autograd
};
// Set before the first tensor is made, if ever. Internal to each native module: a client in the same process has its own.
inline Computing computing;

inline bool on_host() { return computing.device.is_cpu(); }

}  // namespace dtorch

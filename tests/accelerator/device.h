// What the files of the test's accelerator share.
#pragma once

#include <c10/core/Device.h>

#include <utility>

namespace accelerator {

inline const c10::Device kDevice(c10::DeviceType::PrivateUse1, 0);

// A kernel of the current stream runs from now on: it sees what was copied before it. Throws where the device has failed.
void launch();

// While one lives copies are part of a kernel, and happen at once.
struct InKernel {
  static thread_local bool now;
  bool before = std::exchange(now, true);
  ~InKernel() { now = before; }
};

}  // namespace accelerator

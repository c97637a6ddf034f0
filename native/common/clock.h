// The clock that every process of a session reads alike.
#pragma once

#include <time.h>

#include <cstdint>

namespace dtorch {

// Nanoseconds of CLOCK_MONOTONIC: comparable between the processes of one machine, and with Python's time.monotonic_ns().
inline uint64_t now_ns() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return static_cast<uint64_t>(t.tv_sec) * 1000000000ull + static_cast<uint64_t>(t.tv_nsec);
}

}  // namespace dtorch

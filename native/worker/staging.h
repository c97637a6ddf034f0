// Host memory between an accelerator and the others: shared, so that a fetched value is lent where it lies, and page-locked,
// so that a copy needs no thread of the host's. Kept for the next one, by size.
//
// STG-1  A buffer is used by one tensor at a time: from its making until nobody holds that tensor's storage, loans and copies
//        under way included.
#pragma once

#include <ATen/core/Tensor.h>

#include "common/geometry.h"

namespace dtorch::worker {

// A CPU tensor of that geometry (dense, offset 0).
at::Tensor stage(const Geometry& g);

// Where a staged tensor's bytes can be mapped by others; false when `owner` is not of here.
bool staged_part(const c10::DataPtr& owner, const void* data, int* fd, size_t* offset);

// Bytes of buffers in use and kept.
size_t staged_bytes();
// Gives the kept ones back.
void drop_staging();

}  // namespace dtorch::worker

// Random generators of the dtorch device: handles whose state lives on a worker.
#pragma once

#include <ATen/core/Generator.h>

#include <cstdint>
#include <string>

namespace dtorch {

// The generator's number on its worker (0: the worker's default one); throws for a generator of another device.
uint32_t generator_number(const at::Generator& g, const std::string& op);

// torch.Generator(device="dtorch:i") and the default generator of a worker.
const at::Generator& default_generator(c10::DeviceIndex index);
at::Generator new_generator(c10::DeviceIndex index);

// Seeds every worker's default generator (torch.manual_seed).
void seed_all(uint64_t seed);

}  // namespace dtorch

// What a thread and a block of each kernel take on each device, as nvcc has compiled it: kernel_resources.inc, which
// benchmarks/kernels/resources.py writes.
#pragma once

#include "emulation/launch.h"

#include <optional>

namespace kvc::emulation {

struct KernelResources {
    int registers;
    size_t static_shared_bytes;
};

// None for a kernel that is not of the library: a test's own.
std::optional<KernelResources> resources_of(const Kernel& kernel, int device);

}  // namespace kvc::emulation

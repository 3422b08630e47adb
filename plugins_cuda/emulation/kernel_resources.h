// The resources of a thread and a block of each kernel on each device, as nvcc compiles it: kernel_resources.inc, which
// benchmarks/kernels/resources.py writes.
#pragma once

#include "emulation/launch.h"

#include <optional>

namespace kvc::emulation {

struct KernelResources {
    int registers;
    size_t static_shared_bytes;
};

// Null for a kernel that is not in the library: a test's own.
std::optional<KernelResources> resources_of(const Kernel& kernel, int device);

}  // namespace kvc::emulation

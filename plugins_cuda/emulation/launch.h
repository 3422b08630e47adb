// The host side of the calls in src/launch_kernel.h: a kernel runs to its end before its launch returns, one
// launch at a time in the process.
#pragma once

#include "emulation/block.h"
#include "kernels/platform.cuh"

#include <cstddef>

using cudaStream_t = void*;

namespace kvc {
namespace emulation {

// Stands for a kernel: the library has one object for each.
struct Kernel {
    const char* signature;  // names it with its template arguments, in the compiler's words: see kernel_resources.h
    void (*call)(const void* params);
    size_t params_bytes;
};

template <class Params>
Params parameters_of(void (*)(Params));

}  // namespace emulation

namespace platform {

using KernelEntry = const emulation::Kernel*;

template <auto kKernel>
KernelEntry kernel_entry() {
    using Params = decltype(emulation::parameters_of(kKernel));
    static constexpr emulation::Kernel kernel{
        __PRETTY_FUNCTION__, [](const void* params) { kKernel(*static_cast<const Params*>(params)); }, sizeof(Params)};
    return &kernel;
}

// The device that kvc_emulation_set_device has chosen: an index into emulation::kDevices.
int current_device(const char* kernel);

SharedMemorySizes shared_memory_of(const char* kernel, KernelEntry entry, int device);
bool waits_for_previous_launch(const char* kernel, KernelEntry entry, int device);
int multiprocessors_of(const char* kernel, int device);
int64_t active_clusters(const char* kernel, KernelEntry entry, dim3 block, size_t dynamic_shared_bytes,
                        unsigned cluster_blocks, int device);

// These throw LaunchError where a device would refuse a call, and where the kernel makes a mistake.
void allow_dynamic_shared(const char* kernel, KernelEntry entry, size_t bytes);
void prefer_shared_memory(const char* kernel, KernelEntry entry, bool most);
void launch_kernel(const char* kernel, KernelEntry entry, dim3 grid, dim3 block, size_t dynamic_shared_bytes,
                   unsigned cluster_blocks, cudaStream_t, bool begins_early, const void* params);

}  // namespace platform
}  // namespace kvc

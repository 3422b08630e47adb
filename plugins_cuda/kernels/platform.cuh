// The language of kernels, for both compilers: nvcc, and g++ with -DKVC_EMULATION, which runs the same kernel bodies on
// the CPU. This is the only header that tells the compilers apart; kernels/device.cuh and emulation/device.h offer
// the same names. Kernel bodies read as ordinary CUDA (threadIdx, __syncthreads, __shfl_xor_sync, ...).
//
// Left out on purpose: float atomics and approximate math (not deterministic across orders or devices),
// <<<>>> (kvc::launch of src/launch_kernel.h reports errors), and PTX outside kernels/ptx.cuh.
#pragma once

#include <cstddef>
#include <stdexcept>
#include <string>

namespace kvc {

// A launch that the CUDA runtime refused, or an error that the emulation found while it ran the kernel.
class LaunchError : public std::runtime_error {
public:
    explicit LaunchError(const std::string& what) : std::runtime_error(what) {}
};

namespace platform {

// Shared memory of a kernel's blocks on one device, in bytes.
struct SharedMemorySizes {
    size_t static_bytes;  // of the arrays that the kernel declares
    size_t most_bytes;    // static and dynamic together, of a kernel that was allowed all that the device has
};

}  // namespace platform
}  // namespace kvc

#ifdef KVC_EMULATION
#include "emulation/device.h"
#else
#include "kernels/device.cuh"
#endif

// kvc::launch, for both compilers: starts a kernel that takes one parameter struct by value.
//
// A block has 48 KiB of shared memory, its static arrays counted, unless the kernel was allowed more. So every kernel
// with dynamic shared memory is allowed all that a block of the device can have, before its first launch there. The
// amount is the same for every launch: threads that are first together, of two engines say, ask for the same.
#pragma once

#include "kernels/platform.cuh"

#include <array>
#include <atomic>
#include <cstdint>

namespace kvc {

/// What one kernel was allowed, by device. Its launches may come from several threads.
class AllowedSharedMemory {
public:
    /// Make sure that blocks of the kernel may have `bytes` of dynamic shared memory on the current device. Throws
    /// LaunchError, with the numbers, where they cannot.
    void require(const char* kernel, platform::KernelEntry entry, size_t bytes) {
        if (bytes == 0) {
            return;
        }
        const int device = platform::current_device(kernel);
        if (device < kDevices && bytes <= allowed_[device].load(std::memory_order_acquire)) {
            return;
        }
        const platform::SharedMemorySizes sizes = platform::shared_memory_of(kernel, entry, device);
        if (sizes.static_bytes + bytes > sizes.most_bytes) {
            throw LaunchError(std::string("kernel ") + kernel + ": " + std::to_string(sizes.static_bytes) +
                              " bytes of static and " + std::to_string(bytes) +
                              " of dynamic shared memory; a block of this device has at most " +
                              std::to_string(sizes.most_bytes));
        }
        const size_t most = sizes.most_bytes - sizes.static_bytes;
        platform::allow_dynamic_shared(kernel, entry, most);
        if (device < kDevices) {
            allowed_[device].store(most, std::memory_order_release);
        }
    }

private:
    static constexpr int kDevices = 64;  // any further one is asked at every launch
    std::array<std::atomic<uint64_t>, kDevices> allowed_{};
};

template <class Params>
Params parameters_of(void (*)(Params));

/// Queue one launch of kKernel. Throws LaunchError when the runtime refuses it.
template <auto kKernel, class Params = decltype(parameters_of(kKernel))>
void launch(const char* name, dim3 grid, dim3 block, size_t dynamic_shared_bytes, cudaStream_t stream,
            const std::type_identity_t<Params>& params) {
    static AllowedSharedMemory shared_memory;
    const platform::KernelEntry entry = platform::kernel_entry<kKernel>();
    shared_memory.require(name, entry, dynamic_shared_bytes);
    platform::launch_kernel(name, entry, grid, block, dynamic_shared_bytes, stream, &params);
}

}  // namespace kvc

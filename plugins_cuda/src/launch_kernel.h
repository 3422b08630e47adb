// kvc::launch, for both compilers: starts a kernel that takes one parameter struct by value.
//
// A block has 48 KiB of shared memory, its static arrays counted, unless the kernel was allowed more. So every kernel
// with dynamic shared memory is allowed all that a block of the device can have, before its first launch there. The
// amount is the same for every launch: threads that are first together, of two engines say, ask for the same.
//
// Every launch of a call but the first may begin while the one before it still runs (kernels/dependent_launch.cuh), also
// in a captured graph. The first may not: what is before it on the stream is the caller's. Had that begun early itself, and
// never waited, it could be over before what it came after.
#pragma once

#include "kernels/platform.cuh"

#include <array>
#include <atomic>
#include <cstdint>
#include <utility>

namespace kvc {

inline constexpr int kDevices = 64;  // of which launches remember what they found; any further one is asked every time

/// What one kernel was allowed, by device. Its launches may come from several threads.
class AllowedSharedMemory {
public:
    /// Make sure that blocks of the kernel may have `bytes` of dynamic shared memory on the current device. Throws
    /// LaunchError, with the numbers, where they cannot.
    void require(const char* kernel, platform::KernelEntry entry, int device, size_t bytes) {
        if (bytes == 0) {
            return;
        }
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
    std::array<std::atomic<uint64_t>, kDevices> allowed_{};
};

/// Whether one kernel's code for a device waits for the launch before it.
class WaitingCode {
public:
    bool on(const char* kernel, platform::KernelEntry entry, int device) {
        const uint64_t found = device < kDevices ? found_[device].load(std::memory_order_acquire) : kUnknown;
        if (found != kUnknown) {
            return found == kWaits;
        }
        const bool waits = platform::waits_for_previous_launch(kernel, entry, device);
        if (device < kDevices) {
            found_[device].store(waits ? kWaits : kDoesNot, std::memory_order_release);
        }
        return waits;
    }

private:
    static constexpr uint64_t kUnknown = 0, kWaits = 1, kDoesNot = 2;
    std::array<std::atomic<uint64_t>, kDevices> found_{};
};

/// The caller's stream in one call of the C ABI.
class Stream {
public:
    explicit Stream(cudaStream_t handle) : handle_(handle) {}
    cudaStream_t handle() const { return handle_; }
    /// Whether the call has launched on it before; from now on it has.
    bool follows_own_launch() { return std::exchange(launched_, true); }

private:
    cudaStream_t handle_;
    bool launched_ = false;
};

template <class Params>
Params parameters_of(void (*)(Params));

/// Whether the code of kKernel for the current device is of sm_90 or later: it waits, and its blocks may be in clusters.
template <auto kKernel>
bool has_later_code(const char* name, int device) {
    static WaitingCode waiting_code;
    return waiting_code.on(name, platform::kernel_entry<kKernel>(), device);
}

/// Queue one launch of kKernel, in clusters of so many blocks along x. Throws LaunchError when the runtime refuses it.
template <auto kKernel, class Params = decltype(parameters_of(kKernel))>
void launch(const char* name, dim3 grid, dim3 block, size_t dynamic_shared_bytes, Stream& stream,
            const std::type_identity_t<Params>& params, unsigned cluster_blocks = 1) {
    static AllowedSharedMemory shared_memory;
    const platform::KernelEntry entry = platform::kernel_entry<kKernel>();
    const int device = platform::current_device(name);
    shared_memory.require(name, entry, device, dynamic_shared_bytes);
    const bool begins_early = stream.follows_own_launch() && has_later_code<kKernel>(name, device);
    platform::launch_kernel(name, entry, grid, block, dynamic_shared_bytes, cluster_blocks, stream.handle(),
                            begins_early, &params);
}

}  // namespace kvc

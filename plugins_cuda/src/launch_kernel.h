// kvc::launch, for both compilers: starts a kernel that takes one parameter struct by value.
//
// A block has 48 KiB of shared memory, static arrays included, unless the kernel was allowed more. So every kernel with
// dynamic shared memory is allowed the most that a block of the device can have, before its first launch there. The
// amount is the same for every launch: two threads that launch first at once, of two engines say, ask for the same.
//
// Every launch of a call but the first may begin while the one before it still runs (kernels/dependent_launch.cuh), also
// in a captured graph. The first launch may not: the work before it on the stream is the caller's. Had that work begun
// early itself and never waited, it could end before its own predecessor.
#pragma once

#include "kernels/platform.cuh"
#include "src/switches.h"

#include <array>
#include <atomic>
#include <cstdint>
#include <map>
#include <mutex>
#include <tuple>
#include <utility>

namespace kvc {

inline constexpr int kDevices = 64;  // launches keep their answers; any further device is asked every time

/// The shared memory that one kernel was allowed, by device. Its launches may come from several threads.
class AllowedSharedMemory {
public:
    /// Makes sure that blocks of the kernel may have `bytes` of dynamic shared memory on the current device. Throws
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

/// Asks once per device that a kernel finds a multiprocessor with as much shared memory as it can have.
///
/// A multiprocessor divides its memory anew only while it is idle. Left to itself, the driver chooses a division for each
/// kernel by its own needs, and blocks of a launch that begins early could not join those of the one before it.
class PreferredCarveout {
public:
    void ask(const char* kernel, platform::KernelEntry entry, int device) {
        const bool most = is_on(Switch::kCarveout);
        const int wanted = most ? kAsked : kLeftAlone;
        if (device < kDevices && asked_[device].load(std::memory_order_acquire) == wanted) {
            return;
        }
        platform::prefer_shared_memory(kernel, entry, most);  // where it throws, the next launch asks again
        if (device < kDevices) {
            asked_[device].store(wanted, std::memory_order_release);
        }
    }

private:
    static constexpr int kAsked = 1, kLeftAlone = 2;
    std::array<std::atomic<int>, kDevices> asked_{};
};

/// True if the code of a kernel for a device waits for the launch before it.
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

/// The clusters of a kernel that a device holds at once, by their blocks and the dynamic shared memory of a block.
class ActiveClusters {
public:
    /// Asks the device once for each size. The kernel was allowed that much shared memory.
    int64_t of(const char* kernel, platform::KernelEntry entry, dim3 block, size_t dynamic_shared_bytes,
               unsigned cluster_blocks, int device) {
        const std::lock_guard lock(mutex_);
        const std::tuple size{device, cluster_blocks, dynamic_shared_bytes};
        if (const auto found = counts_.find(size); found != counts_.end()) {
            return found->second;
        }
        const int64_t count =
            platform::active_clusters(kernel, entry, block, dynamic_shared_bytes, cluster_blocks, device);
        counts_.emplace(size, count);  // where the query throws, nothing is kept, and the next call asks again
        return count;
    }

private:
    std::mutex mutex_;
    std::map<std::tuple<int, unsigned, size_t>, int64_t> counts_;
};

/// The caller's stream in one call of the C ABI.
class Stream {
public:
    explicit Stream(cudaStream_t handle) : handle_(handle) {}
    cudaStream_t handle() const { return handle_; }
    /// Tells if the call has launched on the stream before, and marks it as launched.
    bool follows_own_launch() { return std::exchange(launched_, true); }

private:
    cudaStream_t handle_;
    bool launched_ = false;
};

template <class Params>
Params parameters_of(void (*)(Params));

/// True if kKernel's code for the current device is for sm_90 or later: it waits, and its blocks may form clusters.
template <auto kKernel>
bool has_later_code(const char* name, int device) {
    static WaitingCode waiting_code;
    return waiting_code.on(name, platform::kernel_entry<kKernel>(), device);
}

/// Makes sure that blocks of kKernel may have so much dynamic shared memory. Throws LaunchError where they cannot.
template <auto kKernel>
void allow_shared_memory(const char* name, int device, size_t dynamic_shared_bytes) {
    static AllowedSharedMemory shared_memory;
    shared_memory.require(name, platform::kernel_entry<kKernel>(), device, dynamic_shared_bytes);
}

/// How many clusters of kKernel the device holds at once.
template <auto kKernel>
int64_t active_clusters(const char* name, int device, dim3 block, size_t dynamic_shared_bytes,
                        unsigned cluster_blocks) {
    static ActiveClusters counts;
    allow_shared_memory<kKernel>(name, device, dynamic_shared_bytes);
    const platform::KernelEntry entry = platform::kernel_entry<kKernel>();
    return counts.of(name, entry, block, dynamic_shared_bytes, cluster_blocks, device);
}

/// Queues one launch of kKernel in clusters of `cluster_blocks` along x. Throws LaunchError if the runtime refuses.
template <auto kKernel, class Params = decltype(parameters_of(kKernel))>
void launch(const char* name, dim3 grid, dim3 block, size_t dynamic_shared_bytes, Stream& stream,
            const std::type_identity_t<Params>& params, unsigned cluster_blocks = 1) {
    static PreferredCarveout carveout;
    const platform::KernelEntry entry = platform::kernel_entry<kKernel>();
    const int device = platform::current_device(name);
    allow_shared_memory<kKernel>(name, device, dynamic_shared_bytes);
    carveout.ask(name, entry, device);
    const bool may_begin_early = stream.follows_own_launch() && is_on(Switch::kEarlyLaunch);
    const bool begins_early = may_begin_early && has_later_code<kKernel>(name, device);
    platform::launch_kernel(name, entry, grid, block, dynamic_shared_bytes, cluster_blocks, stream.handle(),
                            begins_early, &params);
}

}  // namespace kvc

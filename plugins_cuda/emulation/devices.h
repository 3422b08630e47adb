// The GPUs whose limits the emulation can enforce. Source: CUDA C++ Programming Guide, "Technical
// Specifications per Compute Capability"; multiprocessors are those of an A100, an H100 SXM and a B200.
#pragma once

#include "emulation/launch.h"

#include <array>
#include <cstddef>

namespace kvc::emulation {

struct Device {
    const char* architecture;  // the target of nvcc
    size_t shared_bytes;       // of a block, static and dynamic together, where its kernel was allowed more than 48 KiB
    bool early_launches;       // true where a launch may begin before the one before it has ended
    int multiprocessors;
    unsigned cluster_blocks;  // the most blocks of a cluster, on every such GPU; 1 where there are no clusters
    int groups;               // of multiprocessors, about equal in size; a cluster lies in one
};

inline constexpr std::array<Device, 3> kDevices = {{{"sm_80", 163 * 1024, false, 108, 1, 7},
                                                    {"sm_90a", 227 * 1024, true, 132, 8, 8},
                                                    {"sm_100", 227 * 1024, true, 148, 8, 8}}};

// The same on all three devices.
inline constexpr size_t kSharedByDefault = 48 * 1024;  // of a block whose kernel was not allowed more
inline constexpr size_t kMostShared = 227 * 1024;      // of a block, on any of them
inline constexpr int kBlockRegisters = 64 * 1024;

// One launch, as a device sees it.
struct Launch {
    const char* name;
    const Kernel* kernel;
    int device;
    dim3 grid;
    dim3 block;
    size_t dynamic_shared_bytes;
    unsigned cluster_blocks;  // 1 without clusters
    bool begins_early;
};

// The most shared memory of the launch's blocks, in bytes.
struct SharedLimits {
    size_t static_bytes;  // as nvcc counts them; for a test's kernel, the most that nvcc would accept
    size_t bytes;         // static and dynamic together
};

// True if the kernel has asked for as much shared memory as a multiprocessor of the device can have.
bool prefers_shared_memory(const Kernel* kernel, int device);

// The clusters that every device holds from now on, instead of what follows from its size; 0 undoes it.
void set_active_clusters(int64_t count);

// The next `count` questions for active clusters and requests for shared memory fail, as where a driver reports an error.
void refuse_queries(int64_t count);

// Throws LaunchError where a device refuses the launch.
SharedLimits check_launch(const Launch& launch);

}  // namespace kvc::emulation

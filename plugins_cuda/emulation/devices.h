// The GPUs whose limits the emulation can hold, and what they refuse. Source: CUDA C++ Programming Guide, "Technical
// Specifications per Compute Capability".
#pragma once

#include "emulation/launch.h"

#include <array>
#include <cstddef>

namespace kvc::emulation {

struct Device {
    const char* architecture;  // what nvcc compiles for
    size_t shared_bytes;       // of a block, static and dynamic together, where its kernel was allowed more than 48 KiB
    bool early_launches;       // whether a launch may begin before the one before it has ended
};

inline constexpr std::array<Device, 3> kDevices = {
    {{"sm_80", 163 * 1024, false}, {"sm_90a", 227 * 1024, true}, {"sm_100", 227 * 1024, true}}};

// The same on all of them.
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
    bool begins_early;
};

// What the blocks of a launch may have, in bytes.
struct SharedLimits {
    size_t static_bytes;  // as nvcc has counted them; of a test's kernel, what nvcc would accept
    size_t bytes;         // static and dynamic together
};

// Throws LaunchError where a device refuses the launch.
SharedLimits check_launch(const Launch& launch);

}  // namespace kvc::emulation

#include "emulation/devices.h"

#include "emulation/kernel_resources.h"

#include <map>
#include <mutex>
#include <string>
#include <utility>

namespace kvc::emulation {
namespace {

// What kernels were allowed and have asked for, by kernel and device.
struct Allowed {
    std::mutex mutex;
    std::map<std::pair<const Kernel*, int>, size_t> bytes;  // dynamic shared memory
    std::map<std::pair<const Kernel*, int>, bool> most_shared;
    int64_t active_clusters = 0;
    int64_t refused_queries = 0;  // of those that come next
};

Allowed& allowed() {
    static Allowed instance;
    return instance;
}

[[noreturn]] void refuse(const char* kernel, const std::string& what) {
    throw LaunchError(std::string("kernel ") + kernel + ": " + what);
}

void check_sizes(const Launch& launch) {
    const dim3 grid = launch.grid, block = launch.block;
    const uint64_t threads = uint64_t{block.x} * block.y * block.z;
    if (threads == 0 || threads > kMaxThreads || block.z > 64) {
        refuse(launch.name, "a block of " + std::to_string(threads) + " threads, allowed are 1 to 1024");
    }
    if (grid.x == 0 || grid.y == 0 || grid.z == 0) refuse(launch.name, "an empty grid");
    if (grid.x > 0x7fffffffu || grid.y > 65535 || grid.z > 65535) {
        refuse(launch.name, "a grid beyond (2147483647, 65535, 65535)");
    }
}

void check_cluster(const Launch& launch) {
    const Device& device = kDevices[launch.device];
    const std::string blocks = "clusters of " + std::to_string(launch.cluster_blocks) + " blocks";
    if (launch.cluster_blocks == 0) refuse(launch.name, "empty clusters");
    if (launch.cluster_blocks > 1 && device.cluster_blocks == 1) {
        refuse(launch.name, blocks + " on " + device.architecture + ", which has none");
    }
    if (launch.cluster_blocks > device.cluster_blocks) {
        refuse(launch.name, blocks + ", allowed are " + std::to_string(device.cluster_blocks));
    }
    if (launch.grid.x % launch.cluster_blocks != 0) {
        refuse(launch.name, "a grid of " + std::to_string(launch.grid.x) + " blocks along x in " + blocks);
    }
}

// A warp gets registers for its threads in units of 256, and warps come in fours, one for each part of the processor.
void check_registers(const Launch& launch, int registers) {
    const auto round_up = [](int value, int unit) { return (value + unit - 1) / unit * unit; };
    const auto threads = static_cast<int>(launch.block.x * launch.block.y * launch.block.z);
    const int warps = round_up((threads + kWarpSize - 1) / kWarpSize, 4);
    if (warps * round_up(registers * kWarpSize, 256) > kBlockRegisters) {
        refuse(launch.name, std::to_string(threads) + " threads of " + std::to_string(registers) + " registers on " +
                                kDevices[launch.device].architecture + ", a block has " +
                                std::to_string(kBlockRegisters));
    }
}

// The caller holds the mutex.
void answer_query(const char* kernel) {
    if (allowed().refused_queries == 0) return;
    --allowed().refused_queries;
    refuse(kernel, "this query was to be refused");
}

size_t allowed_dynamic_bytes(const Launch& launch, size_t static_bytes) {
    const std::lock_guard lock(allowed().mutex);
    const auto found = allowed().bytes.find({launch.kernel, launch.device});
    return found == allowed().bytes.end() ? kSharedByDefault - static_bytes : found->second;
}

}  // namespace

bool prefers_shared_memory(const Kernel* kernel, int device) {
    const std::lock_guard lock(allowed().mutex);
    const auto found = allowed().most_shared.find({kernel, device});
    return found != allowed().most_shared.end() && found->second;
}

void set_active_clusters(int64_t count) {
    const std::lock_guard lock(allowed().mutex);
    allowed().active_clusters = count;
}

void refuse_queries(int64_t count) {
    const std::lock_guard lock(allowed().mutex);
    allowed().refused_queries = count;
}

SharedLimits check_launch(const Launch& launch) {
    check_sizes(launch);
    check_cluster(launch);
    if (launch.begins_early && !kDevices[launch.device].early_launches) {
        refuse(launch.name, std::string("a launch that begins early, on ") + kDevices[launch.device].architecture);
    }
    const auto resources = resources_of(*launch.kernel, launch.device);
    if (resources) check_registers(launch, resources->registers);
    const size_t static_bytes = resources ? resources->static_shared_bytes : 0;
    const size_t most = allowed_dynamic_bytes(launch, static_bytes);
    if (launch.dynamic_shared_bytes > most) {
        refuse(launch.name, std::to_string(launch.dynamic_shared_bytes) + " bytes of dynamic shared memory beside " +
                                std::to_string(static_bytes) + " of static on " + kDevices[launch.device].architecture +
                                ", allowed are " + std::to_string(most));
    }
    return {resources ? static_bytes : kSharedByDefault, static_bytes + most};
}

}  // namespace kvc::emulation

namespace kvc::platform {

using emulation::kDevices;

SharedMemorySizes shared_memory_of(const char*, KernelEntry entry, int device) {
    const auto resources = emulation::resources_of(*entry, device);
    return {resources ? resources->static_shared_bytes : 0, kDevices[device].shared_bytes};
}

int multiprocessors_of(const char*, int device) { return kDevices[device].multiprocessors; }

bool waits_for_previous_launch(const char*, KernelEntry, int device) { return kDevices[device].early_launches; }

// One block on a multiprocessor: how many more there is room for depends on registers too.
int64_t active_clusters(const char* kernel, KernelEntry, dim3, size_t, unsigned cluster_blocks, int device) {
    const std::lock_guard lock(emulation::allowed().mutex);
    emulation::answer_query(kernel);
    if (emulation::allowed().active_clusters != 0) return emulation::allowed().active_clusters;
    const int of_group = kDevices[device].multiprocessors / kDevices[device].groups;
    return int64_t{of_group / static_cast<int>(cluster_blocks)} * kDevices[device].groups;
}

void prefer_shared_memory(const char* kernel, KernelEntry entry, bool most) {
    const int device = current_device(kernel);
    const std::lock_guard lock(emulation::allowed().mutex);
    emulation::answer_query(kernel);
    emulation::allowed().most_shared[{entry, device}] = most;
}

void allow_dynamic_shared(const char* kernel, KernelEntry entry, size_t bytes) {
    const int device = current_device(kernel);
    const SharedMemorySizes sizes = shared_memory_of(kernel, entry, device);
    if (sizes.static_bytes + bytes > sizes.most_bytes) {
        emulation::refuse(kernel, std::to_string(bytes) + " bytes of dynamic shared memory asked for beside " +
                                      std::to_string(sizes.static_bytes) + " of static, a block has " +
                                      std::to_string(sizes.most_bytes));
    }
    const std::lock_guard lock(emulation::allowed().mutex);
    emulation::allowed().bytes[{entry, device}] = bytes;
}

}  // namespace kvc::platform

#include "emulation/launch.h"

#include "emulation/cluster.h"
#include "emulation/devices.h"
#include "emulation/emulation.h"
#include "emulation/kernel_resources.h"

#include <algorithm>
#include <cstdio>
#include <mutex>
#include <numeric>
#include <string_view>

namespace kvc::emulation {
namespace {

constexpr uint64_t kMaxRecords = 1 << 16;  // see emulation.h

struct Executor {
    std::mutex mutex;
    int device = 0;
    bool checks_only = false;
    Cluster cluster;
    Schedule schedule;
    std::vector<KvcEmulationLaunch> records;
    std::vector<uint64_t> cluster_order;
};

Executor& executor() {
    static Executor instance;
    return instance;
}

void order_clusters(std::vector<uint64_t>& clusters, uint64_t count, Schedule& schedule) {
    clusters.resize(count);
    std::iota(clusters.begin(), clusters.end(), uint64_t{0});
    if (schedule.order == Order::kReverse) std::reverse(clusters.begin(), clusters.end());
    if (schedule.order != Order::kShuffled) return;
    for (uint64_t left = count; left > 1; --left) std::swap(clusters[left - 1], clusters[schedule.random.below(left)]);
}

KvcEmulationLaunch& begin_record(Executor& all, const Launch& launch) {
    if (all.records.size() >= kMaxRecords) all.records.clear();
    KvcEmulationLaunch& record = all.records.emplace_back();
    std::snprintf(record.name, sizeof record.name, "%s", launch.name);
    std::copy_n(&launch.grid.x, 3, record.grid);
    std::copy_n(&launch.block.x, 3, record.block);
    record.dynamic_shared_bytes = launch.dynamic_shared_bytes;
    record.begins_early = launch.begins_early;
    record.cluster_blocks = launch.cluster_blocks;
    record.prefers_shared_memory = prefers_shared_memory(launch.kernel, launch.device);
    if (const auto resources = resources_of(*launch.kernel, launch.device)) {
        record.static_shared_bytes = resources->static_shared_bytes;
        record.registers = static_cast<uint32_t>(resources->registers);
    }
    return record;
}

template <class Record>
int64_t copy_out(const std::vector<Record>& all, Record* records, int64_t capacity) {
    const auto count = static_cast<int64_t>(all.size());
    if (records != nullptr) std::copy_n(all.begin(), std::min(count, std::max<int64_t>(capacity, 0)), records);
    return count;
}

void run_clusters(Executor& all, const Launch& launch, const SharedLimits& limits, Body body) {
    const dim3 grid = launch.grid;
    gridDim = grid;
    blockDim = launch.block;
    all.cluster.begin_launch(launch, limits, body, all.schedule);
    order_clusters(all.cluster_order, uint64_t{grid.x} * grid.y * grid.z / launch.cluster_blocks, all.schedule);
    for (const uint64_t cluster : all.cluster_order) {
        const uint64_t number = cluster * launch.cluster_blocks;  // of its first block
        const auto x = static_cast<unsigned>(number % grid.x);
        const auto y = static_cast<unsigned>(number / grid.x % grid.y);
        const auto z = static_cast<unsigned>(number / grid.x / grid.y);
        all.cluster.run({x, y, z});
    }
}

}  // namespace
}  // namespace kvc::emulation

using namespace kvc::emulation;

int kvc::platform::current_device(const char*) {
    const std::lock_guard lock(executor().mutex);
    return executor().device;
}

void kvc::platform::launch_kernel(const char* kernel, KernelEntry entry, dim3 grid, dim3 block,
                                  size_t dynamic_shared_bytes, unsigned cluster_blocks, cudaStream_t, bool begins_early,
                                  const void* params) {
    Executor& all = executor();
    const std::lock_guard lock(all.mutex);
    const Launch launch{kernel, entry, all.device, grid, block, dynamic_shared_bytes, cluster_blocks, begins_early};
    const SharedLimits limits = check_launch(launch);
    KvcEmulationLaunch& record = begin_record(all, launch);
    if (all.checks_only) return;
    run_clusters(all, launch, limits, {entry->call, params, entry->params_bytes});
    const Collectives collectives = all.cluster.collectives();
    record.static_shared_bytes = std::max<uint64_t>(record.static_shared_bytes, all.cluster.most_static_bytes());
    record.switches = all.cluster.switches();
    record.products = collectives.products;
    record.exchanges = collectives.exchanges;
    record.barriers = collectives.barriers;
    record.cluster_barriers = collectives.cluster_barriers;
}

KvcStatus kvc_emulation_set_schedule(int32_t order, uint64_t seed) {
    if (order < KVC_EMULATION_FORWARD || order > KVC_EMULATION_SHUFFLED) return KVC_INVALID_PARAMETER;
    const std::lock_guard lock(executor().mutex);
    executor().schedule = {static_cast<Order>(order), Random(seed)};
    return KVC_OK;
}

KvcStatus kvc_emulation_set_device(const char* architecture) {
    const auto found = std::find_if(kDevices.begin(), kDevices.end(), [architecture](const Device& device) {
        return std::string_view(device.architecture) == architecture;
    });
    if (found == kDevices.end()) return KVC_INVALID_PARAMETER;
    const std::lock_guard lock(executor().mutex);
    executor().device = static_cast<int>(found - kDevices.begin());
    return KVC_OK;
}

void kvc_emulation_set_active_clusters(int64_t count) { set_active_clusters(count); }

void kvc_emulation_refuse_queries(int64_t count) { refuse_queries(count); }

void kvc_emulation_set_checks_only(int32_t checks_only) {
    const std::lock_guard lock(executor().mutex);
    executor().checks_only = checks_only != 0;
}

int64_t kvc_emulation_launches(KvcEmulationLaunch* records, int64_t capacity) {
    const std::lock_guard lock(executor().mutex);
    return copy_out(executor().records, records, capacity);
}

void kvc_emulation_clear_launches(void) {
    const std::lock_guard lock(executor().mutex);
    executor().records.clear();
    executor().cluster.executions().clear();
}

int64_t kvc_emulation_executions(KvcEmulationExecutions* records, int64_t capacity) {
    const std::lock_guard lock(executor().mutex);
    return copy_out(executor().cluster.executions().records(), records, capacity);
}

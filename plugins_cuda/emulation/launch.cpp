#include "emulation/launch.h"

#include "emulation/emulation.h"
#include "kernels/platform.cuh"

#include <algorithm>
#include <cstdio>
#include <mutex>
#include <numeric>

namespace kvc::emulation {
namespace {

constexpr uint64_t kMaxRecords = 1 << 16;  // see emulation.h

struct Executor {
    std::mutex mutex;
    Block block;
    Schedule schedule;
    std::vector<KvcEmulationLaunch> records;
    std::vector<uint64_t> block_order;
};

Executor& executor() {
    static Executor instance;
    return instance;
}

void check_limits(const char* name, dim3 grid, dim3 block, size_t dynamic_shared_bytes) {
    const auto refuse = [name](const std::string& what) {
        throw LaunchError(std::string("kernel ") + name + ": " + what);
    };
    const uint64_t threads = uint64_t{block.x} * block.y * block.z;
    if (threads == 0 || threads > kMaxThreads || block.z > 64) {
        refuse("a block of " + std::to_string(threads) + " threads, allowed are 1 to 1024");
    }
    if (grid.x == 0 || grid.y == 0 || grid.z == 0) refuse("an empty grid");
    if (grid.x > 0x7fffffffu || grid.y > 65535 || grid.z > 65535) refuse("a grid beyond (2147483647, 65535, 65535)");
    if (dynamic_shared_bytes > kSharedLimit) {
        refuse(std::to_string(dynamic_shared_bytes) + " bytes of dynamic shared memory, allowed are " +
               std::to_string(kSharedLimit));
    }
}

void order_blocks(std::vector<uint64_t>& blocks, uint64_t count, Schedule& schedule) {
    blocks.resize(count);
    std::iota(blocks.begin(), blocks.end(), uint64_t{0});
    if (schedule.order == Order::kReverse) std::reverse(blocks.begin(), blocks.end());
    if (schedule.order != Order::kShuffled) return;
    for (uint64_t left = count; left > 1; --left) std::swap(blocks[left - 1], blocks[schedule.random.below(left)]);
}

KvcEmulationLaunch& begin_record(Executor& all, const char* name, dim3 grid, dim3 block, size_t dynamic_bytes) {
    if (all.records.size() >= kMaxRecords) all.records.clear();
    KvcEmulationLaunch& record = all.records.emplace_back();
    std::snprintf(record.name, sizeof record.name, "%s", name);
    std::copy_n(&grid.x, 3, record.grid);
    std::copy_n(&block.x, 3, record.block);
    record.dynamic_shared_bytes = dynamic_bytes;
    return record;
}

}  // namespace

void run_launch(const char* name, dim3 grid, dim3 block, size_t dynamic_shared_bytes, Body body) {
    check_limits(name, grid, block, dynamic_shared_bytes);
    Executor& all = executor();
    const std::lock_guard lock(all.mutex);
    KvcEmulationLaunch& record = begin_record(all, name, grid, block, dynamic_shared_bytes);
    current_block = &all.block;
    all.block.begin_launch(name, grid, block, dynamic_shared_bytes, body, all.schedule);
    order_blocks(all.block_order, uint64_t{grid.x} * grid.y * grid.z, all.schedule);
    for (const uint64_t number : all.block_order) {
        const auto x = static_cast<unsigned>(number % grid.x);
        const auto y = static_cast<unsigned>(number / grid.x % grid.y);
        const auto z = static_cast<unsigned>(number / grid.x / grid.y);
        all.block.run({x, y, z});
    }
    record.static_shared_bytes = all.block.shared().most_static_bytes();
    record.switches = all.block.switches();
}

}  // namespace kvc::emulation

using namespace kvc::emulation;

KvcStatus kvc_emulation_set_schedule(int32_t order, uint64_t seed) {
    if (order < KVC_EMULATION_FORWARD || order > KVC_EMULATION_SHUFFLED) return KVC_INVALID_PARAMETER;
    const std::lock_guard lock(executor().mutex);
    executor().schedule = {static_cast<Order>(order), Random(seed)};
    return KVC_OK;
}

int64_t kvc_emulation_launches(KvcEmulationLaunch* records, int64_t capacity) {
    const std::lock_guard lock(executor().mutex);
    const auto& all = executor().records;
    const auto count = static_cast<int64_t>(all.size());
    if (records != nullptr) std::copy_n(all.begin(), std::min(count, std::max<int64_t>(capacity, 0)), records);
    return count;
}

void kvc_emulation_clear_launches(void) {
    const std::lock_guard lock(executor().mutex);
    executor().records.clear();
}

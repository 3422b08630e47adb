// The reports of a block about a kernel's mistake: the thread, where the others wait, and who is missing.
#include "emulation/block.h"
#include "emulation/cluster.h"
#include "kernels/platform.cuh"

#include <algorithm>
#include <bit>
#include <cstdio>
#include <cstring>

namespace kvc::emulation {
namespace {

std::string text(uint3 index) {
    char buffer[48];
    std::snprintf(buffer, sizeof buffer, "(%u,%u,%u)", index.x, index.y, index.z);
    return buffer;
}

std::string text(Site site) {
    const char* slash = std::strrchr(site.file_name(), '/');
    return std::string(slash ? slash + 1 : site.file_name()) + ":" + std::to_string(site.line());
}

}  // namespace

void Block::fail(const std::string& what) const { throw LaunchError(place_of(*running_) + ": " + what); }

std::string Block::place_of(const Thread& thread) const { return place() + " thread " + text(thread.index); }

std::string Block::place() const { return std::string("kernel ") + kernel_ + " block " + text(index_); }

std::string Block::describe(const Thread& thread) const {
    const std::string name = "thread " + text(thread.index);
    if (thread.state == Thread::State::kExited) return name + " has exited";
    char mask[32] = "";
    if (thread.operation != nullptr) {
        std::snprintf(mask, sizeof mask, "(mask %08x)", thread.mask);
    }
    return name + " is at " + thread.waits_for + mask + " (" + text(thread.site) + ")";
}

std::string Block::explain_deadlock() const {
    for (int i = 0; i < size_; ++i) {
        if (threads_[i]->state == Thread::State::kAtWarpOperation) return explain_missing_lane(*threads_[i]);
    }
    if (at_barrier_ == 0) return "";
    for (int i = 0; i < size_; ++i) {
        const Thread::State state = threads_[i]->state;
        if (state == Thread::State::kAtBarrier) continue;
        const auto same = [&](const auto& thread) { return thread->state == state; };
        const auto others = std::count_if(threads_.begin(), threads_.begin() + size_, same) - 1;
        return "divergent barrier: " + describe(*first_at_barrier_) + " with " + std::to_string(at_barrier_ - 1) +
               " others, " + describe(*threads_[i]) + " with " + std::to_string(others) + " others";
    }
    return "divergent barrier";  // unreachable: a barrier with everybody at it is complete
}

std::string Block::explain_missing_lane(const Thread& waiting) const {
    const int first = waiting.number / kWarpSize * kWarpSize;
    for (uint32_t left = waiting.mask; left != 0; left &= left - 1) {
        const int number = first + std::countr_zero(left);
        const std::string lane = "lane " + std::to_string(number - first);
        if (number >= size_) return describe(waiting) + ", whose " + lane + " does not exist";
        const Thread& other = *threads_[number];
        if (other.state != Thread::State::kAtWarpOperation || other.mask != waiting.mask ||
            other.operation != waiting.operation) {
            return "lane missing: " + describe(waiting) + ", but " + lane + ", " + describe(other);
        }
    }
    return describe(waiting);  // unreachable: an operation with everybody at it is complete
}

std::string Block::explain_race(const RaceDetector::Race& race) const {
    const auto text_of = [&](const RaceDetector::Access& access) {
        constexpr const char* kKinds[] = {"read", "written", "changed by an atomic"};
        std::string what = std::string(kKinds[static_cast<int>(access.kind)]) + " by ";
        const Block* const block = cluster_.block_of(access.block);
        if (block == nullptr) {
            return what + "thread number " + std::to_string(access.thread) + " of block number " +
                   std::to_string(access.block);
        }
        const Thread& thread = *block->threads_[access.thread];
        what += "thread " + text(thread.index);
        if (block != this) what += " of block " + text(block->index_);
        if (*thread.waits_for == '\0') return what;
        const bool parked = thread.state != Thread::State::kReady && thread.state != Thread::State::kExited;
        return what + (parked ? " before " : " past ") + thread.waits_for + " (" + text(thread.site) + ")";
    };
    std::string where = "global memory";
    if (const Block* const owner = cluster_.owner_of(race.address, 1)) {
        where = owner->shared_.describe(race.address);
        if (owner != this) where += " of block " + text(owner->index_);
    }
    return "race on " + where + ": " + text_of(race.past) + ", then " + text_of(race.present);
}

}  // namespace kvc::emulation

#include "emulation/builtins.h"

#include <string>

namespace kvc::emulation {
namespace {

Exchange& at(const Lanes& operands, int lane) { return *static_cast<Exchange*>(operands[lane]); }

}  // namespace

void check_alignment(const void* address, size_t bytes) {
    const size_t alignment = bytes >= 16 ? 16 : bytes;
    if ((reinterpret_cast<uintptr_t>(address) & (alignment - 1)) == 0) return;
    current_block->fail("misaligned " + std::to_string(bytes) + "-byte access, " +
                        std::to_string(reinterpret_cast<uintptr_t>(address) % alignment) +
                        " bytes past a multiple of " + std::to_string(alignment));
}

void note_atomic(const void* address, size_t bytes) {
    current_block->require_wait(address, bytes);
    current_block->note_access(address, bytes, RaceDetector::Kind::kAtomic);
}

void exchange(const Lanes& operands) {
    for (int lane = 0; lane < kWarpSize; ++lane) {
        if (operands[lane] == nullptr) continue;
        const int source = at(operands, lane).source;
        if (operands[source] == nullptr) {
            current_block->fail("shuffle: lane " + std::to_string(lane) + " reads lane " + std::to_string(source) +
                                ", which is not in the mask");
        }
        at(operands, lane).result = at(operands, source).value;
    }
}

void ballot(const Lanes& operands) {
    uint32_t votes = 0;
    for (int lane = 0; lane < kWarpSize; ++lane) {
        if (operands[lane] != nullptr && at(operands, lane).value != 0) votes |= 1u << lane;
    }
    for (int lane = 0; lane < kWarpSize; ++lane) {
        if (operands[lane] != nullptr) at(operands, lane).result = votes;
    }
}

void match_any(const Lanes& operands) {
    for (int lane = 0; lane < kWarpSize; ++lane) {
        if (operands[lane] == nullptr) continue;
        uint32_t equal = 0;
        for (int other = 0; other < kWarpSize; ++other) {
            if (operands[other] != nullptr && at(operands, other).value == at(operands, lane).value)
                equal |= 1u << other;
        }
        at(operands, lane).result = equal;
    }
}

void synchronize(const Lanes&) {}

uint64_t shuffle_bits(const char* name, uint32_t mask, uint64_t value, int source, Site site) {
    Exchange mine{value, 0, source};
    current_block->warp_operation(name, mask, exchange, &mine, site);
    return mine.result;
}

uint32_t vote(const char* name, uint32_t mask, WarpOperation operation, uint64_t value, Site site) {
    Exchange mine{value, 0, 0};
    current_block->warp_operation(name, mask, operation, &mine, site);
    return static_cast<uint32_t>(mine.result);
}

}  // namespace kvc::emulation

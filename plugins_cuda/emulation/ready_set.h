// The threads of a block that can run, as one bit each, and the choice of the next one.
#pragma once

#include "kernels/warp.cuh"

#include <bit>
#include <cstdint>

namespace kvc::emulation {

inline constexpr int kMaxThreads = 1024;  // per block, as on every device

enum class Order : int32_t { kForward = 0, kReverse = 1, kShuffled = 2 };

// SplitMix64: seeds of any quality, the same sequence on every machine.
class Random {
public:
    explicit Random(uint64_t seed = 0) : state_(seed) {}
    uint64_t next() {
        uint64_t z = (state_ += 0x9e3779b97f4a7c15ULL);
        z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ULL;
        z = (z ^ (z >> 27)) * 0x94d049bb133111ebULL;
        return z ^ (z >> 31);
    }
    uint64_t below(uint64_t bound) { return next() % bound; }

private:
    uint64_t state_;
};

class ReadySet {
public:
    void add(int thread) {
        lanes_[thread / kWarpSize] |= 1u << (thread % kWarpSize);
        warps_ |= 1u << (thread / kWarpSize);
    }

    void clear() {
        for (uint32_t& lanes : lanes_) lanes = 0;
        warps_ = 0;
    }

    bool empty() const { return warps_ == 0; }

    // Removes and returns a thread of a set that is not empty. Lowest or highest first lets a warp run as far ahead of
    // the others as the barriers allow.
    int take(Order order, Random& random) {
        const int warp = choose(warps_, order, random);
        const int lane = choose(lanes_[warp], order, random);
        lanes_[warp] &= ~(1u << lane);
        if (lanes_[warp] == 0) warps_ &= ~(1u << warp);
        return warp * kWarpSize + lane;
    }

    // One of the bits that are set.
    static int choose(uint32_t bits, Order order, Random& random) {
        if (order == Order::kForward) return std::countr_zero(bits) & 31;
        if (order == Order::kReverse) return ~std::countl_zero(bits) & 31;
        for (auto skip = random.below(static_cast<uint64_t>(std::popcount(bits))); skip > 0; --skip) bits &= bits - 1;
        return std::countr_zero(bits) & 31;
    }

private:
    uint32_t lanes_[kMaxThreads / kWarpSize] = {};
    uint32_t warps_ = 0;
};

}  // namespace kvc::emulation

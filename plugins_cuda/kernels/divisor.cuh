// Division by a number that only the host knows before the launch: a division on the device takes the time of four loads
// from shared memory, a product the time of an addition.
//
// Source: Granlund and Montgomery, "Division by Invariant Integers using Multiplication" (1994): with 2^(l-1) < d <= 2^l
// and m = ceil(2^(31+l) / d), the quotient of n < 2^31 is n m / 2^(31+l), rounded down.
#pragma once

#include <bit>
#include <cstdint>

#include "kernels/platform.cuh"

namespace kvc {

struct Divisor {
    uint32_t multiplier;  // m
    int32_t shift;        // l

    // The divisor is positive.
    static constexpr Divisor of(int32_t divisor) {
        const auto number = static_cast<uint32_t>(divisor);
        const int shift = std::bit_width(number - 1);
        const uint64_t power = uint64_t{1} << (31 + shift);
        return {static_cast<uint32_t>((power + number - 1) / number), shift};
    }

    // Of a number >= 0.
    __host__ __device__ __forceinline__ constexpr int quotient(int number) const {
        const uint64_t product = uint64_t{2 * static_cast<uint32_t>(number)} * multiplier;
        return static_cast<int>(static_cast<uint32_t>(product >> 32) >> shift);
    }
};

constexpr bool quotients_are_exact(int32_t divisor) {
    constexpr int32_t kLargest = 0x7fffffff;
    const int32_t multiple = kLargest / divisor * divisor;  // the largest
    for (const int32_t number : {0, divisor - 1, divisor, multiple - 1, multiple, kLargest}) {
        if (Divisor::of(divisor).quotient(number) != number / divisor) return false;
    }
    return true;
}
static_assert(quotients_are_exact(1) && quotients_are_exact(2) && quotients_are_exact(3) && quotients_are_exact(16) &&
              quotients_are_exact(641) && quotients_are_exact((1 << 30) + 1) && quotients_are_exact(0x7fffffff));

}  // namespace kvc

// kernels/ptx.cuh for the host: mma.sync and ldmatrix with the register layout of the PTX manual, prmt, and cp.async. The
// wait that covers a copy performs it, and nothing does so earlier, so that a missing wait shows. Launches run one after
// another; a thread that did not wait for the launch before is reported (Block::note_access, Block::thread_main).
#pragma once

#include "emulation/numeric_types.h"

#include <cstdint>

namespace kvc::platform {

using emulation::Site;

// Two of eight bytes as numbers of 16 bits in two's complement.
inline uint32_t extend_bytes(uint32_t low, uint32_t high, int one, int other) {
    const uint64_t bytes = uint64_t{high} << 32 | low;
    const auto extended = [&](int byte) { return static_cast<uint16_t>(static_cast<int8_t>(bytes >> 8 * byte)); };
    return extended(one) | uint32_t{extended(other)} << 16;
}

// Four E4M3 codes as fp16; a NaN (0x7f, 0xff) is the device's.
inline constexpr bool kConvertsE4m3 = true;
inline uint2 convert_e4m3(uint32_t codes) {
    const auto converted = [&](int number) {
        const uint32_t code = codes >> 8 * number & 0xffu;
        half_t half;
        narrow(std::bit_cast<float>((code & 0x7fu) << 20) * 0x1p120f, half);
        const uint32_t magnitude = (code & 0x7fu) == 0x7fu ? 0x7fffu : half.bits;
        return magnitude | (code & 0x80u) << 8;
    };
    return {converted(0) | converted(1) << 16, converted(2) | converted(3) << 16};
}

// c += A B, A 16 x 16 and B 16 x 8, sums in fp32 by ascending k.
void mma_m16n8k16(half_t, float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]);
void mma_m16n8k16(bfloat16_t, float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]);

inline void start_next_launch() {}
void wait_for_previous_launch();

// Registers 2t, 2t+1 of column `group` of four 8 x 8 matrices; lane 8 m + i gives row i of matrix m.
void load_matrices_transposed(uint32_t (&to)[4], const void* row);

// Reads the bytes, so that an invalid address shows.
void prefetch_to_l2(const void* from, uint32_t bytes);

void copy_async(void* to, const void* from, size_t bytes);
inline void copy_async_16(void* to, const void* from) { copy_async(to, from, 16); }
template <int kBytes>
void copy_async_few(void* to, const void* from) {
    static_assert(kBytes == 4 || kBytes == 8);
    copy_async(to, from, kBytes);
}
void copy_async_commit();
void copy_async_wait_for(int pending);

template <int kPending>
void copy_async_wait() {
    copy_async_wait_for(kPending);
}

}  // namespace kvc::platform

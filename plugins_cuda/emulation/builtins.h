// CUDA's keywords and built-in functions for the host. Collective ones park the calling thread (emulation/block.h).
#pragma once

#include "emulation/block.h"
#include "emulation/vector_types.h"

#include <math.h>

#include <bit>
#include <cstdint>
#include <cstring>
#include <type_traits>

#define __global__
#define __device__
#define __host__
#ifndef __forceinline__  // mutants and the sanitised library are compiled with plain `inline`, which is much faster
#define __forceinline__ inline __attribute__((always_inline))
#endif
#define __launch_bounds__(...)

namespace kvc::emulation {

// One lane's part in a shuffle or a vote.
struct Exchange {
    uint64_t value;
    uint64_t result;
    int source;  // lane read from; own lane where CUDA says that the value stays
};

void check_alignment(const void* address, size_t bytes);
void note_atomic(const void* address, size_t bytes);
void exchange(const Lanes& operands);
void ballot(const Lanes& operands);
void match_any(const Lanes& operands);

inline int lane() { return current_block->self().number % kWarpSize; }

uint64_t shuffle_bits(const char* name, uint32_t mask, uint64_t value, int source, Site site);
uint32_t vote(const char* name, uint32_t mask, WarpOperation operation, uint64_t value, Site site);

template <class T>
T shuffle(const char* name, uint32_t mask, T value, int source, Site site) {
    static_assert(std::is_trivially_copyable_v<T> && (sizeof(T) == 4 || sizeof(T) == 8 || sizeof(T) == 2));
    uint64_t bits = 0;
    std::memcpy(&bits, &value, sizeof value);
    bits = shuffle_bits(name, mask, bits, source, site);
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

}  // namespace kvc::emulation

inline void __syncthreads(kvc::emulation::Site site = kvc::emulation::Site::current()) {
    kvc::emulation::current_block->barrier("__syncthreads", false, site);
}
inline int __syncthreads_count(int predicate, kvc::emulation::Site site = kvc::emulation::Site::current()) {
    return kvc::emulation::current_block->barrier("__syncthreads_count", predicate != 0, site).count;
}
inline int __syncthreads_or(int predicate, kvc::emulation::Site site = kvc::emulation::Site::current()) {
    return kvc::emulation::current_block->barrier("__syncthreads_or", predicate != 0, site).count > 0;
}
inline int __syncthreads_and(int predicate, kvc::emulation::Site site = kvc::emulation::Site::current()) {
    const auto result = kvc::emulation::current_block->barrier("__syncthreads_and", predicate != 0, site);
    return result.count == result.threads;
}
inline void __syncwarp(unsigned mask = kvc::kFullWarp, kvc::emulation::Site site = kvc::emulation::Site::current()) {
    kvc::emulation::current_block->warp_operation("__syncwarp", mask, kvc::emulation::synchronize, nullptr, site);
}
inline void __threadfence() { kvc::emulation::current_block->fence(); }

template <class T>
T __shfl_sync(unsigned mask, T value, int source, int width = kvc::kWarpSize,
              kvc::emulation::Site site = kvc::emulation::Site::current()) {
    const int lane = kvc::emulation::lane();
    const int from = (lane & ~(width - 1)) | (source & (width - 1));
    return kvc::emulation::shuffle("__shfl_sync", mask, value, from, site);
}
template <class T>
T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = kvc::kWarpSize,
                 kvc::emulation::Site site = kvc::emulation::Site::current()) {
    const int lane = kvc::emulation::lane();
    const int from = lane - static_cast<int>(delta);
    const bool outside = from < (lane & ~(width - 1));
    return kvc::emulation::shuffle("__shfl_up_sync", mask, value, outside ? lane : from, site);
}
template <class T>
T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = kvc::kWarpSize,
                   kvc::emulation::Site site = kvc::emulation::Site::current()) {
    const int lane = kvc::emulation::lane();
    const int from = lane + static_cast<int>(delta);
    const bool outside = from > (lane | (width - 1));
    return kvc::emulation::shuffle("__shfl_down_sync", mask, value, outside ? lane : from, site);
}
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int bits, int width = kvc::kWarpSize,
                  kvc::emulation::Site site = kvc::emulation::Site::current()) {
    const int lane = kvc::emulation::lane();
    const int from = lane ^ bits;
    const bool outside = from > (lane | (width - 1));
    return kvc::emulation::shuffle("__shfl_xor_sync", mask, value, outside ? lane : from, site);
}

inline unsigned __ballot_sync(unsigned mask, int predicate,
                              kvc::emulation::Site site = kvc::emulation::Site::current()) {
    return kvc::emulation::vote("__ballot_sync", mask, kvc::emulation::ballot, predicate != 0, site);
}
inline int __any_sync(unsigned mask, int predicate, kvc::emulation::Site site = kvc::emulation::Site::current()) {
    return kvc::emulation::vote("__any_sync", mask, kvc::emulation::ballot, predicate != 0, site) != 0;
}
inline int __all_sync(unsigned mask, int predicate, kvc::emulation::Site site = kvc::emulation::Site::current()) {
    return kvc::emulation::vote("__all_sync", mask, kvc::emulation::ballot, predicate != 0, site) == mask;
}
template <class T>
unsigned __match_any_sync(unsigned mask, T value, kvc::emulation::Site site = kvc::emulation::Site::current()) {
    static_assert(sizeof(T) == 4 || sizeof(T) == 8);
    uint64_t bits = 0;
    std::memcpy(&bits, &value, sizeof value);
    return kvc::emulation::vote("__match_any_sync", mask, kvc::emulation::match_any, bits, site);
}
inline unsigned __activemask() = delete;  // its result is up to the scheduler: no kernel may depend on it

// Four of the eight bytes of `low` and `high`, by the lower three bits of the selector's four nibbles.
inline unsigned __byte_perm(unsigned low, unsigned high, unsigned selector) {
    const uint64_t bytes = uint64_t{high} << 32 | low;
    unsigned result = 0;
    for (int i = 0; i < 4; ++i) {
        result |= static_cast<unsigned>(bytes >> (selector >> 4 * i & 7) * 8 & 0xff) << 8 * i;
    }
    return result;
}
inline int __popc(unsigned x) { return std::popcount(x); }
inline int __clz(int x) { return std::countl_zero(static_cast<unsigned>(x)); }
inline int __ffs(int x) { return x == 0 ? 0 : std::countr_zero(static_cast<unsigned>(x)) + 1; }

// The emulation is compiled without contraction (CMakeLists.txt), so the product is rounded first.
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fdiv_rn(float a, float b) { return a / b; }

inline unsigned __float_as_uint(float x) { return std::bit_cast<unsigned>(x); }
inline float __uint_as_float(unsigned x) { return std::bit_cast<float>(x); }
inline int __float_as_int(float x) { return std::bit_cast<int>(x); }
inline float __int_as_float(int x) { return std::bit_cast<float>(x); }

// Integers only: a float sum would depend on the order of the threads. They run one at a time, so this is atomic.
#define KVC_ATOMIC(name, T, expression)                                         \
    __attribute__((no_sanitize("thread"))) inline T name(T* address, T value) { \
        kvc::emulation::note_atomic(address, sizeof(T));                        \
        const T old = *address;                                                 \
        *address = expression;                                                  \
        return old;                                                             \
    }
#define KVC_ATOMICS(T)                                    \
    KVC_ATOMIC(atomicAdd, T, static_cast<T>(old + value)) \
    KVC_ATOMIC(atomicMin, T, old < value ? old : value)   \
    KVC_ATOMIC(atomicMax, T, old > value ? old : value)   \
    KVC_ATOMIC(atomicOr, T, old | value)                  \
    KVC_ATOMIC(atomicExch, T, value)
KVC_ATOMICS(int)
KVC_ATOMICS(unsigned)
#undef KVC_ATOMICS
#undef KVC_ATOMIC

#define KVC_MIN_MAX(T)                                  \
    constexpr T min(T a, T b) { return b < a ? b : a; } \
    constexpr T max(T a, T b) { return a < b ? b : a; }
KVC_MIN_MAX(int)
KVC_MIN_MAX(unsigned)
KVC_MIN_MAX(long)
KVC_MIN_MAX(unsigned long)
KVC_MIN_MAX(long long)
KVC_MIN_MAX(unsigned long long)
#undef KVC_MIN_MAX
inline float min(float a, float b) { return fminf(a, b); }
inline float max(float a, float b) { return fmaxf(a, b); }

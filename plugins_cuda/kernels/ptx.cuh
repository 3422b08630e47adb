// The only PTX of the kernels: prmt, mma.sync, ldmatrix and cp.async (sm_80 and later), cvt of E4M3 (sm_89 and later),
// griddepcontrol, barrier.cluster, mapa, mbarrier, st.async and cp.async.bulk (sm_90 and later). emulation/ptx.h and emulation/cluster.h
// have the same functions for the host; kernels use most through kernels/mma.cuh, kernels/copy_async.cuh,
// kernels/dependent_launch.cuh, kernels/cluster.cuh and kernels/cluster_inbox.cuh.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cstdint>
#include <cstring>

namespace kvc::platform {

__device__ __forceinline__ uint32_t shared_address(const void* p) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

// Two of the eight bytes of `low` and `high`, by their numbers, as numbers of 16 bits in two's complement. (__byte_perm
// repeats no sign.)
__device__ __forceinline__ uint32_t extend_bytes(uint32_t low, uint32_t high, int one, int other) {
    uint32_t extended;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(extended) : "r"(low), "r"(high), "r"(one * 0x11 + other * 0x1100 + 0x8080));
    return extended;
}

// Four E4M3 codes as fp16, exactly, two in a register; false below sm_89, where the function is never called.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 890
inline constexpr bool kConvertsE4m3 = false;
#else
inline constexpr bool kConvertsE4m3 = true;
#endif
__device__ __forceinline__ uint2 convert_e4m3(uint32_t codes) {
    uint2 halves{};
#if __CUDA_ARCH__ >= 890
    asm("{.reg .b16 low, high; mov.b32 {low, high}, %2; cvt.rn.f16x2.e4m3x2 %0, low; cvt.rn.f16x2.e4m3x2 %1, high;}"
        : "=r"(halves.x), "=r"(halves.y)
        : "r"(codes));
#endif
    return halves;
}

__device__ __forceinline__ void mma_m16n8k16(__half, float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

__device__ __forceinline__ void mma_m16n8k16(__nv_bfloat16, float (&c)[4], const uint32_t (&a)[4],
                                             const uint32_t (&b)[2]) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

__device__ __forceinline__ void load_matrices_transposed(uint32_t (&to)[4], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(shared_address(row))
                 : "memory");
}

__device__ __forceinline__ void copy_async_16(void* to, const void* from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(to)), "l"(from) : "memory");
}
template <int kBytes>
__device__ __forceinline__ void copy_async_few(void* to, const void* from) {
    static_assert(kBytes == 4 || kBytes == 8, "cp.async.cg takes 16");
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(shared_address(to)), "l"(from), "n"(kBytes)
                 : "memory");
}
__device__ __forceinline__ void copy_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int kPending>
__device__ __forceinline__ void copy_async_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// Nothing on sm_80, where no launch begins early.
__device__ __forceinline__ void start_next_launch() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
__device__ __forceinline__ void wait_for_previous_launch() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Clusters of blocks; false on sm_80, where nothing below is ever called.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
inline constexpr bool kHasClusters = false;
#else
inline constexpr bool kHasClusters = true;
#endif
__device__ __forceinline__ void arrive_at_cluster_barrier() {
#if __CUDA_ARCH__ >= 900
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
#endif
}
// Orders no memory.
__device__ __forceinline__ void announce_at_cluster_barrier() {
#if __CUDA_ARCH__ >= 900
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
#endif
}
__device__ __forceinline__ void wait_at_cluster_barrier() {
#if __CUDA_ARCH__ >= 900
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}
__device__ __forceinline__ void* map_to_block(void* shared, int rank) {
#if __CUDA_ARCH__ >= 900
    uint64_t mapped;
    asm("mapa.u64 %0, %1, %2;" : "=l"(mapped) : "l"(shared), "r"(rank));
    return reinterpret_cast<void*>(mapped);
#else
    return shared;
#endif
}

// Counts arrivals of threads and bytes of asynchronous stores, in the block's shared memory: 8 bytes, 8-byte aligned.
__device__ __forceinline__ void make_mbarrier(uint64_t* mbarrier, uint32_t arrivals) {
#if __CUDA_ARCH__ >= 900
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(mbarrier)), "r"(arrivals) : "memory");
#endif
}
// Tells other blocks of those that this thread has made, by its next arrival at a barrier of the cluster.
__device__ __forceinline__ void fence_mbarriers() {
#if __CUDA_ARCH__ >= 900
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
}
// Arrives at a phase, in which so many bytes come.
__device__ __forceinline__ void expect_at_mbarrier(uint64_t* mbarrier, uint32_t bytes) {
#if __CUDA_ARCH__ >= 900
    asm volatile("mbarrier.arrive.expect_tx.release.cta.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(mbarrier)),
                 "r"(bytes)
                 : "memory");
#endif
}
// Returns once the phase of that parity is complete; the first one has parity 0.
__device__ __forceinline__ void wait_at_mbarrier(uint64_t* mbarrier, uint32_t parity) {
#if __CUDA_ARCH__ >= 900
    asm volatile(
        "{.reg .pred complete; again: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 complete, [%0], %1; "
        "@!complete bra again;}" ::"r"(shared_address(mbarrier)),
        "r"(parity)
        : "memory");
#endif
}
// Stores a value at the place `to` of the block of that rank, and counts its bytes at that block's mbarrier.
template <class T>
__device__ __forceinline__ void store_async(T* to, uint64_t* mbarrier, int rank, const T& value) {
    static_assert(sizeof(T) == 4 || sizeof(T) == 8 || sizeof(T) == 16, "a word, two or four");
#if __CUDA_ARCH__ >= 900
    uint32_t words[sizeof(T) / 4], place, counter;
    memcpy(words, &value, sizeof value);
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(place) : "r"(shared_address(to)), "r"(rank));
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(counter) : "r"(shared_address(mbarrier)), "r"(rank));
    if constexpr (sizeof(T) == 4) {
        asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %2, [%1];" ::"r"(place),
                     "r"(counter), "r"(words[0])
                     : "memory");
    } else if constexpr (sizeof(T) == 8) {
        asm volatile(
            "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.b32 [%0], {%2, %3}, [%1];" ::"r"(place),
            "r"(counter), "r"(words[0]), "r"(words[1])
            : "memory");
    } else {
        asm volatile(
            "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%2, %3, %4, %5}, [%1];" ::"r"(
                place),
            "r"(counter), "r"(words[0]), "r"(words[1]), "r"(words[2]), "r"(words[3])
            : "memory");
    }
#endif
}

// Copies a multiple of 16 bytes, 16-byte aligned, from global memory into this block's shared memory, and counts them at
// the mbarrier.
__device__ __forceinline__ void copy_in_bulk(void* to, const void* from, uint32_t bytes, uint64_t* mbarrier) {
#if __CUDA_ARCH__ >= 900
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                     shared_address(to)),
                 "l"(__cvta_generic_to_global(from)), "r"(bytes), "r"(shared_address(mbarrier))
                 : "memory");
#endif
}

// A hint that nothing waits for; a multiple of 16 bytes, 16-byte aligned. Nothing on sm_80.
__device__ __forceinline__ void prefetch_to_l2(const void* from, uint32_t bytes) {
#if __CUDA_ARCH__ >= 900
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(__cvta_generic_to_global(from)), "r"(bytes));
#endif
}

}  // namespace kvc::platform

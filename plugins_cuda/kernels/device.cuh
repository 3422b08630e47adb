// The nvcc side of kernels/platform.cuh. emulation/device.h offers the same names to g++.
#pragma once

#include "kernels/ptx.cuh"

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

namespace kvc {

using half_t = __half;
using bfloat16_t = __nv_bfloat16;

namespace platform {

__device__ __forceinline__ float widen(half_t x) { return __half2float(x); }
__device__ __forceinline__ float widen(bfloat16_t x) { return __bfloat162float(x); }
__device__ __forceinline__ void narrow(float x, half_t& result) { result = __float2half_rn(x); }
__device__ __forceinline__ void narrow(float x, bfloat16_t& result) { result = __float2bfloat16_rn(x); }

// The two numbers in a register.
template <class Pair>
__device__ __forceinline__ Pair pair_of(uint32_t bits) {
    Pair numbers;
    memcpy(&numbers, &bits, sizeof bits);
    return numbers;
}
template <class Pair>
__device__ __forceinline__ uint32_t bits_of(const Pair& numbers) {
    uint32_t bits;
    memcpy(&bits, &numbers, sizeof bits);
    return bits;
}

// The products, or the differences, of two pairs of numbers, each rounded. Subnormal numbers count.
__device__ __forceinline__ uint32_t multiply_pairs(bfloat16_t, uint32_t a, uint32_t b) {
    return bits_of(__hmul2(pair_of<__nv_bfloat162>(a), pair_of<__nv_bfloat162>(b)));
}
__device__ __forceinline__ uint32_t multiply_pairs(half_t, uint32_t a, uint32_t b) {
    return bits_of(__hmul2(pair_of<__half2>(a), pair_of<__half2>(b)));
}
__device__ __forceinline__ uint32_t subtract_pairs(bfloat16_t, uint32_t a, uint32_t b) {
    return bits_of(__hsub2(pair_of<__nv_bfloat162>(a), pair_of<__nv_bfloat162>(b)));
}
__device__ __forceinline__ uint32_t subtract_pairs(half_t, uint32_t a, uint32_t b) {
    return bits_of(__hsub2(pair_of<__half2>(a), pair_of<__half2>(b)));
}

__device__ __forceinline__ uint4 load_16_bytes(const void* from) { return *static_cast<const uint4*>(from); }
__device__ __forceinline__ void store_16_bytes(void* to, uint4 value) { *static_cast<uint4*>(to) = value; }

// A SharedSpan has no bounds on the device.
class SharedExtent {
public:
    __device__ __forceinline__ explicit SharedExtent(size_t) {}
    __device__ __forceinline__ static void check(int64_t) {}
    __device__ __forceinline__ static void check_range(int64_t, size_t) {}
    __device__ __forceinline__ static void check_alignment(const void*, size_t) {}
    __device__ __forceinline__ static size_t count() { return 0; }
    __device__ __forceinline__ SharedExtent with_count(size_t) const { return *this; }
    __device__ __forceinline__ SharedExtent of_block(int) const { return *this; }
};

__device__ __forceinline__ void* dynamic_shared_bytes(size_t offset, size_t, size_t) {
    extern __shared__ uint4 kvc_dynamic_shared[];
    return reinterpret_cast<char*>(kvc_dynamic_shared) + offset;
}

template <class Vector>
__device__ __forceinline__ Vector load_vector_of(const void* from) {
    return *static_cast<const Vector*>(from);
}
template <class Vector>
__device__ __forceinline__ void store_vector_of(void* to, const Vector& value) {
    *static_cast<Vector*>(to) = value;
}

// ---- The calls of src/launch_kernel.h to the CUDA runtime. All are for the current device, and throw LaunchError.

inline void check(const char* kernel, cudaError_t status) {
    if (status == cudaSuccess) return;
    cudaGetLastError();  // clears the error, so that the next launch does not report it again
    throw LaunchError(std::string("kernel ") + kernel + ": " + cudaGetErrorString(status));
}

using KernelEntry = const void*;

template <auto kKernel>
KernelEntry kernel_entry() {
    return reinterpret_cast<KernelEntry>(kKernel);
}

inline int current_device(const char* kernel) {
    int device = 0;
    check(kernel, cudaGetDevice(&device));
    return device;
}

inline SharedMemorySizes shared_memory_of(const char* kernel, KernelEntry entry, int device) {
    cudaFuncAttributes attributes{};
    int most = 0;
    check(kernel, cudaFuncGetAttributes(&attributes, entry));
    check(kernel, cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, device));
    return {attributes.sharedSizeBytes, static_cast<size_t>(most)};
}

inline void allow_dynamic_shared(const char* kernel, KernelEntry entry, size_t bytes) {
    check(kernel, cudaFuncSetAttribute(entry, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes)));
}

// With `most`, as much shared memory as a multiprocessor can have; otherwise the driver's choice.
inline void prefer_shared_memory(const char* kernel, KernelEntry entry, bool most) {
    const int share = most ? cudaSharedmemCarveoutMaxShared : cudaSharedmemCarveoutDefault;
    check(kernel, cudaFuncSetAttribute(entry, cudaFuncAttributePreferredSharedMemoryCarveout, share));
}

// Code for sm_80 does not wait, even where the driver compiles it for a later device.
inline bool waits_for_previous_launch(const char* kernel, KernelEntry entry, int) {
    cudaFuncAttributes attributes{};
    check(kernel, cudaFuncGetAttributes(&attributes, entry));
    return attributes.ptxVersion >= 90;
}

inline int multiprocessors_of(const char* kernel, int device) {
    int count = 0;
    check(kernel, cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device));
    return count;
}

// Clusters of the kernel that the current device holds at once: their blocks lie in one of its groups of
// multiprocessors, and groups differ in size from chip to chip. The kernel was allowed these bytes.
inline int64_t active_clusters(const char* kernel, KernelEntry entry, dim3 block, size_t dynamic_shared_bytes,
                               unsigned cluster_blocks, int) {
    cudaLaunchAttribute attribute{};
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim = {cluster_blocks, 1, 1};
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(cluster_blocks);
    config.blockDim = block;
    config.dynamicSmemBytes = dynamic_shared_bytes;
    config.attrs = &attribute;
    config.numAttrs = 1;
    int count = 0;
    check(kernel, cudaOccupancyMaxActiveClusters(&count, entry, &config));
    return count;
}

// Blocks of a cluster are neighbours along x.
inline void launch_kernel(const char* kernel, KernelEntry entry, dim3 grid, dim3 block, size_t dynamic_shared_bytes,
                          unsigned cluster_blocks, cudaStream_t stream, bool begins_early, const void* params) {
    void* arguments[] = {const_cast<void*>(params)};
    cudaLaunchAttribute attributes[2] = {};
    unsigned used = 0;
    if (begins_early) {
        attributes[used].id = cudaLaunchAttributeProgrammaticStreamSerialization;
        attributes[used++].val.programmaticStreamSerializationAllowed = 1;
    }
    if (cluster_blocks > 1) {
        attributes[used].id = cudaLaunchAttributeClusterDimension;
        attributes[used++].val.clusterDim = {cluster_blocks, 1, 1};
    }
    cudaLaunchConfig_t config{};
    config.gridDim = grid;
    config.blockDim = block;
    config.dynamicSmemBytes = dynamic_shared_bytes;
    config.stream = stream;
    config.attrs = attributes;
    config.numAttrs = used;
    check(kernel, cudaLaunchKernelExC(&config, entry, arguments));
}

}  // namespace platform
}  // namespace kvc

// Storage of one array declaration.
#define KVC_SHARED_STORAGE(T, name, count) __shared__ __align__(16) T name##_storage[count]

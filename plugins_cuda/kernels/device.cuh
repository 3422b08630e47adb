// The nvcc side of kernels/platform.cuh. emulation/device.h offers the same names to g++.
#pragma once

#include "kernels/ptx.cuh"

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <cstddef>
#include <cstdint>
#include <type_traits>

namespace kvc {

using half_t = __half;
using bfloat16_t = __nv_bfloat16;

namespace platform {

__device__ __forceinline__ float widen(half_t x) { return __half2float(x); }
__device__ __forceinline__ float widen(bfloat16_t x) { return __bfloat162float(x); }
__device__ __forceinline__ void narrow(float x, half_t& result) { result = __float2half_rn(x); }
__device__ __forceinline__ void narrow(float x, bfloat16_t& result) { result = __float2bfloat16_rn(x); }

__device__ __forceinline__ uint4 load_16_bytes(const void* from) { return *static_cast<const uint4*>(from); }
__device__ __forceinline__ void store_16_bytes(void* to, uint4 value) { *static_cast<uint4*>(to) = value; }

// Bounds of a SharedSpan: the device does not keep them.
class SharedExtent {
public:
    __device__ __forceinline__ explicit SharedExtent(size_t) {}
    __device__ __forceinline__ static void check(int64_t) {}
    __device__ __forceinline__ static void check_range(int64_t, size_t) {}
    __device__ __forceinline__ static void check_alignment(const void*, size_t) {}
    __device__ __forceinline__ static size_t count() { return 0; }
};

__device__ __forceinline__ void* dynamic_shared_bytes(size_t offset, size_t, size_t) {
    extern __shared__ uint4 kvc_dynamic_shared[];
    return reinterpret_cast<char*>(kvc_dynamic_shared) + offset;
}

// More dynamic shared memory than this has to be asked for.
inline constexpr size_t kDefaultSharedLimit = 48 * 1024;

inline void check(const char* kernel, cudaError_t status) {
    if (status == cudaSuccess) return;
    cudaGetLastError();  // not to be reported again by the next launch
    throw LaunchError(std::string("kernel ") + kernel + ": " + cudaGetErrorString(status));
}

}  // namespace platform

// A kernel takes one parameter struct by value. Throws LaunchError when the runtime refuses the launch.
template <class Params>
void launch(const char* name, void (*kernel)(Params), dim3 grid, dim3 block, size_t dynamic_shared_bytes,
            cudaStream_t stream, const std::type_identity_t<Params>& params) {
    const void* entry = reinterpret_cast<const void*>(kernel);
    if (dynamic_shared_bytes > platform::kDefaultSharedLimit) {
        platform::check(name, cudaFuncSetAttribute(entry, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                                   static_cast<int>(dynamic_shared_bytes)));
    }
    void* arguments[] = {const_cast<Params*>(&params)};
    platform::check(name, cudaLaunchKernel(entry, grid, block, arguments, dynamic_shared_bytes, stream));
}

}  // namespace kvc

// Storage of one array declaration.
#define KVC_SHARED_STORAGE(T, name, count) __shared__ __align__(16) T name##_storage[count]

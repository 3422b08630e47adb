// Copies the entries that a compaction kept over the state, in buffers that the engine shares between input and output.
//
// Bytes: every tensor once read and once written, 16 bytes at a time where it starts at a multiple of 16.
//
// Determinism: every element has one writer.
#pragma once

#include <cstdint>

#include "kernels/dependent_launch.cuh"
#include "kernels/numeric.cuh"
#include "kernels/platform.cuh"

namespace kvc {

constexpr int kReplaceThreads = 256;
constexpr int kReplacedPerThread = 4;

template <class T>
struct ReplaceParams {
    T* state;
    const T* kept;
    int64_t elements;
};

// Grid (ceil(vectors / (kReplaceThreads · kReplacedPerThread))); `elements` is a multiple of a vector's.
template <class T>
__global__ void __launch_bounds__(kReplaceThreads) replace_vectors(const ReplaceParams<T> params) {
    start_next_launch();
    wait_for_previous_launch();
    const int64_t first = int64_t{blockIdx.x} * kReplaceThreads * kReplacedPerThread + threadIdx.x;
#pragma unroll
    for (int32_t j = 0; j < kReplacedPerThread; ++j) {
        const int64_t element = (first + j * kReplaceThreads) * kVectorWidth<T>;
        if (element < params.elements) copy_vector(params.state + element, params.kept + element);
    }
}

template <class Integer>
__device__ __forceinline__ void replace_elements(const ReplaceParams<Integer>& params) {
    start_next_launch();
    wait_for_previous_launch();
    const int64_t first = int64_t{blockIdx.x} * kReplaceThreads * kReplacedPerThread + threadIdx.x;
#pragma unroll
    for (int32_t j = 0; j < kReplacedPerThread; ++j) {
        const int64_t element = first + j * kReplaceThreads;
        if (element < params.elements) params.state[element] = params.kept[element];
    }
}

// Copies tensors of any length, aligned as their elements are.
inline __global__ void __launch_bounds__(kReplaceThreads) replace_integers(const ReplaceParams<int32_t> params) {
    replace_elements(params);
}

// The same for the scales and minima of vectors in a format.
template <class Integer>
__global__ void __launch_bounds__(kReplaceThreads) replace_numbers(const ReplaceParams<Integer> params) {
    replace_elements(params);
}

}  // namespace kvc

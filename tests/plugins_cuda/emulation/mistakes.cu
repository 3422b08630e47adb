// One kernel per mistake that the emulation must report, on a block of 64 threads (one warp and a part in one case).
#include "emulation/toy.h"
#include "kernels/copy_async.cuh"
#include "kernels/reduce.cuh"
#include "kernels/shared.cuh"

#include <cstring>

namespace kvc {
namespace {

struct Params {
    const float* global;  // [64], 16-byte aligned
};

__device__ int thread() { return static_cast<int>(threadIdx.x); }

__global__ void exit_before_barrier(Params) {
    if (thread() == 37) return;
    __syncthreads();
}

__global__ void barrier_in_both_branches(Params) {
    if (thread() < 32) {
        __syncthreads();
    } else {
        __syncthreads();
    }
}

__global__ void one_barrier_too_many(Params) {
    for (int i = 0; i < (thread() == 5 ? 3 : 2); ++i) __syncthreads();
}

__global__ void exited_lane(Params) {
    if (thread() == 40) return;
    __shfl_xor_sync(kFullWarp, 1, 1);
}

__global__ void lane_at_barrier(Params) {
    if (thread() != 3) __syncwarp();
    __syncthreads();
}

__global__ void lanes_at_different_operations(Params) {
    if (thread() % 32 < 16) {
        __ballot_sync(kFullWarp, 1);
    } else {
        __shfl_sync(kFullWarp, 1, 0);
    }
}

__global__ void lanes_with_different_masks(Params) { __syncwarp(thread() % 2 == 0 ? kFullWarp : 0xaaaaaaaau); }

__global__ void outside_own_mask(Params) { __syncwarp(0x0000ffffu); }

__global__ void source_outside_mask(Params) {
    if (thread() % 32 < 16) __shfl_sync(0x0000ffffu, 1, 16);
}

__global__ void past_the_end(Params) {
    KVC_SHARED(float, values, 64);
    values[thread() + (thread() == 42 ? 22 : 0)] = 1.0f;
}

__global__ void before_the_start(Params) {
    KVC_SHARED(float, values, 64);
    values[thread() - 1] = 1.0f;
}

__global__ void part_past_the_end(Params) {
    KVC_SHARED(float, values, 64);
    values.part(thread(), 8)[0] = 1.0f;
}

__global__ void past_the_launch(Params) { dynamic_shared<float>(32, 64)[0] = 1.0f; }

__global__ void misaligned_dynamic(Params) { dynamic_shared<float>(2, 4)[0] = 1.0f; }

__global__ void misaligned_cast(Params) {
    KVC_SHARED(float, values, 64);
    values.part(1, 4).cast<float4>()[0] = {};
}

__global__ void too_much_static(Params) {
    KVC_SHARED(float, first, 12 * 1024);
    KVC_SHARED(float, second, 4);
    second[0] = first[0];
}

__global__ void misaligned_vector(Params params) {
    float values[4];
    load_vector(params.global + 1, values);
}

__global__ void misaligned_store(Params) {
    KVC_SHARED(float, values, 64);
    if (thread() == 0) platform::store_vector_of(&values[1], float2{1.0f, 2.0f});
}

__global__ void misaligned_copy(Params params) {
    KVC_SHARED(float, values, 64);
    copy_async_16(&values[1], params.global);
}

__global__ void copy_without_wait(Params params) {
    KVC_SHARED(float, values, 64);
    if (thread() == 9) copy_async_16(&values[4], params.global);
    copy_async_commit();
}

__global__ void wait_without_commit(Params params) {
    KVC_SHARED(float, values, 64);
    if (thread() == 9) copy_async_16(&values[4], params.global);
    copy_async_wait<0>();
}

__global__ void copy_to_global(Params params) {
    copy_async_16(const_cast<float*>(params.global), params.global + 4);
    copy_async_commit();
    copy_async_wait<0>();
}

template <auto kKernel>
void run(const char* name, int blocks, int threads, const Params& params) {
    launch<kKernel>(name, blocks, threads, 64, nullptr, params);
}

struct Mistake {
    const char* name;
    void (*run)(const char* name, int blocks, int threads, const Params& params);
};
#define MISTAKE(name) {#name, run<name>}
constexpr Mistake kMistakes[] = {
    MISTAKE(exit_before_barrier),  MISTAKE(barrier_in_both_branches),
    MISTAKE(one_barrier_too_many), MISTAKE(exited_lane),
    MISTAKE(lane_at_barrier),      MISTAKE(lanes_at_different_operations),
    MISTAKE(outside_own_mask),     MISTAKE(lanes_with_different_masks),
    MISTAKE(source_outside_mask),  MISTAKE(past_the_end),
    MISTAKE(before_the_start),     MISTAKE(part_past_the_end),
    MISTAKE(past_the_launch),      MISTAKE(misaligned_dynamic),
    MISTAKE(misaligned_cast),      MISTAKE(too_much_static),
    MISTAKE(misaligned_vector),    MISTAKE(misaligned_copy),
    MISTAKE(copy_without_wait),    MISTAKE(wait_without_commit),
    MISTAKE(copy_to_global),       MISTAKE(misaligned_store),
};

}  // namespace
}  // namespace kvc

// Null where there is no such mistake.
extern "C" const char* run_mistake(const char* name, int blocks, int threads, const float* global) {
    for (const kvc::Mistake& mistake : kvc::kMistakes) {
        if (std::strcmp(mistake.name, name) != 0) continue;
        return message_of([&] { mistake.run(name, blocks, threads, {global}); });
    }
    return nullptr;
}

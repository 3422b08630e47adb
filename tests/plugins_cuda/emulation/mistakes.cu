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
    wait_for_previous_launch();
    if (thread() == 37) return;
    __syncthreads();
}

__global__ void barrier_in_both_branches(Params) {
    wait_for_previous_launch();
    if (thread() < 32) {
        __syncthreads();
    } else {
        __syncthreads();
    }
}

__global__ void one_barrier_too_many(Params) {
    wait_for_previous_launch();
    for (int i = 0; i < (thread() == 5 ? 3 : 2); ++i) __syncthreads();
}

__global__ void exited_lane(Params) {
    wait_for_previous_launch();
    if (thread() == 40) return;
    __shfl_xor_sync(kFullWarp, 1, 1);
}

__global__ void lane_at_barrier(Params) {
    wait_for_previous_launch();
    if (thread() != 3) __syncwarp();
    __syncthreads();
}

__global__ void lanes_at_different_operations(Params) {
    wait_for_previous_launch();
    if (thread() % 32 < 16) {
        __ballot_sync(kFullWarp, 1);
    } else {
        __shfl_sync(kFullWarp, 1, 0);
    }
}

__global__ void lanes_with_different_masks(Params) {
    wait_for_previous_launch();
    __syncwarp(thread() % 2 == 0 ? kFullWarp : 0xaaaaaaaau);
}

__global__ void outside_own_mask(Params) {
    wait_for_previous_launch();
    __syncwarp(0x0000ffffu);
}

__global__ void source_outside_mask(Params) {
    wait_for_previous_launch();
    if (thread() % 32 < 16) __shfl_sync(0x0000ffffu, 1, 16);
}

__global__ void past_the_end(Params) {
    wait_for_previous_launch();
    KVC_SHARED(float, values, 64);
    values[thread() + (thread() == 42 ? 22 : 0)] = 1.0f;
}

__global__ void before_the_start(Params) {
    wait_for_previous_launch();
    KVC_SHARED(float, values, 64);
    values[thread() - 1] = 1.0f;
}

__global__ void part_past_the_end(Params) {
    wait_for_previous_launch();
    KVC_SHARED(float, values, 64);
    values.part(thread(), 8)[0] = 1.0f;
}

__global__ void past_the_launch(Params) {
    wait_for_previous_launch();
    dynamic_shared<float>(32, 64)[0] = 1.0f;
}

__global__ void misaligned_dynamic(Params) {
    wait_for_previous_launch();
    dynamic_shared<float>(2, 4)[0] = 1.0f;
}

__global__ void misaligned_cast(Params) {
    wait_for_previous_launch();
    KVC_SHARED(float, values, 64);
    values.part(1, 4).cast<float4>()[0] = {};
}

__global__ void too_much_static(Params) {
    wait_for_previous_launch();
    KVC_SHARED(float, first, 12 * 1024);
    KVC_SHARED(float, second, 4);
    second[0] = first[0];
}

__global__ void misaligned_vector(Params params) {
    wait_for_previous_launch();
    float values[4];
    load_vector(params.global + 1, values);
}

__global__ void misaligned_store(Params) {
    wait_for_previous_launch();
    KVC_SHARED(float, values, 64);
    if (thread() == 0) platform::store_vector_of(&values[1], float2{1.0f, 2.0f});
}

__global__ void misaligned_copy(Params params) {
    wait_for_previous_launch();
    KVC_SHARED(float, values, 64);
    copy_async_16(&values[1], params.global);
}

__global__ void copy_without_wait(Params params) {
    wait_for_previous_launch();
    KVC_SHARED(float, values, 64);
    if (thread() == 9) copy_async_16(&values[4], params.global);
    copy_async_commit();
}

__global__ void wait_without_commit(Params params) {
    wait_for_previous_launch();
    KVC_SHARED(float, values, 64);
    if (thread() == 9) copy_async_16(&values[4], params.global);
    copy_async_wait<0>();
}

__global__ void copy_to_global(Params params) {
    wait_for_previous_launch();
    copy_async_16(const_cast<float*>(params.global), params.global + 4);
    copy_async_commit();
    copy_async_wait<0>();
}

__global__ void exit_before_wait(Params) {
    if (thread() == 37) return;
    wait_for_previous_launch();
}

__global__ void no_wait(Params) {}

__global__ void copy_before_wait(Params params) {
    KVC_SHARED(float, values, 64);
    copy_async_16(&values[0], params.global);
    wait_for_previous_launch();
    copy_async_commit();
    copy_async_wait<0>();
}

__global__ void atomic_before_wait(Params params) {
    atomicAdd(reinterpret_cast<int*>(const_cast<float*>(params.global)), 0);
    wait_for_previous_launch();
}

template <auto kKernel>
void run(const char* name, int blocks, int threads, Stream& stream, const Params& params) {
    launch<kKernel>(name, blocks, threads, 64, stream, params);
}

struct Mistake {
    const char* name;
    void (*run)(const char* name, int blocks, int threads, Stream& stream, const Params& params);
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
    MISTAKE(exit_before_wait),     MISTAKE(no_wait),
    MISTAKE(copy_before_wait),     MISTAKE(atomic_before_wait),
};

}  // namespace
}  // namespace kvc

// Null for an unknown name.
extern "C" const char* run_mistake(const char* name, int blocks, int threads, const float* global) {
    for (const kvc::Mistake& mistake : kvc::kMistakes) {
        if (std::strcmp(mistake.name, name) != 0) continue;
        return message_of([&](kvc::Stream& stream) { mistake.run(name, blocks, threads, stream, {global}); });
    }
    return nullptr;
}

// Kernels with one race each, and variants without it. Compiled with -fsanitize=thread for the race detector alone.
#include "emulation/toy.h"
#include "kernels/copy_async.cuh"
#include "kernels/reduce.cuh"
#include "kernels/shared.cuh"

#include <cstring>

namespace kvc {
namespace {

struct Params {
    float* values;      // [2 blocks, 64]
    uint32_t* arrived;  // [1], zero
    float* total;       // [2 blocks, 64]
};

__device__ int thread() { return static_cast<int>(threadIdx.x); }

template <bool kBarrier>
__global__ void written_then_read(Params params) {
    wait_for_previous_launch();
    KVC_SHARED(float, row, 64);
    row[thread()] = 1.0f;
    if (kBarrier) __syncthreads();
    params.values[blockIdx.x * 64 + threadIdx.x] = row[thread() ^ 32];
}

template <bool kBarrier>
__global__ void read_then_written(Params params) {
    wait_for_previous_launch();
    KVC_SHARED(float, first, 1);
    if (thread() == 0) first[0] = 1.0f;
    __syncthreads();
    params.values[blockIdx.x * 64 + threadIdx.x] = first[0];
    if (kBarrier) __syncthreads();
    if (thread() == 40) first[0] = 2.0f;
}

template <bool kBarrier>
__global__ void same_value_twice(Params) {
    wait_for_previous_launch();
    KVC_SHARED(int, flag, 1);
    if (kBarrier ? thread() == 0 : true) flag[0] = 1;
}

template <bool kSyncwarp>
__global__ void within_a_warp(Params params) {
    wait_for_previous_launch();
    KVC_SHARED(float, row, 64);
    row[thread()] = 1.0f;
    if (kSyncwarp) {
        __syncwarp();
    } else {
        __shfl_sync(kFullWarp, 1, 0);  // orders no memory
    }
    params.values[blockIdx.x * 64 + threadIdx.x] = row[thread() ^ 1];
}

template <bool kSyncwarp>
__global__ void within_half_a_warp(Params params) {
    wait_for_previous_launch();
    KVC_SHARED(float, row, 64);
    row[thread()] = 1.0f;
    __syncwarp(thread() % 32 < 16 ? 0x0000ffffu : 0xffff0000u);
    params.values[blockIdx.x * 64 + threadIdx.x] = row[thread() ^ (kSyncwarp ? 8 : 16)];
}

template <bool kAtomics>
__global__ void counted(Params) {
    wait_for_previous_launch();
    KVC_SHARED(int, count, 1);
    if (thread() == 0) count[0] = 0;
    __syncthreads();
    if (kAtomics || thread() != 7) {
        atomicAdd(&count[0], 1);
    } else {
        count[0] += 1;
    }
}

template <bool kBarrier>
__global__ void copied(Params params) {
    wait_for_previous_launch();
    KVC_SHARED(float, row, 256);
    copy_async_16(&row[4 * thread()], params.values);
    copy_async_commit();
    copy_async_wait<0>();
    if (kBarrier) __syncthreads();
    params.total[blockIdx.x * 64 + threadIdx.x] = row[4 * (thread() ^ 33)];
}

// A vector of 16 bytes holds a neighbour's value, which the right variant does not read.
template <bool kOwn>
__global__ void copied_with_neighbour(Params params) {
    wait_for_previous_launch();
    KVC_SHARED(float, vector, 4);
    if (thread() != 0) return;
    copy_async_16(&vector[0], params.values);
    copy_async_commit();
    copy_async_wait<0>();
    params.values[blockIdx.x] = vector[kOwn ? blockIdx.x : 1 - blockIdx.x] + 1.0f;
}

template <bool kOwnRow>
__global__ void one_row_per_block(Params params) {
    wait_for_previous_launch();
    params.values[(kOwnRow ? blockIdx.x * 64 : 0) + thread()] = 1.0f;
}

// The last block to arrive adds up the values of all blocks.
template <bool kFence, bool kFenceByArriver>
__global__ void merged(Params params) {
    wait_for_previous_launch();
    KVC_SHARED(uint32_t, place, 1);
    params.values[blockIdx.x * 64 + threadIdx.x] = 1.0f;
    if (kFence && !kFenceByArriver) __threadfence();
    __syncthreads();
    if (thread() == 0) {
        if (kFence && kFenceByArriver) __threadfence();
        place[0] = atomicAdd(params.arrived, 1u);
    }
    __syncthreads();
    if (place[0] != gridDim.x - 1) return;
    float sum = 0.0f;
    for (unsigned block = 0; block < gridDim.x; ++block) sum += params.values[block * 64 + threadIdx.x];
    params.total[threadIdx.x] = sum;
}

// Before it waits, a kernel may do anything that touches no global memory.
template <bool kWait>
__global__ void read_early(Params params) {
    KVC_SHARED(float, row, 64);
    row[threadIdx.x] = static_cast<float>(gridDim.x + blockDim.x);
    if (kWait) wait_for_previous_launch();
    row[threadIdx.x] += params.values[threadIdx.x];
    wait_for_previous_launch();
}

template <bool kWait>
__global__ void written_early(Params params) {
    start_next_launch();
    if (kWait) wait_for_previous_launch();
    params.values[blockIdx.x * 64 + threadIdx.x] = 1.0f;
    wait_for_previous_launch();
}

template <auto kKernel>
void run(const char* name, Stream& stream, const Params& params) {
    launch<kKernel>(name, 2, 64, 0, stream, params);
}

struct Race {
    const char* name;
    void (*wrong)(const char* name, Stream& stream, const Params& params);
    void (*right)(const char* name, Stream& stream, const Params& params);
};
#define RACE(name) {#name, run<name<false>>, run<name<true>>}
const Race kRaces[] = {
    RACE(written_then_read),
    RACE(read_then_written),
    RACE(same_value_twice),
    RACE(within_a_warp),
    RACE(within_half_a_warp),
    RACE(counted),
    RACE(copied),
    RACE(copied_with_neighbour),
    RACE(one_row_per_block),
    RACE(read_early),
    RACE(written_early),
    {"merged", run<merged<false, false>>, run<merged<true, false>>},
    {"merged_by_arriver", run<merged<false, true>>, run<merged<true, true>>},
};

}  // namespace
}  // namespace kvc

// Null for an unknown name.
extern "C" const char* run_race(const char* name, int right, float* values, uint32_t* arrived, float* total) {
    for (const kvc::Race& race : kvc::kRaces) {
        if (std::strcmp(race.name, name) != 0) continue;
        const auto run = right ? race.right : race.wrong;
        return message_of([&](kvc::Stream& stream) { run(name, stream, {values, arrived, total}); });
    }
    return nullptr;
}

// Kernels that behave: reductions, warp operations, atomics, the order of threads, and a barrier that can be left out.
#include "emulation/toy.h"
#include "kernels/reduce.cuh"
#include "kernels/shared.cuh"

namespace kvc {
namespace {

constexpr int kThreads = 96;

struct ReduceParams {
    const float* x;  // [blocks, kThreads]
    float* sums;     // [blocks, kThreads]: of the block, every thread's own result
    float* maxima;   // [blocks, kThreads]: of the warp, likewise
    int* before;     // [blocks, kThreads]: exclusive scan of the thread numbers squared in the warp
    int* total;      // [blocks, kThreads]: of the warp
};

__global__ void __launch_bounds__(kThreads) reductions(const ReduceParams params) {
    wait_for_previous_launch();
    const int64_t at = int64_t{blockIdx.x} * kThreads + threadIdx.x;
    KVC_SHARED(float, warp_sums, kThreads / kWarpSize);
    const float sum = warp_sum(params.x[at]);
    if (lane_index() == 0) warp_sums[warp_index()] = sum;
    __syncthreads();
    params.sums[at] = warp_sums[0] + warp_sums[1] + warp_sums[2];
    params.maxima[at] = warp_max(params.x[at]);
    const int value = static_cast<int>(threadIdx.x * threadIdx.x);
    params.before[at] = warp_exclusive_scan(value, params.total[at]);
}

struct WarpParams {
    int64_t* out;  // [operations, 64]
};

// Two warps; lane values are distinct, so that each result tells where it came from.
__global__ void __launch_bounds__(64) warp_operations(const WarpParams params) {
    wait_for_previous_launch();
    const int thread = static_cast<int>(threadIdx.x);
    const int lane = thread % 32;
    int operation = 0;
    const auto put = [&](int64_t value) { params.out[operation++ * 64 + thread] = value; };
    put(__shfl_sync(kFullWarp, 100 + thread, (lane * 7 + 3) % 32));
    put(__shfl_sync(kFullWarp, 100 + thread, 2, 8));
    put(__shfl_up_sync(kFullWarp, 100 + thread, 3));
    put(__shfl_up_sync(kFullWarp, 100 + thread, 3, 16));
    put(__shfl_down_sync(kFullWarp, 100 + thread, 5));
    put(__shfl_down_sync(kFullWarp, 100 + thread, 5, 8));
    put(__shfl_xor_sync(kFullWarp, 100 + thread, 9));
    put(__shfl_xor_sync(kFullWarp, uint64_t{1} << 40 | thread, 16));
    put(static_cast<int64_t>(2 * __shfl_xor_sync(kFullWarp, 0.5f + thread, 1)));
    put(__ballot_sync(kFullWarp, thread % 3 == 0));
    put(__any_sync(kFullWarp, thread == 40));
    put(__all_sync(kFullWarp, thread < 40));
    put(__match_any_sync(kFullWarp, thread % 5));
    if (lane < 12) {  // two groups of one warp, each with its own mask
        put(__shfl_sync(0x00000fffu, 100 + thread, 11));
        put(__all_sync(0x00000fffu, lane < 12));
    } else {
        put(__shfl_sync(0xfffff000u, 100 + thread, 12));
        put(__all_sync(0xfffff000u, lane < 31));
    }
    put(__syncthreads_count(thread % 3 == 0));
    put(__syncthreads_or(thread == 63));
    put(__syncthreads_and(thread != 63));
    put(__popc(thread) * 10000 + __clz(thread) * 100 + __ffs(thread));
}

struct AtomicParams {
    uint32_t* word;   // [5]: add, min, max, or, exchange
    int32_t* shared;  // [1]: a count in shared memory, read after a barrier
};

__global__ void __launch_bounds__(64) atomics(const AtomicParams params) {
    wait_for_previous_launch();
    KVC_SHARED(int32_t, count, 1);
    if (threadIdx.x == 0) count[0] = 0;
    __syncthreads();
    const uint32_t number = blockIdx.x * 64 + threadIdx.x;
    atomicAdd(&params.word[0], number);
    atomicMin(&params.word[1], number + 5);
    atomicMax(&params.word[2], number);
    atomicOr(&params.word[3], 1u << number % 32);
    atomicExch(&params.word[4], 7u);
    atomicAdd(&count[0], 1);
    __syncthreads();
    if (threadIdx.x == 0) params.shared[0] = count[0];
}

struct OrderParams {
    int* ticket;    // [1], zero
    int* sequence;  // [blocks * threads]: who ran when
};

__global__ void sequence(const OrderParams params) {
    wait_for_previous_launch();
    const unsigned block = (blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
    const unsigned thread = (threadIdx.z * blockDim.y + threadIdx.y) * blockDim.x + threadIdx.x;
    const unsigned threads = blockDim.x * blockDim.y * blockDim.z;
    params.sequence[atomicAdd(params.ticket, 1)] = static_cast<int>(block * threads + thread);
}

struct NeighbourParams {
    const float* x;  // [64]
    float* out;      // [2, 64]
    bool write_barrier;
    bool read_barrier;
};

// out[0][i] = x[i - 1] by way of shared memory, then out[1][i] = x[i + 1] + 1 through the same memory.
__global__ void __launch_bounds__(64) neighbours(const NeighbourParams params) {
    wait_for_previous_launch();
    KVC_SHARED(float, row, 64);
    const int i = static_cast<int>(threadIdx.x);
    row[i] = params.x[i];
    if (params.write_barrier) __syncthreads();
    params.out[i] = row[i > 0 ? i - 1 : 0];
    if (params.read_barrier) __syncthreads();
    row[i] = params.x[i] + 1;
    __syncthreads();
    params.out[64 + i] = row[i < 63 ? i + 1 : 63];
}

struct FreshParams {
    float* as_float;  // [3]: fp32, fp16, bf16 elements that were never written
    int32_t* as_int;  // [1]
};

__global__ void fresh_memory(const FreshParams params) {
    wait_for_previous_launch();
    KVC_SHARED(float, words, 4);
    KVC_SHARED(half_t, halves, 4);
    KVC_SHARED(int32_t, numbers, 4);
    const SharedSpan<bfloat16_t> dynamic = dynamic_shared<bfloat16_t>(8, 4);
    params.as_float[0] = words[3];
    params.as_float[1] = to_float(halves[1]);
    params.as_float[2] = to_float(dynamic[2]);
    params.as_int[0] = numbers[2];
    words[3] = 1.0f;  // the next block must not see these
    halves[1] = from_float<half_t>(1.0f);
    dynamic[2] = from_float<bfloat16_t>(1.0f);
    numbers[2] = 1;
}

}  // namespace
}  // namespace kvc

using namespace kvc;

extern "C" {

const char* run_reductions(int blocks, const float* x, float* sums, float* maxima, int* before, int* total) {
    const ReduceParams params{x, sums, maxima, before, total};
    return message_of([&](Stream& stream) { launch<reductions>("reductions", blocks, kThreads, 0, stream, params); });
}
const char* run_warp_operations(int64_t* out) {
    return message_of([&](Stream& stream) { launch<warp_operations>("warp_operations", 1, 64, 0, stream, {out}); });
}
const char* run_atomics(uint32_t* word, int32_t* shared) {
    return message_of([&](Stream& stream) { launch<atomics>("atomics", 4, 64, 0, stream, {word, shared}); });
}
const char* run_sequence(const uint32_t* grid, const uint32_t* block, int* ticket, int* out) {
    return message_of([&](Stream& stream) {
        launch<sequence>("sequence", dim3(grid[0], grid[1], grid[2]), dim3(block[0], block[1], block[2]), 0, stream,
                         {ticket, out});
    });
}
const char* run_neighbours(const float* x, float* out, int write_barrier, int read_barrier) {
    const NeighbourParams params{x, out, write_barrier != 0, read_barrier != 0};
    return message_of([&](Stream& stream) { launch<neighbours>("neighbours", 1, 64, 0, stream, params); });
}
const char* run_fresh_memory(float* as_float, int32_t* as_int) {
    return message_of(
        [&](Stream& stream) { launch<fresh_memory>("fresh_memory", 3, 1, 16, stream, {as_float, as_int}); });
}
const char* run_limits(const uint32_t* grid, const uint32_t* block, uint64_t dynamic_bytes) {
    static int ticket;
    ticket = 0;
    return message_of([&](Stream& stream) {
        launch<sequence>("sequence", dim3(grid[0], grid[1], grid[2]), dim3(block[0], block[1], block[2]), dynamic_bytes,
                         stream, {&ticket, nullptr});
    });
}
}

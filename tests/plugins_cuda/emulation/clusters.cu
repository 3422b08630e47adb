// Kernels in clusters of blocks: correct ones, and one mistake each. Compiled with -fsanitize=thread, so that the race
// detector sees them. Blocks of 64 threads, two clusters.
#include "emulation/toy.h"
#include "kernels/cluster.cuh"
#include "kernels/shared.cuh"

#include <cstring>

namespace kvc {
namespace {

struct Params {
    int* out;  // [blocks, 64]
    int blocks;
};

__device__ int thread() { return static_cast<int>(threadIdx.x); }
__device__ int rank(const Params& params) { return static_cast<int>(blockIdx.x) % params.blocks; }
__device__ int next(const Params& params) { return (rank(params) + 1) % params.blocks; }
__device__ int& out(const Params& params) { return params.out[blockIdx.x * 64 + threadIdx.x]; }

// Every block gets the numbers that the block before it writes.
template <bool kRight>
__global__ void written_to_the_next(Params params) {
    wait_for_previous_launch();
    KVC_SHARED(int, values, 64);
    synchronize_cluster();
    values.of_block(next(params))[thread()] = 100 * static_cast<int>(blockIdx.x) + thread();
    if (kRight) {
        synchronize_cluster();
    } else {
        __syncthreads();
    }
    out(params) = values[thread() ^ 32];
    synchronize_cluster();
}

// Every block reads the numbers of the block before it, in dynamic memory.
template <bool kRight>
__global__ void read_from_the_last(Params params) {
    wait_for_previous_launch();
    const SharedSpan<int> values = dynamic_shared<int>(256, 64);
    values[thread()] = 100 * static_cast<int>(blockIdx.x) + thread();
    synchronize_cluster();
    out(params) = values.of_block(params.blocks - 1)[thread() ^ 1];
    if (kRight) synchronize_cluster();  // else it is overwritten, or gone
    values[thread()] = 0;
    if (!kRight) synchronize_cluster();
}

// No block may rely on a write between a thread's arrival and its wait: the barrier does not cover it.
template <bool kRight>
__global__ void written_after_arriving(Params params) {
    wait_for_previous_launch();
    KVC_SHARED(int, values, 64);
    synchronize_cluster();
    if (kRight) values.of_block(next(params))[thread()] = thread();
    arrive_at_cluster();
    if (!kRight) values.of_block(next(params))[thread()] = thread();
    wait_for_cluster();
    out(params) = values[thread()];
    synchronize_cluster();
}

// An announcement publishes nothing, not even to the block itself.
template <bool kRight>
__global__ void announced(Params params) {
    wait_for_previous_launch();
    KVC_SHARED(int, values, 64);
    values[thread()] = thread();
    if (kRight) {
        arrive_at_cluster();
    } else {
        announce_to_cluster();
    }
    wait_for_cluster();
    out(params) = values[thread() ^ 32];
}

// An announcement behind a fence does.
template <bool kRight>
__global__ void announced_behind_a_fence(Params params) {
    wait_for_previous_launch();
    out(params) = thread();
    if (kRight) __threadfence();
    announce_to_cluster();
    if (!kRight) __threadfence();
    wait_for_cluster();
    const int other = static_cast<int>(blockIdx.x) - rank(params) + next(params);
    const int value = params.out[other * 64 + thread()];
    synchronize_cluster();
    out(params) = value;
}

// The counts of all blocks, in the first one's memory.
template <bool kRight>
__global__ void counted(Params params) {
    wait_for_previous_launch();
    KVC_SHARED(unsigned, count, 2);
    if (thread() < 2) count[thread()] = 0;
    synchronize_cluster();
    if (kRight) {
        atomicAdd(&count.of_block(0)[thread() % 2], static_cast<unsigned>(rank(params) + 1));
    } else {
        count.of_block(0)[thread() % 2] += 1;
    }
    synchronize_cluster();
    out(params) = static_cast<int>(count.of_block(0)[thread() % 2]);
    synchronize_cluster();
}

// A barrier of the cluster orders global memory too.
template <bool kRight>
__global__ void through_global_memory(Params params) {
    wait_for_previous_launch();
    out(params) = thread();
    if (kRight) {
        synchronize_cluster();
    } else {
        __syncthreads();
    }
    const int other = static_cast<int>(blockIdx.x) - rank(params) + next(params);
    const int value = params.out[other * 64 + thread()];
    synchronize_cluster();
    out(params) = value;
}

// ---- Mistakes that are not races

template <bool kRight>
__global__ void before_it_has_begun(Params params) {
    wait_for_previous_launch();
    KVC_SHARED(int, values, 64);
    if (kRight) synchronize_cluster();
    values.of_block(next(params))[thread()] = 1;
    if (!kRight) synchronize_cluster();
    synchronize_cluster();
    out(params) = values[thread()];
}

// The second block leaves while the first may still read from it.
template <bool kRight>
__global__ void leaves_early(Params params) {
    wait_for_previous_launch();
    KVC_SHARED(int, values, 64);
    values[thread()] = rank(params);
    synchronize_cluster();
    out(params) = values.of_block(rank(params) == 0 ? 1 : rank(params))[thread()];
    if (kRight) synchronize_cluster();
}

template <bool kRight>
__global__ void exits_before_the_barrier(Params params) {
    wait_for_previous_launch();
    if (!kRight && blockIdx.x == 1 && thread() == 5) return;
    synchronize_cluster();
    out(params) = 1;
}

template <bool kRight>
__global__ void at_a_barrier_of_the_block(Params params) {
    wait_for_previous_launch();
    if (!kRight && rank(params) == 1 && thread() == 5) __syncthreads();
    synchronize_cluster();
    out(params) = 1;
}

template <bool kRight>
__global__ void at_two_lines(Params params) {
    wait_for_previous_launch();
    if (kRight || rank(params) == 0) {
        arrive_at_cluster();
        wait_for_cluster();
    } else {
        platform::arrive_at_cluster_barrier();
        wait_for_cluster();
    }
    out(params) = 1;
}

template <bool kRight>
__global__ void arrives_twice(Params params) {
    wait_for_previous_launch();
    arrive_at_cluster();
    if (kRight) wait_for_cluster();
    arrive_at_cluster();
    wait_for_cluster();
    out(params) = 1;
}

template <bool kRight>
__global__ void waits_without_arriving(Params params) {
    wait_for_previous_launch();
    if (kRight) arrive_at_cluster();
    wait_for_cluster();
    out(params) = 1;
}

template <bool kRight>
__global__ void exits_without_waiting(Params params) {
    wait_for_previous_launch();
    arrive_at_cluster();
    if (kRight) wait_for_cluster();
    out(params) = 1;
}

template <bool kRight>
__global__ void of_no_block(Params params) {
    wait_for_previous_launch();
    KVC_SHARED(int, values, 64);
    synchronize_cluster();
    values.of_block(kRight ? rank(params) : params.blocks)[thread()] = 1;
    synchronize_cluster();
}

template <bool kRight>
__global__ void past_the_end_of_anothers(Params params) {
    wait_for_previous_launch();
    KVC_SHARED(int, values, 64);
    synchronize_cluster();
    values.of_block(next(params))[thread() + (kRight ? 0 : 1)] = 1;
    synchronize_cluster();
}

struct Toy {
    const char* name;
    void (*run[2])(const char* name, int grid, int blocks, Stream& stream, const Params& params);  // wrong, right
};
template <auto kKernel>
void run(const char* name, int grid, int blocks, Stream& stream, const Params& params) {
    launch<kKernel>(name, grid, 64, 512, stream, params, blocks);
}
#define TOY(name)                                    \
    {                                                \
        #name, { run<name<false>>, run<name<true>> } \
    }
const Toy kToys[] = {
    TOY(written_to_the_next),
    TOY(read_from_the_last),
    TOY(written_after_arriving),
    TOY(announced),
    TOY(announced_behind_a_fence),
    TOY(counted),
    TOY(through_global_memory),
    TOY(before_it_has_begun),
    TOY(leaves_early),
    TOY(exits_before_the_barrier),
    TOY(at_a_barrier_of_the_block),
    TOY(at_two_lines),
    TOY(arrives_twice),
    TOY(waits_without_arriving),
    TOY(exits_without_waiting),
    TOY(of_no_block),
    TOY(past_the_end_of_anothers),
};

}  // namespace
}  // namespace kvc

// Null for an unknown name.
extern "C" const char* run_clusters(const char* name, int right, int grid, int blocks, int* out) {
    for (const kvc::Toy& toy : kvc::kToys) {
        if (std::strcmp(toy.name, name) != 0) continue;
        return message_of([&](kvc::Stream& stream) { toy.run[right](name, grid, blocks, stream, {out, blocks}); });
    }
    return nullptr;
}

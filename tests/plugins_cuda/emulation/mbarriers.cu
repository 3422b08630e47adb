// Kernels whose blocks send each other asynchronous stores, or copy in bulk: correct ones, and one mistake each. Compiled with
// -fsanitize=thread, so that the race detector sees them. Blocks of 64 threads, two clusters.
#include "emulation/toy.h"
#include "kernels/cluster_inbox.cuh"
#include "kernels/shared.cuh"

#include <cstring>

namespace kvc {
namespace {

constexpr uint32_t kBytes = 64 * sizeof(int);  // of a number from every thread

struct Params {
    int* out;  // [blocks, 64]
    int blocks;
};

__device__ int thread() { return static_cast<int>(threadIdx.x); }
__device__ int rank(const Params& params) { return static_cast<int>(blockIdx.x) % params.blocks; }
__device__ int next(const Params& params) { return (rank(params) + 1) % params.blocks; }
__device__ int number(const Params&) { return 100 * static_cast<int>(blockIdx.x) + thread(); }
__device__ int& out(const Params& params) { return params.out[blockIdx.x * 64 + threadIdx.x]; }

__device__ void open(const Inbox& inbox, uint32_t bytes = kBytes, bool is_told = true) {
    if (thread() == 0) {
        inbox.make();
        inbox.expect(bytes);
        if (is_told) fence_inboxes();
    }
}

__device__ void meet() {
    announce_to_cluster();
    wait_for_cluster();
}

// Every block gets the numbers that the block before it sends.
template <bool kRight>
__global__ void sent_to_the_next(Params params) {
    wait_for_previous_launch();
    KVC_SHARED(int, values, 64);
    KVC_SHARED(uint64_t, counters, 1);
    const Inbox inbox = {counters};
    open(inbox);
    meet();
    inbox.outgoing(values, next(params))[thread()] = number(params);
    if (kRight) inbox.wait();
    out(params) = values[thread() ^ 32];
    if (!kRight) inbox.wait();
}

// Of vectors of 8 and 16 bytes.
template <bool kRight>
__global__ void sent_in_vectors(Params params) {
    wait_for_previous_launch();
    KVC_SHARED(int, values, 64);
    KVC_SHARED(int, others, 64);
    KVC_SHARED(uint64_t, counters, 1);
    const Inbox inbox = {counters};
    open(inbox, 2 * kBytes);
    meet();
    const int first = 100 * static_cast<int>(blockIdx.x) + 4 * thread();
    if (thread() < 16) {
        inbox.outgoing(values, next(params)).cast<int4>()[thread()] = {first, first + 1, first + 2, first + 3};
        const auto pairs = inbox.outgoing(others, next(params)).cast<int2>();
        pairs[2 * thread()] = {first, first + 1};
        pairs[2 * thread() + (kRight ? 1 : 0)] = {first + 2, first + 3};
    }
    inbox.wait();
    out(params) = values[thread() ^ 32] + others[thread() ^ 32];
}

// A wait of one thread is not one of the others.
template <bool kRight>
__global__ void waited_for_by_one(Params params) {
    wait_for_previous_launch();
    KVC_SHARED(int, values, 64);
    KVC_SHARED(uint64_t, counters, 1);
    const Inbox inbox = {counters};
    open(inbox);
    meet();
    inbox.outgoing(values, next(params))[thread()] = number(params);
    if (thread() < kWarpSize) inbox.wait();
    if (kRight) __syncthreads();
    out(params) = values[thread() ^ 32];
    if (!kRight) __syncthreads();
}

// The second numbers come over the first ones: a block sends them once it has the others' answers.
template <bool kRight>
__global__ void sent_over_others(Params params) {
    wait_for_previous_launch();
    KVC_SHARED(int, values, 64);
    KVC_SHARED(int, answers, 64);
    KVC_SHARED(uint64_t, counters, 3);
    const Inbox first = {counters.part(0, 1)}, second = {counters.part(1, 1)}, answer = {counters.part(2, 1)};
    for (const Inbox& inbox : {first, second, answer}) open(inbox);
    meet();
    first.outgoing(values, next(params))[thread()] = 1;
    first.wait();
    int sum = kRight ? values[thread() ^ 32] : 0;
    __syncthreads();
    const int before = (rank(params) + params.blocks - 1) % params.blocks;
    answer.outgoing(answers, before)[thread()] = thread();
    answer.wait();
    if (!kRight) sum = values[thread() ^ 32];
    second.outgoing(values, next(params))[thread()] = 2;
    second.wait();
    out(params) = sum + values[thread() ^ 32];
}

// Asynchronous stores order no global memory.
template <bool kRight>
__global__ void global_memory_beside(Params params) {
    wait_for_previous_launch();
    KVC_SHARED(int, values, 64);
    KVC_SHARED(uint64_t, counters, 1);
    const Inbox inbox = {counters};
    open(inbox);
    meet();
    out(params) = thread();
    inbox.outgoing(values, next(params))[thread()] = thread();
    inbox.wait();
    if (kRight) synchronize_cluster();
    const int before = (rank(params) + params.blocks - 1) % params.blocks;
    const int other = static_cast<int>(blockIdx.x) - rank(params) + before;
    const int value = params.out[other * 64 + thread()] + values[thread()];
    synchronize_cluster();
    out(params) = value;
}

// Two blocks send to one place.
template <bool kRight>
__global__ void sent_by_two(Params params) {
    wait_for_previous_launch();
    KVC_SHARED(int, values, 128);
    KVC_SHARED(uint64_t, counters, 1);
    const Inbox inbox = {counters};
    open(inbox, 2 * kBytes);
    meet();
    for (int to = 0; to < 2; ++to) {
        inbox.outgoing(values, to)[thread() + (kRight ? rank(params) : 0) * 64] = number(params);
    }
    inbox.wait();
    out(params) = values[thread()];
}

// ---- Copies in bulk: a block copies its row of numbers into its own shared memory

__device__ int* own_row(const Params& params) { return params.out + blockIdx.x * 64; }

__device__ void open_for_own(const Inbox& inbox) {
    open(inbox, kBytes, false);
    __syncthreads();
}

template <bool kRight>
__global__ void copied_in_bulk(Params params) {
    wait_for_previous_launch();
    KVC_SHARED(int, values, 64);
    KVC_SHARED(uint64_t, counters, 1);
    const Inbox inbox = {counters};
    open_for_own(inbox);
    if (thread() < 2) inbox.copy(values.part(32 * thread(), 32), own_row(params) + 32 * thread(), kBytes / 2);
    if (kRight) inbox.wait();
    const int value = values[thread() ^ 32];
    if (!kRight) inbox.wait();
    out(params) = value + 1;
}

// Its source may change once the bytes are there.
template <bool kRight>
__global__ void written_under_a_copy(Params params) {
    wait_for_previous_launch();
    KVC_SHARED(int, values, 64);
    KVC_SHARED(uint64_t, counters, 1);
    const Inbox inbox = {counters};
    open_for_own(inbox);
    if (thread() == 0) inbox.copy(values, own_row(params), kBytes);
    if (!kRight) out(params) = thread();
    inbox.wait();
    out(params) = values[thread()];
}

// Its target may be written once the bytes are there.
template <bool kRight>
__global__ void written_over_a_copy(Params params) {
    wait_for_previous_launch();
    KVC_SHARED(int, values, 64);
    KVC_SHARED(uint64_t, counters, 1);
    const Inbox inbox = {counters};
    open_for_own(inbox);
    if (thread() == 0) inbox.copy(values, own_row(params), kBytes);
    if (kRight) inbox.wait();
    if (thread() == 5) values[5] = 7;
    if (!kRight) inbox.wait();
    __syncthreads();
    out(params) = values[thread()];
}

// A barrier does not tell a copy what threads have written before: it goes by another proxy.
template <bool kRight>
__global__ void copied_over_what_was_written(Params params) {
    wait_for_previous_launch();
    KVC_SHARED(int, values, 128);
    KVC_SHARED(uint64_t, counters, 1);
    const Inbox inbox = {counters};
    values[64 + thread()] = 1;
    open_for_own(inbox);
    if (thread() == 0) inbox.copy(values.part(kRight ? 0 : 64, 64), own_row(params), kBytes);
    inbox.wait();
    out(params) = values[thread() + (kRight ? 0 : 64)];
}

template <bool kRight>
__global__ void copied_from_what_was_written(Params params) {
    wait_for_previous_launch();
    KVC_SHARED(int, values, 64);
    KVC_SHARED(uint64_t, counters, 1);
    const Inbox inbox = {counters};
    if (!kRight) out(params) = thread();
    open_for_own(inbox);
    if (thread() == 0) inbox.copy(values, own_row(params), kBytes);
    inbox.wait();
    out(params) = values[thread()];
}

// ---- Mistakes that are not races

template <bool kRight>
__global__ void copied_more_than_expected(Params params) {
    wait_for_previous_launch();
    KVC_SHARED(int, values, 128);
    KVC_SHARED(uint64_t, counters, 1);
    const Inbox inbox = {counters};
    open_for_own(inbox);
    if (thread() == 0) inbox.copy(values, own_row(params), kRight ? kBytes : kBytes + 16);
    inbox.wait();
    out(params) = 1;
}

template <bool kRight>
__global__ void copied_in_part_vectors(Params params) {
    wait_for_previous_launch();
    KVC_SHARED(int, values, 64);
    KVC_SHARED(uint64_t, counters, 1);
    const Inbox inbox = {counters};
    open_for_own(inbox);
    if (thread() == 0) inbox.copy(values, own_row(params), kRight ? kBytes : kBytes - 8);
    inbox.wait();
    out(params) = 1;
}

template <bool kRight>
__global__ void ends_before_its_copy(Params params) {
    wait_for_previous_launch();
    KVC_SHARED(int, values, 64);
    KVC_SHARED(uint64_t, counters, 1);
    const Inbox inbox = {counters};
    open_for_own(inbox);
    if (thread() == 0) inbox.copy(values, own_row(params), kBytes);
    if (kRight) inbox.wait();
}

template <bool kRight>
__global__ void too_few_bytes(Params params) {
    wait_for_previous_launch();
    KVC_SHARED(int, values, 64);
    KVC_SHARED(uint64_t, counters, 1);
    const Inbox inbox = {counters};
    open(inbox);
    meet();
    if (kRight || thread() != 7) inbox.outgoing(values, next(params))[thread()] = number(params);
    inbox.wait();
    out(params) = 1;
}

template <bool kRight>
__global__ void too_many_bytes(Params params) {
    wait_for_previous_launch();
    KVC_SHARED(int, values, 64);
    KVC_SHARED(uint64_t, counters, 1);
    const Inbox inbox = {counters};
    open(inbox, kRight ? kBytes : kBytes - 2);
    meet();
    inbox.outgoing(values, next(params))[thread()] = number(params);
    inbox.wait();
    out(params) = 1;
}

// A store more than the phase has, which belongs to the next.
template <bool kRight>
__global__ void a_store_too_many(Params params) {
    wait_for_previous_launch();
    KVC_SHARED(int, values, 128);
    KVC_SHARED(uint64_t, counters, 1);
    const Inbox inbox = {counters};
    open(inbox);
    meet();
    inbox.outgoing(values, next(params))[thread()] = number(params);
    inbox.wait();
    synchronize_cluster();
    if (!kRight && thread() == 3) inbox.outgoing(values, next(params))[64] = 1;
    synchronize_cluster();
}

template <bool kRight>
__global__ void without_a_fence(Params params) {
    wait_for_previous_launch();
    KVC_SHARED(int, values, 64);
    KVC_SHARED(uint64_t, counters, 1);
    const Inbox inbox = {counters};
    open(inbox, kBytes, kRight);
    meet();
    __syncthreads();
    inbox.outgoing(values, next(params))[thread()] = number(params);
    inbox.wait();
    out(params) = 1;
}

// The fence comes behind the arrival that should tell of it.
template <bool kRight>
__global__ void a_fence_too_late(Params params) {
    wait_for_previous_launch();
    KVC_SHARED(int, values, 64);
    KVC_SHARED(uint64_t, counters, 1);
    const Inbox inbox = {counters};
    open(inbox, kBytes, kRight);
    announce_to_cluster();
    if (!kRight && thread() == 0) fence_inboxes();
    wait_for_cluster();
    __syncthreads();
    inbox.outgoing(values, next(params))[thread()] = number(params);
    inbox.wait();
    out(params) = 1;
}

template <bool kRight>
__global__ void before_a_barrier_of_the_block(Params params) {
    wait_for_previous_launch();
    KVC_SHARED(int, values, 64);
    KVC_SHARED(uint64_t, counters, 1);
    const Inbox inbox = {counters};
    open(inbox, kBytes, false);
    if (kRight) __syncthreads();
    inbox.outgoing(values, rank(params))[thread()] = number(params);
    inbox.wait();
    out(params) = 1;
}

template <bool kRight>
__global__ void before_the_cluster_has_met(Params params) {
    wait_for_previous_launch();
    KVC_SHARED(int, values, 64);
    KVC_SHARED(uint64_t, counters, 1);
    const Inbox inbox = {counters};
    open(inbox);
    if (kRight) meet();
    inbox.outgoing(values, next(params))[thread()] = number(params);
    if (!kRight) meet();
    inbox.wait();
}

template <bool kRight>
__global__ void at_no_mbarrier(Params params) {
    wait_for_previous_launch();
    KVC_SHARED(int, values, 64);
    KVC_SHARED(uint64_t, counters, 2);
    const Inbox inbox = {counters.part(0, 1)}, other = {counters.part(kRight ? 0 : 1, 1)};
    open(inbox);
    meet();
    other.outgoing(values, next(params))[thread()] = number(params);
    inbox.wait();
}

template <bool kRight>
__global__ void made_twice(Params params) {
    wait_for_previous_launch();
    KVC_SHARED(int, values, 64);
    KVC_SHARED(uint64_t, counters, 1);
    const Inbox inbox = {counters};
    open(inbox);
    if (!kRight && thread() == 0) inbox.make();
    meet();
    inbox.outgoing(values, next(params))[thread()] = number(params);
    inbox.wait();
}

template <bool kRight>
__global__ void expected_twice(Params params) {
    wait_for_previous_launch();
    KVC_SHARED(int, values, 64);
    KVC_SHARED(uint64_t, counters, 1);
    const Inbox inbox = {counters};
    open(inbox);
    if (!kRight && thread() == 0) inbox.expect(4);
    meet();
    inbox.outgoing(values, next(params))[thread()] = number(params);
    inbox.wait();
}

template <bool kRight>
__global__ void ends_before_its_bytes(Params params) {
    wait_for_previous_launch();
    KVC_SHARED(int, values, 64);
    KVC_SHARED(uint64_t, counters, 1);
    const Inbox inbox = {counters};
    open(inbox);
    meet();
    inbox.outgoing(values, next(params))[thread()] = number(params);
    if (kRight || rank(params) != 1) inbox.wait();
}

// Bytes for a block that expects none and waits for none.
template <bool kRight>
__global__ void sent_to_one_that_has_ended(Params params) {
    wait_for_previous_launch();
    KVC_SHARED(int, values, 64);
    KVC_SHARED(uint64_t, counters, 1);
    const Inbox inbox = {counters};
    if (thread() == 0) {
        inbox.make();
        if (kRight || rank(params) != 1) inbox.expect(kBytes);
        fence_inboxes();
    }
    meet();
    inbox.outgoing(values, next(params))[thread()] = number(params);
    if (kRight || rank(params) != 1) inbox.wait();
}

template <bool kRight>
__global__ void between_vectors(Params params) {
    wait_for_previous_launch();
    KVC_SHARED(int, values, 64);
    KVC_SHARED(uint64_t, counters, 1);
    const Inbox inbox = {counters};
    open(inbox, kBytes);
    meet();
    if (thread() < 16) {
        int* const first = &values[4 * thread() + (kRight || thread() == 15 ? 0 : 1)];
        platform::store_async(reinterpret_cast<int4*>(first), &counters[0], next(params), int4{1, 2, 3, 4});
    }
    inbox.wait();
}

struct Toy {
    const char* name;
    void (*run[2])(const char* name, int grid, int blocks, Stream& stream, const Params& params);  // wrong, right
};
template <auto kKernel>
void run(const char* name, int grid, int blocks, Stream& stream, const Params& params) {
    launch<kKernel>(name, grid, 64, 0, stream, params, blocks);
}
#define TOY(name)                                    \
    {                                                \
        #name, { run<name<false>>, run<name<true>> } \
    }
const Toy kToys[] = {
    TOY(sent_to_the_next),
    TOY(sent_in_vectors),
    TOY(waited_for_by_one),
    TOY(sent_over_others),
    TOY(global_memory_beside),
    TOY(sent_by_two),
    TOY(copied_in_bulk),
    TOY(written_under_a_copy),
    TOY(written_over_a_copy),
    TOY(copied_over_what_was_written),
    TOY(copied_from_what_was_written),
    TOY(copied_more_than_expected),
    TOY(copied_in_part_vectors),
    TOY(ends_before_its_copy),
    TOY(too_few_bytes),
    TOY(too_many_bytes),
    TOY(a_store_too_many),
    TOY(without_a_fence),
    TOY(a_fence_too_late),
    TOY(before_a_barrier_of_the_block),
    TOY(before_the_cluster_has_met),
    TOY(at_no_mbarrier),
    TOY(made_twice),
    TOY(expected_twice),
    TOY(ends_before_its_bytes),
    TOY(sent_to_one_that_has_ended),
    TOY(between_vectors),
};

}  // namespace
}  // namespace kvc

// Null for an unknown name.
extern "C" const char* run_mbarriers(const char* name, int right, int grid, int blocks, int* out) {
    for (const kvc::Toy& toy : kvc::kToys) {
        if (std::strcmp(toy.name, name) != 0) continue;
        return message_of([&](kvc::Stream& stream) { toy.run[right](name, grid, blocks, stream, {out, blocks}); });
    }
    return nullptr;
}

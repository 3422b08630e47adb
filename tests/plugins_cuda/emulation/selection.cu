// The selection of kernels/radix_select.cuh and kernels/pool_select.cuh on given keys and votes.
#include "emulation/toy.h"
#include "kernels/radix_select.cuh"
#include "src/pool_select.h"

namespace kvc {
namespace {

struct RadixParams {
    const float* values;     // [n]
    const int32_t* weights;  // [n]
    int32_t n;
    int32_t quota;
    uint32_t* threshold;  // [2]: key, ties
    int32_t* slots;       // [n]: where the output of each element starts; left alone where it has none
    int32_t* counts;      // [n]
};

template <int kThreads, int kCopies>
__global__ void __launch_bounds__(kThreads) radix_select(const RadixParams params) {
    wait_for_previous_launch();
    KVC_SHARED(uint32_t, histogram, kHistogramWords<kCopies>);
    KVC_SHARED(uint32_t, sums, kRadixBins);
    KVC_SHARED(int32_t, shares, kEmissionWords<kThreads>);
    const auto key_at = [&](int32_t i) { return order_key(params.values[i]); };
    const auto weight_at = [&](int32_t i) { return params.weights[i]; };
    const auto emit = [&](int32_t i, int32_t slot, int32_t count) {
        params.slots[i] = slot;
        params.counts[i] += count;
    };
    const Threshold threshold =
        find_threshold<kThreads, kCopies>(params.n, params.quota, key_at, weight_at, histogram, sums);
    emit_ascending<kThreads>(params.n, threshold, key_at, weight_at, shares, emit);
    if (threadIdx.x == 0) {
        params.threshold[0] = threshold.key;
        params.threshold[1] = static_cast<uint32_t>(threshold.ties);
    }
}

}  // namespace
}  // namespace kvc

// threads: 64 (one histogram), 256 (four copies) or 1024 (one copy per lane).
extern "C" const char* radix_select(int threads, const float* values, const int32_t* weights, int n, int quota,
                                    uint32_t* threshold, int32_t* slots, int32_t* counts) {
    const kvc::RadixParams params = {values, weights, n, quota, threshold, slots, counts};
    const auto run = [&]<int kThreads, int kCopies>() {
        return message_of([&](kvc::Stream& stream) {
            kvc::launch<kvc::radix_select<kThreads, kCopies>>("radix_select", dim3(1), dim3(kThreads), 0, stream,
                                                              params);
        });
    };
    if (threads == 64) return run.operator()<64, 1>();
    if (threads == 256) return run.operator()<256, 4>();
    return run.operator()<1024, 32>();
}

// votes [1,heads,length], one row of `n` tokens -> keys [1,heads,length], indices [1,heads,capacity], stored [1].
extern "C" const char* pool_select(const float* votes, int heads, int window, int pool_kernel, int64_t length,
                                   int64_t n, int64_t budget, int64_t capacity, uint32_t* keys, int64_t* stored,
                                   int32_t* indices) {
    const kvc::PoolSelectParams params = {1,     heads, window,  pool_kernel, length, budget, capacity,
                                          votes, &n,    nullptr, keys,        stored, indices};
    return message_of([&](kvc::Stream& stream) { kvc::launch_pool_select(params, stream); });
}

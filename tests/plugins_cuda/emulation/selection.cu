// The kernels' selection on given keys and votes, and the softmax of given page scores.
#include "emulation/toy.h"
#include "kernels/cluster_select.cuh"
#include "kernels/emit_selected.cuh"
#include "kernels/page_statistics.cuh"
#include "kernels/radix_select.cuh"
#include "kvc/limits.h"
#include "src/pool_select.h"

namespace kvc {
namespace {

struct RadixParams {
    const float* values;     // [n]
    const int32_t* weights;  // [n]
    int32_t n;
    int32_t quota;
    int32_t single;       // see find_threshold
    uint32_t* threshold;  // [3]: key, ties, mask
    int32_t* slots;       // [n]: where the output of each element starts; left alone where it has none
    int32_t* counts;      // [n]
};

// kKeys in the registers of each thread; 0: all in memory.
template <int kThreads, int kCopies, int kKeys>
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
    const auto select = [&](const auto& keys) {
        const Threshold threshold =
            find_threshold<kThreads, kCopies>(keys, params.quota, params.single, weight_at, histogram, sums);
        emit_ascending<kThreads>(keys, threshold, weight_at, shares, emit);
        if (threadIdx.x == 0) {
            params.threshold[0] = threshold.key;
            params.threshold[1] = static_cast<uint32_t>(threshold.ties);
            params.threshold[2] = threshold.mask;
        }
    };
    clear_histogram<kThreads, kCopies>(histogram);
    __syncthreads();
    if constexpr (kKeys == 0) {
        select(memory_keys<kThreads>(params.n, key_at));
    } else {
        RegisterKeys<kKeys> keys{};
        keys.first = static_cast<int32_t>(threadIdx.x) * kKeys;
        keys.count = params.n - keys.first;
        for (int32_t j = 0; j < kKeys; ++j) keys.keys[j] = j < keys.count ? key_at(keys.first + j) : 0xffffffffu;
        select(keys);
    }
}

constexpr int kWideThreads = 256;

// With the keys in shared memory and digits of 11 bits, as the blocks of a cluster select.
__global__ void __launch_bounds__(kWideThreads) wide_select(const RadixParams params) {
    wait_for_previous_launch();
    KVC_SHARED(uint32_t, histograms, kWideWords);
    KVC_SHARED(int32_t, totals, kWideThreads / kWarpSize);
    KVC_SHARED(FoundDigit, found, 1);
    KVC_SHARED(int32_t, shares, kEmissionWords<kWideThreads>);
    const int32_t n = params.n, room = n + SharedKeys::kInFlight;
    const SharedSpan<uint32_t> keys = dynamic_shared<uint32_t>(0, room);
    for (int32_t i = threadIdx.x; i < n; i += kWideThreads) keys[i] = order_key(params.values[i]);
    clear_wide_histograms<kWideThreads>(histograms);
    __syncthreads();
    const auto weight_at = [&](int32_t i) { return params.weights[i]; };
    const auto emit = [&](int32_t i, int32_t slot, int32_t count) {
        params.slots[i] = slot;
        params.counts[i] += count;
    };
    const SharedKeys own = shared_keys<kWideThreads>(keys, n);
    const Threshold threshold = select_among_all<kWideThreads>(own, params.quota, params.single, weight_at,
                                                               {histograms, totals, found, shares}, emit);
    if (threadIdx.x == 0) {
        params.threshold[0] = threshold.key;
        params.threshold[1] = static_cast<uint32_t>(threshold.ties);
        params.threshold[2] = threshold.mask;
    }
}

struct StatisticsParams {
    const float* scores;  // [heads,pages]
    int32_t group;
    int32_t pages;
    PageTokens tokens;
    ScoreStatistics* units;  // [heads,units_of(pages)]
    HeadSoftmax* heads;      // [heads]
};

constexpr int kStatisticsParts = 16;

template <int kThreads>
__global__ void __launch_bounds__(kThreads) page_statistics(const StatisticsParams params) {
    wait_for_previous_launch();
    constexpr int kPages = 2;
    constexpr int32_t kAtOnce = kThreads * kPages;
    KVC_SHARED(HeadSoftmax, heads, KVC_LARGEST_GROUP);
    const int32_t units = units_of(params.pages);
    for (int32_t head = 0; head < params.group; ++head) {
        for (int32_t first = 0; first < params.pages; first += kAtOnce) {
            const int32_t page = first + static_cast<int32_t>(threadIdx.x) * kPages;
            float scores[1][kPages], tokens[1][kPages];
            for (int32_t k = 0; k < kPages; ++k) {
                const bool inside = page + k < params.pages;
                scores[0][k] = inside ? params.scores[head * params.pages + page + k] : minus_infinity();
                tokens[0][k] = params.tokens.of(page + k);
            }
            ScoreStatistics unit[1];
            unit_statistics(scores, tokens, unit);
            if (page % kUnitPages == 0 && page < params.pages) params.units[head * units + page / kUnitPages] = unit[0];
        }
    }
    __syncthreads();
    head_softmax<kThreads, 2, kStatisticsParts>(params.units, units, units, params.group, heads);
    if (static_cast<int32_t>(threadIdx.x) < params.group) params.heads[threadIdx.x] = heads[threadIdx.x];
}

}  // namespace
}  // namespace kvc

// By 256 threads or 512. Pages of `page_size` tokens, `in_last` in the last one; units [group,units_of(pages),2], heads
// [group,2].
extern "C" const char* page_statistics(int threads, const float* scores, int group, int pages, int page_size,
                                       int in_last, kvc::ScoreStatistics* units, kvc::HeadSoftmax* heads) {
    const kvc::PageTokens tokens = {pages - 1, static_cast<float>(in_last), static_cast<float>(page_size)};
    const kvc::StatisticsParams params = {scores, group, pages, tokens, units, heads};
    const auto run = [&]<int kThreads>() {
        return message_of([&](kvc::Stream& stream) {
            kvc::launch<kvc::page_statistics<kThreads>>("page_statistics", dim3(1), dim3(kThreads), 0, stream, params);
        });
    };
    return threads == 256 ? run.operator()<256>() : run.operator()<512>();
}

// threads: 64 (one histogram), 256 (four copies) or 1024 (one copy per lane). in_registers: 4, 8 or 16 keys of each
// thread, which must be enough for n; 0: none.
extern "C" const char* radix_select(int threads, int in_registers, const float* values, const int32_t* weights, int n,
                                    int quota, int single, uint32_t* threshold, int32_t* slots, int32_t* counts) {
    const kvc::RadixParams params = {values, weights, n, quota, single, threshold, slots, counts};
    const auto launch = [&]<int kThreads, int kCopies, int kKeys>() {
        return message_of([&](kvc::Stream& stream) {
            kvc::launch<kvc::radix_select<kThreads, kCopies, kKeys>>("radix_select", dim3(1), dim3(kThreads), 0, stream,
                                                                     params);
        });
    };
    const auto run = [&]<int kThreads, int kCopies>() {
        if (in_registers == 4) return launch.template operator()<kThreads, kCopies, 4>();
        if (in_registers == 8) return launch.template operator()<kThreads, kCopies, 8>();
        if (in_registers == 16) return launch.template operator()<kThreads, kCopies, 16>();
        return launch.template operator()<kThreads, kCopies, 0>();
    };
    if (threads == 64) return run.operator()<64, 1>();
    if (threads == 256) return run.operator()<256, 4>();
    return run.operator()<1024, 32>();
}

// By 256 threads; at most 8192 values.
extern "C" const char* wide_select(const float* values, const int32_t* weights, int n, int quota, int single,
                                   uint32_t* threshold, int32_t* slots, int32_t* counts) {
    const kvc::RadixParams params = {values, weights, n, quota, single, threshold, slots, counts};
    const size_t bytes = sizeof(uint32_t) * (n + kvc::SharedKeys::kInFlight);
    return message_of([&](kvc::Stream& stream) {
        kvc::launch<kvc::wide_select>("wide_select", dim3(1), dim3(kvc::kWideThreads), bytes, stream, params);
    });
}

// votes [1,heads,length], one row of `n` tokens -> keys [1,heads,key_stride], indices [1,heads,capacity], stored [1]. As
// launched for these sizes; by clusters where `threads` is not 0: of 256 with 16 keys or 32, or 512 with 32.
extern "C" const char* pool_select(int threads, int of_thread, const float* votes, int heads, int window,
                                   int pool_kernel, int64_t length, int64_t n, int64_t budget, int64_t capacity,
                                   int64_t key_stride, uint32_t* keys, int64_t* stored, int32_t* indices) {
    const kvc::PoolSelectParams params = {1,  heads,   window,  pool_kernel, length,     budget, capacity, votes,
                                          &n, nullptr, nullptr, nullptr,     key_stride, keys,   stored,   indices};
    return message_of([&](kvc::Stream& stream) {
        if (threads == 0) {
            return kvc::launch_pool_select(params, stream);
        }
        kvc::launch_pooling(params, stream);
        const bool launched = threads == 512    ? kvc::launch_select_in_cluster<512, 32>(params, stream)
                              : of_thread == 32 ? kvc::launch_select_in_cluster<256, 32>(params, stream)
                                                : kvc::launch_select_in_cluster<256, 16>(params, stream);
        if (!launched) {
            throw kvc::LaunchError("the device has no clusters");
        }
    });
}

// The part of a decode step that runs once per KV head, before the work on its pages: rotates and stores the token,
// and chooses the channels that score the pages, with their factors.
//
// Source: RocketKV (arXiv 2502.14051), section 3.3, steps 2 to 4 and 6 of hybrid attention (score_channels.cuh), and the
// extremes that pages keep (append.cuh).
//
//   in   the new token: query [B,H,D], key and value [B,G,D], which it rotates where that is left to it (new_token.cuh)
//   out  k_cache, v_cache [B,G,C,D] and bounds [B,G,2D,P] (row d: page maxima of K, row D+d: of -K) with the token in
//        them; arrivals [B,G] = 0 for the attention's merge; of rows that do not read all their entries anyway, the
//        prepared query (prepared_query.cuh); the rotated query [B,H,D] where it is rotated here
//
// One block per (row, KV head), grid (G, B), a thread per channel: latency, not work. All loads that wait for nothing are
// under way together, those that wait for the row's length next; the token is stored while its channels are ranked, and
// the page's bounds are written last.
//
// Bytes per KV head: g D s, 4 D s for the token (s bytes per element), 2D sectors of 32 bytes of bounds, read and written,
// and the prepared query; to rotate, g D s written and 4 D read.
//
// Determinism: see score_channels.cuh and append.cuh. A row's bits depend on the row alone.
#pragma once

#include <cstdint>

#include "kernels/append.cuh"
#include "kernels/attended_row.cuh"
#include "kernels/dependent_launch.cuh"
#include "kernels/prepared_query.cuh"
#include "kernels/score_channels.cuh"
#include "kernels/shared.cuh"

namespace kvc {

static_assert(kScoreThreads >= kAppendThreads, "every channel has a thread");

template <class T>
struct PrepareStepParams {
    AppendParams<T> append;  // the new token, the caches, and the rows' lengths
    void* bounds;            // [B,G,2D,P], of T or fp8
    uint4* prepared;         // [B,G,vectors of a prepared query]; null if every row reads all its entries
    AttentionLimits limits;
    int32_t page_size;  // p
    int32_t pages;      // P
    int32_t top_r;      // r
    bool fp8_bounds;
};

template <bool kInFormat, int kHeads, class T>
__device__ __forceinline__ void prepare_token(const PrepareStepParams<T>& params) {
    start_next_launch();
    wait_for_previous_launch();
    KVC_SHARED(int32_t, chosen, KVC_LARGEST_HEAD_SIZE);
    using Scorer = PageScorer<T, kHeads>;
    const AppendParams<T>& append = params.append;
    const int size = append.head_size, group = append.group, kv_head = static_cast<int>(blockIdx.x);
    const GroupQuery query = {dynamic_shared<float>(0, group * size), chosen, group, size, params.top_r};
    const int64_t row_number = blockIdx.y, head = row_number * append.kv_heads + kv_head;
    const int64_t cache_length = append.cache_lengths[row_number];
    const HeadChannel<T> channel(append.token, row_number, size);
    const TokenChannel<T> entry = append.entry_of(channel, row_number, kv_head);
    GroupQueryReader<T, 4, false> reader(channel, append.query_of(row_number, kv_head), query);
    const QueryChannel own = reader.finish(append.rotated_of(head), [](int, const T&) {});
    if (threadIdx.x == 0) {
        append.arrivals[head] = 0;
    }
    const AttendedRow row = attended_row(cache_length, params.limits);
    if (row.length == 0) {
        return;
    }
    const int64_t cache = head * append.capacity;
    const int page = (row.length - 1) / params.page_size;
    const BoundTable<T> bounds(params.bounds, params.fp8_bounds);
    const JoinedChannel<T> joined(bounds.from(head * 2 * size * params.pages), size, params.pages, page);
    const float key =
        store_token<kInFormat>(entry, append.keys.from(cache), append.values.from(cache), cache_length, size);
    if (!row.all) {
        choose_channels(own, query);
        __syncthreads();
        const int vectors = prepared_layout<Scorer>(params.top_r, group).total;
        write_prepared<Scorer>(query, params.prepared + head * vectors);
    }
    joined.raise(key);
}

// Dynamic shared memory: float [g,D]. Grid (G, B).
template <class T, int kHeads>
__global__ void __launch_bounds__(kScoreThreads) prepare_step(const PrepareStepParams<T> params) {
    prepare_token<false, kHeads>(params);
}

// The same for caches in a format.
template <class T, int kHeads>
__global__ void __launch_bounds__(kScoreThreads) prepare_step_in_format(const PrepareStepParams<T> params) {
    prepare_token<true, kHeads>(params);
}

}  // namespace kvc

// Page scores of fp32 caches, whose bounds are fp32 or fp8, by multiply-adds: kChannelParts runs of channels side by side,
// kPageLanes threads each.
//
// Determinism: channels are added best first within a run, the runs in order. The order is the same for every page.
#pragma once

#include <cstdint>

#include "kernels/scored_chunk.cuh"
#include "kernels/staged_bounds.cuh"

namespace kvc {

constexpr int kChannelParts = 4;                           // runs of channels, summed by different threads
constexpr int kPageLanes = kScoreThreads / kChannelParts;  // threads of one run
constexpr int kLanePages = 2;                              // pages of a thread
constexpr int kBlockPages = kPageLanes * kLanePages;       // pages scored between two barriers
static_assert(kBlockPages % kUnitPages == 0, "no unit is in two of them");

// A tile of kHeads query heads on one channel, read as one vector.
template <int kHeads>
struct alignas(sizeof(float) * kHeads) HeadTile {
    float value[kHeads];
};

// The query in the scorer's form does not depend on Bound.
template <int kHeads, class Bound>
class FmaScorer {
public:
    static constexpr int kSpareVectors = 0;  // at the end of a staged row
    static constexpr __host__ __device__ int rows(int channels) { return channels; }

    // The query in the scorer's form: HeadTile [tiles,r].
    static constexpr __host__ __device__ int query_vectors(int channels, int group) {
        return (channels * tiles(group) * kHeads + kVectorWidth<float> - 1) / kVectorWidth<float>;
    }

    // Shared memory besides the staged bounds and the query.
    static constexpr int kScratchBytes = kChannelParts * kHeads * kBlockPages * static_cast<int>(sizeof(float));

    // Writes the query on the chosen channels into the vectors from `to` on.
    static __device__ __forceinline__ void write_query(const GroupQuery& query, uint4* to) {
        const int count = tiles(query.group) * query.channels;
        for (int i = static_cast<int>(threadIdx.x); i < count; i += kScoreThreads) {
            HeadTile<kHeads> tile;
#pragma unroll
            for (int j = 0; j < kHeads; ++j) {
                tile.value[j] = query.factor(i / query.channels * kHeads + j, i % query.channels);
            }
            platform::store_vector_of(reinterpret_cast<HeadTile<kHeads>*>(to) + i, tile);
        }
    }

    // Where the query and the scratch memory start, in bytes of dynamic shared memory.
    __device__ __forceinline__ FmaScorer(int channels, int group, int query_start, int scratch_start)
        : query_(dynamic_shared<HeadTile<kHeads>>(query_start, channels * tiles(group))),
          partials_(dynamic_shared<float>(scratch_start, kScratchBytes / sizeof(float))) {}

    // Scores the pages of a chunk for all heads of the group.
    __device__ __forceinline__ void score(const StagedBounds<Bound>& staged, const ScoredHeads& heads,
                                          const ScoredChunk& chunk) const {
        for (int tile = 0; tile < tiles(heads.group); ++tile) {
            const SharedSpan<HeadTile<kHeads>> part = query_.part(tile * staged.rows, staged.rows);
            for (int page = 0; page < chunk.count; page += kBlockPages) {
                add_channels(staged, part, page, chunk.count);
                __syncthreads();
                write_sums(heads, tile * kHeads, chunk, page);
                __syncthreads();
            }
        }
    }

private:
    static constexpr __host__ __device__ int tiles(int group) { return (group + kHeads - 1) / kHeads; }

    // This thread's run of channels for its pages from first_page on, for one tile of heads -> partials.
    __device__ __forceinline__ void add_channels(const StagedBounds<Bound>& staged, SharedSpan<HeadTile<kHeads>> query,
                                                 int first_page, int count) const {
        const int channels = staged.rows;
        const int part = static_cast<int>(threadIdx.x) / kPageLanes;
        const int lane = static_cast<int>(threadIdx.x) % kPageLanes;
        const int run = (channels + kChannelParts - 1) / kChannelParts;
        const int end = (part + 1) * run < channels ? (part + 1) * run : channels;
        const int elements = channels * staged.row;
        const int low = first_page + lane < count ? first_page + lane : count - 1;
        const int high = low + kPageLanes < count ? low + kPageLanes : count - 1;
        const SharedSpan<Bound> pages[] = {staged.values.part(low, elements - low),
                                           staged.values.part(high, elements - high)};
        float sum[kLanePages][kHeads] = {};
#pragma unroll 4
        for (int i = part * run; i < end; ++i) {
            const HeadTile<kHeads> q = query[i];
            const int first = staged.start_of(i);
#pragma unroll
            for (int k = 0; k < kLanePages; ++k) {
                const float bound = to_float(pages[k][first]);
#pragma unroll
                for (int head = 0; head < kHeads; ++head) {
                    sum[k][head] += q.value[head] * bound;
                }
            }
        }
#pragma unroll
        for (int k = 0; k < kLanePages; ++k) {
#pragma unroll
            for (int head = 0; head < kHeads; ++head) {
                partials_[(part * kHeads + head) * kBlockPages + lane + k * kPageLanes] = sum[k][head];
            }
        }
    }

    // Adds the runs in order and writes up to kBlockPages pages from first_page on, for one tile of heads. Neighbouring
    // threads have neighbouring pages of one head, kLanePages each.
    __device__ __forceinline__ void write_sums(const ScoredHeads& heads, int first_head, const ScoredChunk& chunk,
                                               int first_page) const {
        static_assert(kHeads * kPageLanes <= kScoreThreads && kPageLanes % kWarpSize == 0, "a warp has one head");
        const int own = static_cast<int>(threadIdx.x) / kPageLanes;
        if (own >= kHeads) {
            return;
        }
        const int lane = static_cast<int>(threadIdx.x) % kPageLanes;
        const auto runs = partials_.template cast<PageTile<kLanePages>>();
        PageTile<kLanePages> sums[1] = {runs[own * kPageLanes + lane]};
#pragma unroll
        for (int part = 1; part < kChannelParts; ++part) {
            const PageTile<kLanePages> run = runs[(part * kHeads + own) * kPageLanes + lane];
#pragma unroll
            for (int k = 0; k < kLanePages; ++k) {
                sums[0].value[k] += run.value[k];
            }
        }
        write_page_scores(chunk, heads, first_head + own, first_page + lane * kLanePages, 0, sums);
    }

    SharedSpan<HeadTile<kHeads>> query_;  // [tiles,r]
    SharedSpan<float> partials_;          // [kChannelParts,kHeads,kBlockPages]
};

}  // namespace kvc

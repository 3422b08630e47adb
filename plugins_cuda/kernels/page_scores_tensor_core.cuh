// Page scores of fp16 and bf16 bounds on tensor cores: S[heads, pages] = Q[heads, channels] bounds[channels, pages], the
// query negated where a minimum is read as a negated maximum, which is exact in 16 bit.
//
// Heads are the 16 rows of a product, pages its 8 columns, a unit of the statistics (page_statistics.cuh). A warp
// scores two units at a time and needs no other warp: no barrier, no partial sums. A group of up to 4 heads fills a
// quarter of the rows; rows 4 to 7 repeat them, so that their lanes write the second unit while the others write the
// first.
//
// The query is in shared memory in operand order, one read for both units. One ldmatrix takes the bounds of a step for
// both. Rows are 16 bytes further apart than a multiple of 128 (kSpareVectors), so that eight of them are in different
// banks.
//
// Channels are taken kStepChannels at a time. Past the last one are rows of zeros, and a query of zeros.
//
// Determinism: a score is one chain of products, best channels first. The chain is the same for every page, chunk size
// and batch, so equal bounds give equal bits, if a tensor core treats its columns alike. It cuts where an fp32 addition
// rounds (docs/kernels/decode-selection.md).
#pragma once

#include <cstdint>

#include "kernels/mma.cuh"
#include "kernels/scored_chunk.cuh"
#include "kernels/staged_bounds.cuh"

namespace kvc {

// kHeads is the group rounded up to 4, 8 or 16.
template <class T, int kHeads>
class TensorCoreScorer {
    static constexpr int kStepChannels = 16;
    static constexpr int kUnits = 2;  // of a warp's tile
    static constexpr int kTilePages = kUnits * kUnitPages;
    static constexpr int kHalves = kHeads == 16 ? 2 : 1;  // of a product's rows that are heads
    static constexpr int kRows = kHeads / kHalves;        // heads in a half
    static constexpr int kQuad = 4;                       // lanes that share a row of the query
    static constexpr int kStepOperands = kRows * kQuad;   // 16-byte operands
    static_assert(kHeads == 4 || kHeads == 8 || kHeads == 16);

public:
    static constexpr int kSpareVectors = 1;  // at the end of a staged row
    static constexpr __host__ __device__ int rows(int channels) {
        return (channels + kStepChannels - 1) / kStepChannels * kStepChannels;
    }

    // Of the query as the scorer takes it: its operands.
    static constexpr __host__ __device__ int query_vectors(int channels, int) {
        return rows(channels) / kStepChannels * kStepOperands;
    }

    // Of shared memory, beside the staged bounds and the query.
    static constexpr int kScratchBytes = 0;

    // Writes the query on the chosen channels, so many vectors from `to` on; zeros past the last channel and head.
    static __device__ __forceinline__ void write_query(const GroupQuery& query, uint4* to) {
        const int count = query_vectors(query.channels, query.group);
        for (int i = static_cast<int>(threadIdx.x); i < count; i += kScoreThreads) {
            const int row = i % kStepOperands / kQuad;
            const int channel = i / kStepOperands * kStepChannels + i % kQuad * 2;
            Vec<T> operand;
#pragma unroll
            for (int j = 0; j < kVectorWidth<T>; ++j) {  // a word has two channels of a head
                const int word = j / 2;
                const float factor = query.factor(row + word % 2 * kRows, channel + word / 2 * 8 + j % 2);
                operand.values[j] = from_float<T>(factor);
            }
            platform::store_vector_of(to + i, operand);
        }
    }

    // Where the query starts, in bytes of dynamic shared memory.
    __device__ __forceinline__ TensorCoreScorer(int channels, int group, int query_start, int)
        : operands_(dynamic_shared<uint4>(query_start, query_vectors(channels, group))) {}

    // Scores the pages of a chunk for all heads of the group.
    __device__ __forceinline__ void score(const StagedBounds<T>& staged, const ScoredHeads& heads,
                                          const ScoredChunk& chunk) const {
        for (int page = warp_index() * kTilePages; page < chunk.count; page += kScoreWarps * kTilePages) {
            float sums[kUnits][4] = {};
            add_channels(staged, page, sums);
            write_tile(heads, chunk, page, sums);
        }
    }

private:
    __device__ __forceinline__ void add_channels(const StagedBounds<T>& staged, int page,
                                                 float (&sums)[kUnits][4]) const {
        // Of the four matrices, each lane gives one row: channels 0..7 and 8..15 for the first unit, then for the second.
        const int own_page = page + lane_index() / kStepChannels * kUnitPages;
        int row = staged.start_of(lane_index() % kStepChannels) + own_page;
        int own = lane_index() % kStepOperands;
#pragma unroll 4
        for (int channel = 0; channel < staged.rows; channel += kStepChannels) {
            const uint4 heads = operands_[own];
            uint32_t bounds[2 * kUnits];
            load_matrices_transposed(bounds, staged.values[row]);
#pragma unroll
            for (int unit = 0; unit < kUnits; ++unit) {
                mma_m16n8k16<T>(sums[unit], {heads.x, heads.y, heads.z, heads.w},
                                {bounds[2 * unit], bounds[2 * unit + 1]});
            }
            own += kStepOperands;
            row += kStepChannels * staged.row;
        }
    }

    // Lane 4 group + t has the sums of head `group` (and group + 8) and of pages 2t, 2t+1 of each unit.
    __device__ __forceinline__ void write_tile(const ScoredHeads& heads, const ScoredChunk& chunk, int page,
                                               const float (&sums)[kUnits][4]) const {
        const int group = lane_index() / kQuad, own_page = page + lane_index() % kQuad * kLanePages;
        if constexpr (kHeads == 4) {
            const bool second = group >= kRows;
            const float own[kLanePages] = {second ? sums[1][0] : sums[0][0], second ? sums[1][1] : sums[0][1]};
            write_page_scores(chunk, heads, group % kRows, own_page + (second ? kUnitPages : 0), own);
        } else {
#pragma unroll
            for (int unit = 0; unit < kUnits; ++unit) {
#pragma unroll
                for (int half = 0; half < kHalves; ++half) {
                    const float own[kLanePages] = {sums[unit][2 * half], sums[unit][2 * half + 1]};
                    write_page_scores(chunk, heads, group + half * kRows, own_page + unit * kUnitPages, own);
                }
            }
        }
    }

    // [steps, kRows, kQuad]: what lane 4 row + t multiplies. Without heads in it, the lower half of the rows is zero.
    SharedSpan<uint4> operands_;
};

}  // namespace kvc

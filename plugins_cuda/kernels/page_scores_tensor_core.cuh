// Page scores of fp16 and bf16 caches on tensor cores: S[heads, pages] = Q[heads, channels] bounds[channels, pages], the
// query negated where a minimum is read as a negated maximum, which is exact in 16 bit.
//
// Heads are the 16 rows of a product, pages its 8 columns. A warp scores two spans of pages at a time, a span being the
// pages of a 16-byte vector, whole units of the statistics (page_statistics.cuh). It needs no other warp: no barrier, no
// partial sums. A group of up to 4 heads fills a quarter of the rows; rows 4 to 7 repeat them, so that their lanes write
// the second span while the others write the first.
//
// The query is in shared memory in operand order, one read for both spans. One ldmatrix takes the bounds of a step for
// both. Rows are 16 bytes further apart than a multiple of 128 (kSpareVectors), so that eight of them are in different
// banks.
//
// A span of 16-bit bounds is 8 pages, one product. A span of fp8 is 16, two products: for ldmatrix the bounds of two
// neighbouring pages are one element, so a register has both on two channels. Its even bytes, widened, are an operand of
// the even pages, its odd bytes one of the odd pages; a lane's columns of both products are four neighbouring pages.
//
// Channels are taken kStepChannels at a time. Past the last one are rows of zeros, and a query of zeros.
//
// Determinism: a score is one chain of products, best channels first. The chain is the same for every page, chunk size
// and batch, so equal bounds give equal bits, if a tensor core treats its columns alike. It cuts where an fp32 addition
// rounds (docs/kernels/decode-selection.md).
#pragma once

#include <cstdint>

#include "kernels/fp8.cuh"
#include "kernels/mma.cuh"
#include "kernels/scored_chunk.cuh"
#include "kernels/staged_bounds.cuh"

namespace kvc {

// Bounds that are staged already. Others arrive in parts of rows() rows, each behind wait_for(part).
struct AllStaged {
    static constexpr bool kAllStaged = true;
};

// kHeads is the group rounded up to 4, 8 or 16. The query in the scorer's form does not depend on Bound (T or fp8_t).
template <class T, int kHeads, class Bound>
class TensorCoreScorer {
    static constexpr int kSpans = 2;  // of a warp's tile
    static constexpr int kSpanPages = kVectorWidth<Bound>;
    static constexpr int kTilePages = kSpans * kSpanPages;
    static constexpr int kTileDistance = kScoreWarps * kTilePages;  // pages from a warp's tile to its next
    static constexpr int kProducts = kSpanPages / 8;                // of a span
    static constexpr int kLanePages = 2 * kProducts;                // of a span, neighbours
    static constexpr int kHalves = kHeads == 16 ? 2 : 1;            // of a product's rows that are heads
    static constexpr int kRows = kHeads / kHalves;                  // heads in a half
    static constexpr int kQuad = 4;                                 // lanes that share a row of the query
    static constexpr int kStepOperands = kRows * kQuad;             // 16-byte operands
    using Sums = float[kSpans][kProducts][4];
    static_assert(kHeads == 4 || kHeads == 8 || kHeads == 16);
    static_assert(kSpanPages % kUnitPages == 0);

public:
    static constexpr int kStepChannels = 16;
    static constexpr int kSpareVectors = 1;  // at the end of a staged row
    static constexpr __host__ __device__ int rows(int channels) {
        return (channels + kStepChannels - 1) / kStepChannels * kStepChannels;
    }

    // The query in the scorer's form: its operands.
    static constexpr __host__ __device__ int query_vectors(int channels, int) {
        return rows(channels) / kStepChannels * kStepOperands;
    }

    // Shared memory besides the staged bounds and the query.
    static constexpr int kScratchBytes = 0;

    // Writes the query on the chosen channels into the vectors from `to` on; zeros past the last channel and head.
    static __device__ __forceinline__ void write_query(const GroupQuery& query, uint4* to) {
        constexpr int kWords = 4;  // of an operand: two channels of a head
        const int count = query_vectors(query.channels, query.group) * kWords;
#pragma unroll 1
        for (int i = static_cast<int>(threadIdx.x); i < count; i += kScoreThreads) {
            const int operand = i / kWords, word = i % kWords;
            const int head = operand % kStepOperands / kQuad + word % 2 * kRows;
            const int channel = operand / kStepOperands * kStepChannels + operand % kQuad * 2 + word / 2 * 8;
            reinterpret_cast<uint32_t*>(to)[i] =
                pack_pair<T>(query.factor(head, channel), query.factor(head, channel + 1));
        }
    }

    // Sets the byte of dynamic shared memory at which the query starts.
    __device__ __forceinline__ TensorCoreScorer(int channels, int group, int query_start, int)
        : operands_(dynamic_shared<uint4>(query_start, query_vectors(channels, group))) {}

    // Scores the pages of a chunk for all heads of the group. Several tiles at a time (kTiles) take more registers, and the
    // products of one do not wait for those of another: for blocks that have a multiprocessor to themselves. Warps take
    // turns, so that a short chunk is divided among all of them.
    template <int kTiles = 1, class Arrivals = AllStaged>
    __device__ __forceinline__ void score(const StagedBounds<Bound>& staged, const ScoredHeads& heads,
                                          const ScoredChunk& chunk, const Arrivals& arrivals = {}) const {
        for (int page = warp_index() * kTilePages; page < chunk.count; page += kTiles * kTileDistance) {
            Sums sums[kTiles] = {};
            add_channels(staged, page, chunk.count, arrivals, sums);
            write_tiles(heads, chunk, page, sums);
        }
    }

private:
    // The operand for the columns of one of a span's products, from a register of the span's bounds.
    static __device__ __forceinline__ uint32_t operand(uint32_t bounds, int product) {
        if constexpr (kIsFp8<Bound>) {
            return widen_upper_bytes<T>(product == 0 ? bounds << 8 : bounds);
        } else {
            return bounds;
        }
    }

    __device__ __forceinline__ static void add_products(const uint4& heads, const uint32_t (&bounds)[2 * kSpans],
                                                        Sums& sums) {
#pragma unroll
        for (int span = 0; span < kSpans; ++span) {
#pragma unroll
            for (int product = 0; product < kProducts; ++product) {
                mma_m16n8k16<T>(sums[span][product], {heads.x, heads.y, heads.z, heads.w},
                                {operand(bounds[2 * span], product), operand(bounds[2 * span + 1], product)});
            }
        }
    }

    // Of pages `page` and up; a tile that begins at `end` or behind it repeats the first one, and nothing of it is written.
    template <int kTiles, class Arrivals>
    __device__ __forceinline__ void add_channels(const StagedBounds<Bound>& staged, int page, int end,
                                                 const Arrivals& arrivals, Sums (&sums)[kTiles]) const {
        // Of the four matrices, each lane gives one row: channels 0..7 and 8..15 for the first span, then for the second.
        const int own_page = page + lane_index() / kStepChannels * kSpanPages;
        int tiles[kTiles];
#pragma unroll
        for (int tile = 0; tile < kTiles; ++tile) {
            tiles[tile] = page + tile * kTileDistance < end ? tile * kTileDistance : 0;
        }
        int row = staged.start_of(lane_index() % kStepChannels) + own_page;
        int own = lane_index() % kStepOperands;
        const auto add_step = [&] {
            const uint4 heads = operands_[own];
            uint32_t bounds[kTiles][2 * kSpans];
#pragma unroll
            for (int tile = 0; tile < kTiles; ++tile) {
                load_matrices_transposed(bounds[tile], staged.values[row + tiles[tile]]);
            }
#pragma unroll
            for (int tile = 0; tile < kTiles; ++tile) {
                add_products(heads, bounds[tile], sums[tile]);
            }
            own += kStepOperands;
            row += kStepChannels * staged.row;
        };
        if constexpr (Arrivals::kAllStaged) {
#pragma unroll 4
            for (int channel = 0; channel < staged.rows; channel += kStepChannels) {
                add_step();
            }
        } else {
            int part = 0;
#pragma unroll 1
            for (int first = 0; first < staged.rows; first += arrivals.rows()) {
                arrivals.wait_for(part++);
#pragma unroll 1
                for (int channel = first; channel < min(first + arrivals.rows(), staged.rows);
                     channel += kStepChannels) {
                    add_step();
                }
            }
        }
    }

    // Lane 4 group + t has the sums of head `group` (and group + 8) and of kLanePages pages of each span, the t-th ones.
    template <int kTiles>
    __device__ __forceinline__ void write_tiles(const ScoredHeads& heads, const ScoredChunk& chunk, int page,
                                                const Sums (&sums)[kTiles]) const {
        const int group = lane_index() / kQuad, own_page = page + lane_index() % kQuad * kLanePages;
        PageTile<kLanePages> own[kTiles];
        if constexpr (kHeads == 4) {
            const bool second = group >= kRows;
#pragma unroll
            for (int tile = 0; tile < kTiles; ++tile) {
                own[tile] = pages_of(sums[tile][0], 0);
                const PageTile<kLanePages> other = pages_of(sums[tile][1], 0);
#pragma unroll
                for (int i = 0; i < kLanePages; ++i) {
                    own[tile].value[i] = second ? other.value[i] : own[tile].value[i];
                }
            }
            write_page_scores(chunk, heads, group % kRows, own_page + (second ? kSpanPages : 0), kTileDistance, own);
        } else {
#pragma unroll
            for (int span = 0; span < kSpans; ++span) {
#pragma unroll
                for (int half = 0; half < kHalves; ++half) {
#pragma unroll
                    for (int tile = 0; tile < kTiles; ++tile) {
                        own[tile] = pages_of(sums[tile][span], half);
                    }
                    write_page_scores(chunk, heads, group + half * kRows, own_page + span * kSpanPages, kTileDistance,
                                      own);
                }
            }
        }
    }

    // A lane's sums of one span, for its head of the upper (0) or the lower (1) half of the rows, page by page: of two
    // products the first has the even pages.
    static __device__ __forceinline__ PageTile<kLanePages> pages_of(const float (&sums)[kProducts][4], int half) {
        PageTile<kLanePages> pages;
#pragma unroll
        for (int i = 0; i < kLanePages; ++i) {
            pages.value[i] = sums[i % kProducts][2 * half + i / kProducts];
        }
        return pages;
    }

    // [steps, kRows, kQuad]: operand of lane 4 row + t. Without heads in it, the lower half of the rows is zero.
    SharedSpan<uint4> operands_;
};

}  // namespace kvc

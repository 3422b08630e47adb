// Where a block's page scores go, however they were summed (page_scores_fma.cuh, page_scores_tensor_core.cuh).
#pragma once

#include <cstdint>

#include "kernels/page_statistics.cuh"
#include "kernels/score_channels.cuh"

namespace kvc {

constexpr int kLanePages = 2;  // neighbouring pages of a head whose scores one lane writes, as a float2

// The query heads of a KV head that scores its pages.
struct ScoredHeads {
    SharedSpan<float> inverse_temperature;  // [g]: 1/T
    int group;                              // g
};

// The staged pages of a chunk that are scored, and where their scores go.
struct ScoredChunk {
    float* scores;           // [g,8U], from the first page of the chunk on
    ScoreStatistics* units;  // [g,U], from the first unit of the chunk on
    int64_t row_units;       // U
    int count;               // pages to score
    PageTokens tokens;       // by page of the chunk
};

// Writes the scores of pages `page` (even) and page + 1 of `head`, from the sums over channels, and the unit's
// statistics. By all lanes of a warp: kUnitPages / kLanePages neighbouring lanes have a unit. A head past the group's
// last is left out; of a unit's pages past the last one, some get -inf.
__device__ __forceinline__ void write_page_scores(const ScoredChunk& chunk, const ScoredHeads& heads, int head,
                                                  int page, const float (&sums)[kLanePages]) {
    const bool exists = head < heads.group;
    const float inverse = exists ? heads.inverse_temperature[head] : 0.0f;
    float scores[kLanePages];
    float tokens[kLanePages];
#pragma unroll
    for (int i = 0; i < kLanePages; ++i) {
        scores[i] = minus_infinity();
        tokens[i] = chunk.tokens.of(page + i);
        if (page + i < chunk.count) {
            scores[i] = sums[i] * inverse;
        }
    }
    const ScoreStatistics unit = unit_statistics(scores, tokens);
    if (exists && page < chunk.count) {
        const int64_t row = head * chunk.row_units;
        platform::store_vector_of(chunk.scores + row * kUnitPages + page, float2{scores[0], scores[1]});
        if (page % kUnitPages == 0) {
            chunk.units[row + page / kUnitPages] = unit;
        }
    }
}

}  // namespace kvc

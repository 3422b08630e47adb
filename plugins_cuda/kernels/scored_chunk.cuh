// The destination of a block's page scores, however they are summed (page_scores_fma.cuh, page_scores_tensor_core.cuh).
#pragma once

#include <cstdint>

#include "kernels/page_statistics.cuh"
#include "kernels/score_channels.cuh"

namespace kvc {

// The query heads of a KV head that scores its pages.
struct ScoredHeads {
    SharedSpan<float> inverse_temperature;  // [g]: 1/T
    int group;                              // g
};

// The staged pages of a chunk that are scored, and the destination of their scores.
struct ScoredChunk {
    float* scores;           // [g,8U], from the first page of the chunk on
    ScoreStatistics* units;  // [g,U], from the first unit of the chunk on
    int64_t row_units;       // U
    int count;               // pages to score
    PageTokens tokens;       // by page of the chunk
};

// Numbers of neighbouring pages, moved as one vector.
template <int kPages>
struct alignas(sizeof(float) * kPages) PageTile {
    float value[kPages];
};

// Writes the scores of pages `page` (a multiple of kPages) to page + kPages - 1 of `head`, from the sums over channels, and
// the unit's statistics; of several tiles those of pages `distance` further on, and so on. By all lanes of a warp:
// kUnitPages / kPages neighbouring lanes have a unit. A head past the group's last is left out; of a unit's pages past
// the last one, some get -inf.
template <int kTiles, int kPages>
__device__ __forceinline__ void write_page_scores(const ScoredChunk& chunk, const ScoredHeads& heads, int head,
                                                  int page, int distance, const PageTile<kPages> (&sums)[kTiles]) {
    const bool exists = head < heads.group;
    const float inverse = exists ? heads.inverse_temperature[head] : 0.0f;
    float scores[kTiles][kPages], tokens[kTiles][kPages];
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
        for (int i = 0; i < kPages; ++i) {
            const int own = page + tile * distance + i;
            scores[tile][i] = minus_infinity();
            tokens[tile][i] = chunk.tokens.of(own);
            if (own < chunk.count) {
                scores[tile][i] = sums[tile].value[i] * inverse;
            }
        }
    }
    ScoreStatistics units[kTiles];
    unit_statistics(scores, tokens, units);
    const int64_t row = head * chunk.row_units;
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
        const int own = page + tile * distance;
        if (exists && own < chunk.count) {
            PageTile<kPages> written;
#pragma unroll
            for (int i = 0; i < kPages; ++i) {
                written.value[i] = scores[tile][i];
            }
            platform::store_vector_of(chunk.scores + row * kUnitPages + own, written);
            if (own % kUnitPages == 0) {
                chunk.units[row + own / kUnitPages] = units[tile];
            }
        }
    }
}

}  // namespace kvc

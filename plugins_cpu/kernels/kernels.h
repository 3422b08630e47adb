// The computations that are compiled once per instruction set, and the table through which the operators call them.
//
// A file that is compiled once per set may define nothing that the linker could merge with code of another set: no
// templates of the standard library that are not inlined, no inline functions outside of the set's own namespace. Code
// that all sets share is static: each file has its own copy.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/delta.h"
#include "kernels/elementwise.h"
#include "kernels/quantised.h"
#include "kernels/stored.h"

namespace kvc {

/// Attention of the query heads of one KV head to some of its tokens.
struct AttendCall {
    const float* query;     ///< [group, head_size], scaled
    Vectors keys;           ///< of the KV head, from slot 0 on
    Vectors values;         ///< likewise
    const int32_t* tokens;  ///< the slots to read; null for 0, 1, ..., count - 1
    int64_t count;
    int64_t group;
    float* scratch;  ///< attend_scratch(count, group, head_size) floats
};

/// The partial result of attention to some tokens, to be merged with the results of other tokens.
struct Attended {
    float* output;   ///< [group, head_size], the sum of weight times value
    float* maximum;  ///< [group], the largest score
    float* total;    ///< [group], the sum of weights
};

/// Scratch floats that attention of one token needs: numbers of the values are widened beside the keys' scales.
static constexpr int64_t attend_scratch(int64_t count, int64_t group, int64_t head_size) {
    constexpr int64_t widest = 32;
    const auto padded = [](int64_t size) { return (size + widest - 1) / widest * widest; };
    return group * (padded(count) + 2 * padded(head_size)) + padded(count) + numbers_scratch(count, head_size);
}

/// The scores of a row's pages by their key bounds (docs/policies/hybrid.md, steps 3 to 7), as ranks: whole numbers in the
/// order of the scores, the same for equal scores, -1 for NaN.
struct PageScoreCall {
    const float* query;  ///< [group, head_size], unscaled
    const void* bounds;  ///< [2 head_size, pages], page maxima of K, then of -K; floats
    bool fp8_bounds;     ///< or E5M2 codes
    int64_t group;
    int64_t head_size;
    int64_t pages;   ///< of the cache
    int64_t length;  ///< entries of the row; its last page may be partial
    int64_t page_size;
    int64_t channels;  ///< channels that score pages
    float* scratch;    ///< page_score_scratch(...) floats
};

/// Scratch floats that `rank_pages` needs.
static constexpr int64_t page_score_scratch(int64_t group, int64_t head_size, int64_t pages) {
    return group * (pages + 2 * 16) + (group + 3) * (head_size + 16);
}

/// The votes of a prompt's last queries for the tokens before them (docs/policies/snapkv++.md), for one KV head.
struct ObserveCall {
    const float* query;  ///< [group, window, head_size], scaled; the last query is that of the last token
    Vectors keys;        ///< `length` tokens
    int64_t length;      ///< more than `window`
    int64_t group;
    int64_t window;
    int64_t head_size;
    int64_t reach;   ///< a vote spreads to the tokens at most this far to either side
    bool adds;       ///< a token's rank is that of the sum of the votes that reach it, not of the largest
    float* scratch;  ///< observe_scratch(...) floats
};

/// Keys that one product multiplies.
inline constexpr int64_t kObservedPanel = 64;

/// Scratch floats that `observe` needs.
static constexpr int64_t observe_scratch(int64_t length, int64_t queries, int64_t head_size) {
    const int64_t width = (length + kObservedPanel - 1) / kObservedPanel * kObservedPanel;
    return queries * (width + 1) + width + 2 * kObservedPanel * head_size;
}

/// Items to select from by rank. All items but the last have one weight: pages with their tokens, or single tokens.
struct RankedItems {
    const int32_t* ranks;  ///< [items], larger is better; among equal ranks the smaller number wins
    int64_t items;
    int64_t weight;       ///< of every item but the last
    int64_t last_weight;  ///< of the last item
};

/// Queries, and keys, that one product multiplies.
inline constexpr int64_t kPrefillTile = 64;

/// Causal attention for some rows of a prompt, or of a turn, and all query heads of one KV head.
struct PrefillCall {
    const float* q;         ///< [group, queries, head_size]
    const uint8_t* layout;  ///< the KV head's keys and values as `lay_out` left them
    float* o;               ///< [group, queries, head_size]
    int64_t length;         ///< keys in `layout`
    int64_t queries;        ///< query i sees the first before + i + 1 keys
    int64_t before;
    int64_t group;
    int64_t head_size;
    int64_t first_row;  ///< a multiple of kPrefillTile
    int64_t rows;
    float* scratch;  ///< prefill_scratch(rows, group, head_size) floats
};

/// Scratch floats that attention over a prompt (`PrefillKernels`) needs.
static constexpr int64_t prefill_scratch(int64_t rows, int64_t group, int64_t head_size) {
    const int64_t tiles = group * ((rows + kPrefillTile - 1) / kPrefillTile), width = head_size + 16;
    return kPrefillTile * (tiles * (2 * width + 1 + 16) + kPrefillTile);
}

/// Attention over a prompt in one precision.
struct PrefillKernels {
    /// Bytes that kPrefillTile keys and their values take in `layout`.
    int64_t (*bytes_of_tile)(int64_t head_size);
    /// Lays out a tile of keys k and values v [count, head_size], `count` of at most kPrefillTile.
    void (*lay_out)(const float* k, const float* v, int64_t count, int64_t head_size, uint8_t* tile);
    void (*attend)(const PrefillCall& call);
};

/// Computes columns first_row..first_row + rows - 1 of y = x matrix^T.
struct LinearCall {
    const void* x;        ///< [tokens, in] as `round` wrote it
    const float* matrix;  ///< [out, in]
    float* y;             ///< [tokens, out]
    int64_t tokens;
    int64_t in;
    int64_t out;
    int64_t first_row;
    int64_t rows;      ///< at most kLinearPanel
    uint8_t* scratch;  ///< kLinearScratch bytes, aligned to 64
};

/// Rows of a matrix that one product multiplies, and the most columns.
inline constexpr int64_t kLinearPanel = 64;
inline constexpr int64_t kLinearDepth = 1024;
inline constexpr int64_t kLinearScratch = kLinearPanel * (kLinearDepth + 8) * 4;

/// Products with rows of a float matrix, in one precision.
struct LinearKernels {
    /// Turns rows first..last-1 of x [tokens, in] into steps [tokens, steps]; null where steps are floats.
    void (*round)(const float* x, int64_t in, int64_t first, int64_t last, void* steps);
    int64_t elements;  ///< elements in a step of four bytes
    void (*multiply)(const LinearCall& call);
};

/// y = x matrix^T of a few tokens.
struct NarrowCall {
    const float* x;       ///< [tokens, in]
    const float* matrix;  ///< [out, in]
    float* y;             ///< [tokens, out]
    int64_t tokens;
    int64_t in;
    int64_t out;
};

struct Kernels {
    const char* name;
    void (*attend)(const AttendCall& call, const Attended& result);
    /// Stores `count` vectors of floats in the format of `target`.
    void (*store_vectors)(const float* vectors, int64_t count, const WritableVectors& target);
    /// Widens `count` vectors to floats [count, head_size].
    void (*widen_vectors)(const Vectors& vectors, int64_t count, float* target);
    TakeTokens* take_tokens;
    Gate* gate;
    ClampedGate* clamped_gate;
    AddNorm* add_norm;
    Rotate* rotate;
    RoundInput* round_input;
    Multiply* multiply;
    /// ranks[page] for every page that holds entries.
    void (*rank_pages)(const PageScoreCall& call, int32_t* ranks);
    /// Writes ranks[i] for the length - window tokens before the window: whole numbers in the order of their votes, the
    /// same for equal votes, -1 for NaN. `ranks` has room for `reach` more numbers on either side.
    void (*observe)(const ObserveCall& call, int32_t* ranks);
    const PrefillKernels* prefill;
    const PrefillKernels* prefill_bf16;  ///< null where the processor cannot multiply bfloat16
    const LinearKernels* linear;
    const LinearKernels* linear_bf16;  ///< null where the processor cannot multiply bfloat16
    /// Computes columns first_row..last_row - 1 of y. The sums of a token do not depend on the tokens beside it.
    void (*multiply_narrow)(const NarrowCall& call, int64_t first_row, int64_t last_row);
    /// Takes items by rank until their weights add up to `wanted`; the last is cut to its lowest parts. parts[] gets
    /// the numbers of the taken parts in ascending order: part i of item n is number n * weight + i.
    void (*take_best)(const RankedItems& items, int64_t wanted, int32_t* parts);
};

}  // namespace kvc

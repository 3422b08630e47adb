// Generated from the operators' schemas (kvc_trt/operators) by `python -m plugins_cuda.generate`; edit those.
// Checks of every operation's numbers and tensors; src/validate.cpp adds the rules that involve several.
#pragma once

#include <algorithm>
#include <vector>

#include "kernels/stored_pages.h"
#include "kvc/parameters.h"
#include "src/checks.h"

namespace kvc::checks {

// ---- KvcAppendBlock

inline void check_numbers(const KvcAppendBlockParams& p) {
    check_ranges({{"dtype", p.dtype, KVC_FLOAT32, KVC_BFLOAT16},
                  {"batch", p.batch, 1, 65535},
                  {"kv_heads", p.kv_heads, 1, 65535},
                  {"head_size", p.head_size, 16, 256},
                  {"capacity", p.capacity, 1, 1048576},
                  {"block", p.block, 1, 1048576}});
    check_ranges({{"cache_format", p.cache_format, 0, 4}, {"reserved", p.reserved, 0, 0}});
    check_multiple("head_size", p.head_size, 8);
}

inline std::vector<Tensor> tensors_of(const KvcAppendBlockParams& p) {
    const TensorMaker make = maker(p);

    return {make.input("k_new", p.k_new, {p.batch, p.kv_heads, p.block, p.head_size}),
            make.input("v_new", p.v_new, {p.batch, p.kv_heads, p.block, p.head_size}),
            make.codes(make.formats.keys, "k_cache", p.k_cache, {p.batch, p.kv_heads, p.capacity, p.head_size}),
            make.scales(make.formats.keys, "k_scale", p.k_scale, {p.batch, p.kv_heads, p.capacity, p.head_size}),
            make.minima(make.formats.keys, "k_minimum", p.k_minimum, {p.batch, p.kv_heads, p.capacity, p.head_size}),
            make.codes(make.formats.values, "v_cache", p.v_cache, {p.batch, p.kv_heads, p.capacity, p.head_size}),
            make.scales(make.formats.values, "v_scale", p.v_scale, {p.batch, p.kv_heads, p.capacity, p.head_size}),
            make.minima(make.formats.values, "v_minimum", p.v_minimum, {p.batch, p.kv_heads, p.capacity, p.head_size}),
            make.numbers("cache_lengths", p.cache_lengths, {p.batch}),
            make.numbers("lengths", p.lengths, {p.batch})};
}

// ---- KvcCompact

inline void check_numbers(const KvcCompactParams& p) {
    check_ranges({{"dtype", p.dtype, KVC_FLOAT32, KVC_BFLOAT16},
                  {"batch", p.batch, 1, 65535},
                  {"heads", p.heads, 1, 65535},
                  {"kv_heads", p.kv_heads, 1, p.heads, "heads"},
                  {"head_size", p.head_size, 16, 256},
                  {"window", p.window, 1, 1024},
                  {"prompt_length", p.prompt_length, 1, 1048576},
                  {"capacity", p.capacity, 1, 1048576}});
    check_ranges({{"pool_kernel", p.pool_kernel, 1, 4095},
                  {"page_size", p.page_size, 1, kLargestInt32},
                  {"fp8_bounds", p.fp8_bounds, 0, 1},
                  {"by_length", p.by_length, 0, 1},
                  {"cache_format", p.cache_format, 0, 4},
                  {"prompt_budget", p.prompt_budget, 1, p.capacity, "capacity"},
                  {"reserved", p.reserved, 0, 0}});
    check_multiple("heads", p.heads, p.kv_heads, "kv_heads");
    check_multiple("head_size", p.head_size, 8);
    check_group(p);
    check_odd("pool_kernel", p.pool_kernel);
}

inline std::vector<Tensor> contiguous_tensors_of(const KvcCompactParams& p) {
    const TensorMaker make = maker(p);
    const int64_t C = p.capacity;
    const int64_t page_size = p.page_size;
    const int64_t element_bytes = make.element_bytes;
    const int64_t fp8_bounds = p.fp8_bounds;
    const int64_t D = p.head_size;
    return {
        make.input("q_window", p.q_window, {p.batch, p.heads, p.window, p.head_size}),
        make.numbers("prompt_lengths", p.prompt_lengths, {p.batch}),
        make.optional(make.numbers("prompt_budgets", p.prompt_budgets, {p.batch})),
        make.optional(make.numbers("pool_kernels", p.pool_kernels, {p.batch})),
        make.codes(make.formats.keys, "k_cache", p.k_cache, {p.batch, p.kv_heads, p.capacity, p.head_size}),
        make.scales(make.formats.keys, "k_scale", p.k_scale, {p.batch, p.kv_heads, p.capacity, p.head_size}),
        make.minima(make.formats.keys, "k_minimum", p.k_minimum, {p.batch, p.kv_heads, p.capacity, p.head_size}),
        make.codes(make.formats.values, "v_cache", p.v_cache, {p.batch, p.kv_heads, p.capacity, p.head_size}),
        make.scales(make.formats.values, "v_scale", p.v_scale, {p.batch, p.kv_heads, p.capacity, p.head_size}),
        make.minima(make.formats.values, "v_minimum", p.v_minimum, {p.batch, p.kv_heads, p.capacity, p.head_size}),
        make.optional(make.stored_bounds(
            "bounds", p.bounds, {p.batch, p.kv_heads, 2 * D, stored_pages(C, page_size, element_bytes, fp8_bounds)})),
        make.numbers("cache_lengths", p.cache_lengths, {p.batch}),
        make.numbers("indices", p.indices, {p.batch, p.kv_heads, p.capacity})};
}

// ---- KvcCompactTurn

inline void check_numbers(const KvcCompactTurnParams& p) {
    check_ranges({{"dtype", p.dtype, KVC_FLOAT32, KVC_BFLOAT16},
                  {"batch", p.batch, 1, 65535},
                  {"heads", p.heads, 1, 65535},
                  {"kv_heads", p.kv_heads, 1, p.heads, "heads"},
                  {"head_size", p.head_size, 16, 256},
                  {"window", p.window, 1, 1024},
                  {"prompt_length", p.prompt_length, 1, 1048576},
                  {"capacity", p.capacity, 1, 1048576}});
    check_ranges({{"pool_kernel", p.pool_kernel, 1, 4095},
                  {"page_size", p.page_size, 1, kLargestInt32},
                  {"fp8_bounds", p.fp8_bounds, 0, 1},
                  {"by_length", p.by_length, 0, 1},
                  {"cache_format", p.cache_format, 0, 4},
                  {"prompt_budget", p.prompt_budget, 1, p.capacity, "capacity"},
                  {"reserved", p.reserved, 0, 0}});
    check_multiple("heads", p.heads, p.kv_heads, "kv_heads");
    check_multiple("head_size", p.head_size, 8);
    check_group(p);
    check_odd("pool_kernel", p.pool_kernel);
}

inline std::vector<Tensor> tensors_of(const KvcCompactTurnParams& p) {
    const TensorMaker make = maker(p);
    const int64_t C = p.capacity;
    const int64_t page_size = p.page_size;
    const int64_t element_bytes = make.element_bytes;
    const int64_t fp8_bounds = p.fp8_bounds;
    const int64_t D = p.head_size;
    return {
        make.input("q_window", p.q_window, {p.batch, p.heads, p.window, p.head_size}),
        make.codes(make.formats.keys, "k", p.k, {p.batch, p.kv_heads, p.prompt_length, p.head_size}),
        make.scales(make.formats.keys, "joined_k_scale", p.joined_k_scale,
                    {p.batch, p.kv_heads, p.prompt_length, p.head_size}),
        make.minima(make.formats.keys, "joined_k_minimum", p.joined_k_minimum,
                    {p.batch, p.kv_heads, p.prompt_length, p.head_size}),
        make.codes(make.formats.values, "v", p.v, {p.batch, p.kv_heads, p.prompt_length, p.head_size}),
        make.scales(make.formats.values, "joined_v_scale", p.joined_v_scale,
                    {p.batch, p.kv_heads, p.prompt_length, p.head_size}),
        make.minima(make.formats.values, "joined_v_minimum", p.joined_v_minimum,
                    {p.batch, p.kv_heads, p.prompt_length, p.head_size}),
        make.numbers("prompt_lengths", p.prompt_lengths, {p.batch}),
        make.numbers("window_lengths", p.window_lengths, {p.batch}),
        make.optional(make.numbers("prompt_budgets", p.prompt_budgets, {p.batch})),
        make.optional(make.numbers("pool_kernels", p.pool_kernels, {p.batch})),
        make.codes(make.formats.keys, "k_cache", p.k_cache, {p.batch, p.kv_heads, p.capacity, p.head_size}),
        make.scales(make.formats.keys, "k_scale", p.k_scale, {p.batch, p.kv_heads, p.capacity, p.head_size}),
        make.minima(make.formats.keys, "k_minimum", p.k_minimum, {p.batch, p.kv_heads, p.capacity, p.head_size}),
        make.codes(make.formats.values, "v_cache", p.v_cache, {p.batch, p.kv_heads, p.capacity, p.head_size}),
        make.scales(make.formats.values, "v_scale", p.v_scale, {p.batch, p.kv_heads, p.capacity, p.head_size}),
        make.minima(make.formats.values, "v_minimum", p.v_minimum, {p.batch, p.kv_heads, p.capacity, p.head_size}),
        make.optional(make.stored_bounds(
            "bounds", p.bounds, {p.batch, p.kv_heads, 2 * D, stored_pages(C, page_size, element_bytes, fp8_bounds)})),
        make.numbers("cache_lengths", p.cache_lengths, {p.batch}),
        make.numbers("indices", p.indices, {p.batch, p.kv_heads, p.capacity})};
}

// ---- KvcDenseAttention

inline void check_numbers(const KvcDenseAttentionParams& p) {
    check_ranges({{"dtype", p.dtype, KVC_FLOAT32, KVC_BFLOAT16},
                  {"batch", p.batch, 1, 65535},
                  {"heads", p.heads, 1, 65535},
                  {"kv_heads", p.kv_heads, 1, p.heads, "heads"},
                  {"head_size", p.head_size, 16, 256},
                  {"capacity", p.capacity, 1, 1048576}});
    check_ranges({{"cache_format", p.cache_format, 0, 4}});
    check_multiple("heads", p.heads, p.kv_heads, "kv_heads");
    check_multiple("head_size", p.head_size, 8);
    check_group(p);
}

inline std::vector<Tensor> tensors_of(const KvcDenseAttentionParams& p) {
    const TensorMaker make = maker(p);

    return {make.input("query", p.query, {p.batch, p.heads, p.head_size}),
            make.input("k_new", p.k_new, {p.batch, p.kv_heads, p.head_size}),
            make.input("v_new", p.v_new, {p.batch, p.kv_heads, p.head_size}),
            make.codes(make.formats.keys, "k_cache", p.k_cache, {p.batch, p.kv_heads, p.capacity, p.head_size}),
            make.scales(make.formats.keys, "k_scale", p.k_scale, {p.batch, p.kv_heads, p.capacity, p.head_size}),
            make.minima(make.formats.keys, "k_minimum", p.k_minimum, {p.batch, p.kv_heads, p.capacity, p.head_size}),
            make.codes(make.formats.values, "v_cache", p.v_cache, {p.batch, p.kv_heads, p.capacity, p.head_size}),
            make.scales(make.formats.values, "v_scale", p.v_scale, {p.batch, p.kv_heads, p.capacity, p.head_size}),
            make.minima(make.formats.values, "v_minimum", p.v_minimum, {p.batch, p.kv_heads, p.capacity, p.head_size}),
            make.numbers("cache_lengths", p.cache_lengths, {p.batch}),
            make.output("output", p.output, {p.batch, p.heads, p.head_size})};
}

// ---- KvcHybridAttention

inline void check_numbers(const KvcHybridAttentionParams& p) {
    const int64_t top_k = p.top_k;
    const int64_t token_budget = p.token_budget;
    const int64_t dense_until = p.dense_until;
    check_ranges({{"dtype", p.dtype, KVC_FLOAT32, KVC_BFLOAT16},
                  {"batch", p.batch, 1, 65535},
                  {"heads", p.heads, 1, 65535},
                  {"kv_heads", p.kv_heads, 1, p.heads, "heads"},
                  {"head_size", p.head_size, 16, 256},
                  {"capacity", p.capacity, 1, 1048576}});
    check_ranges({{"page_size", p.page_size, 1, kLargestInt32},
                  {"fp8_bounds", p.fp8_bounds, 0, 1},
                  {"cache_format", p.cache_format, 0, 4},
                  {"token_budget", p.token_budget, 0, kLargestInt32},
                  {"dense_until", p.dense_until, 0, kLargestInt32},
                  {"top_r", p.top_r, 1, p.head_size, "head_size"},
                  {"top_k", p.top_k, 1, p.capacity, "capacity"},
                  {"recent", p.recent, 0, p.top_k, "top_k"},
                  {"selected_width", p.selected_width, std::max({top_k, token_budget, dense_until}),
                   std::max({top_k, token_budget, dense_until}), "max(top_k, token_budget, dense_until)"}});
    check_multiple("heads", p.heads, p.kv_heads, "kv_heads");
    check_multiple("head_size", p.head_size, 8);
    check_group(p);
}

inline std::vector<Tensor> tensors_of(const KvcHybridAttentionParams& p) {
    const TensorMaker make = maker(p);
    const int64_t C = p.capacity;
    const int64_t page_size = p.page_size;
    const int64_t element_bytes = make.element_bytes;
    const int64_t fp8_bounds = p.fp8_bounds;
    const int64_t D = p.head_size;
    return {make.input("query", p.query, {p.batch, p.heads, p.head_size}),
            make.input("k_new", p.k_new, {p.batch, p.kv_heads, p.head_size}),
            make.input("v_new", p.v_new, {p.batch, p.kv_heads, p.head_size}),
            make.codes(make.formats.keys, "k_cache", p.k_cache, {p.batch, p.kv_heads, p.capacity, p.head_size}),
            make.scales(make.formats.keys, "k_scale", p.k_scale, {p.batch, p.kv_heads, p.capacity, p.head_size}),
            make.minima(make.formats.keys, "k_minimum", p.k_minimum, {p.batch, p.kv_heads, p.capacity, p.head_size}),
            make.codes(make.formats.values, "v_cache", p.v_cache, {p.batch, p.kv_heads, p.capacity, p.head_size}),
            make.scales(make.formats.values, "v_scale", p.v_scale, {p.batch, p.kv_heads, p.capacity, p.head_size}),
            make.minima(make.formats.values, "v_minimum", p.v_minimum, {p.batch, p.kv_heads, p.capacity, p.head_size}),
            make.stored_bounds("bounds", p.bounds,
                               {p.batch, p.kv_heads, 2 * D, stored_pages(C, page_size, element_bytes, fp8_bounds)}),
            make.numbers("cache_lengths", p.cache_lengths, {p.batch}),
            make.output("output", p.output, {p.batch, p.heads, p.head_size}),
            make.optional(make.numbers("selected", p.selected, {p.batch, p.kv_heads, p.selected_width}))};
}

// ---- KvcJoinBlock

inline void check_numbers(const KvcJoinBlockParams& p) {
    check_ranges({{"dtype", p.dtype, KVC_FLOAT32, KVC_BFLOAT16},
                  {"batch", p.batch, 1, 65535},
                  {"kv_heads", p.kv_heads, 1, 65535},
                  {"head_size", p.head_size, 16, 256},
                  {"capacity", p.capacity, 1, 1048576},
                  {"block", p.block, 1, 1048576}});
    check_ranges({{"cache_format", p.cache_format, 0, 4}, {"reserved", p.reserved, 0, 0}});
    check_multiple("head_size", p.head_size, 8);
}

inline std::vector<Tensor> tensors_of(const KvcJoinBlockParams& p) {
    const TensorMaker make = maker(p);
    const int64_t C = p.capacity;
    const int64_t M = p.block;
    return {
        make.input("k_new", p.k_new, {p.batch, p.kv_heads, p.block, p.head_size}),
        make.input("v_new", p.v_new, {p.batch, p.kv_heads, p.block, p.head_size}),
        make.codes(make.formats.keys, "k_cache", p.k_cache, {p.batch, p.kv_heads, p.capacity, p.head_size}),
        make.scales(make.formats.keys, "k_scale", p.k_scale, {p.batch, p.kv_heads, p.capacity, p.head_size}),
        make.minima(make.formats.keys, "k_minimum", p.k_minimum, {p.batch, p.kv_heads, p.capacity, p.head_size}),
        make.codes(make.formats.values, "v_cache", p.v_cache, {p.batch, p.kv_heads, p.capacity, p.head_size}),
        make.scales(make.formats.values, "v_scale", p.v_scale, {p.batch, p.kv_heads, p.capacity, p.head_size}),
        make.minima(make.formats.values, "v_minimum", p.v_minimum, {p.batch, p.kv_heads, p.capacity, p.head_size}),
        make.numbers("cache_lengths", p.cache_lengths, {p.batch}),
        make.numbers("lengths", p.lengths, {p.batch}),
        make.codes(make.formats.keys, "k", p.k, {p.batch, p.kv_heads, C + M, p.head_size}),
        make.scales(make.formats.keys, "joined_k_scale", p.joined_k_scale, {p.batch, p.kv_heads, C + M, p.head_size}),
        make.minima(make.formats.keys, "joined_k_minimum", p.joined_k_minimum,
                    {p.batch, p.kv_heads, C + M, p.head_size}),
        make.codes(make.formats.values, "v", p.v, {p.batch, p.kv_heads, C + M, p.head_size}),
        make.scales(make.formats.values, "joined_v_scale", p.joined_v_scale, {p.batch, p.kv_heads, C + M, p.head_size}),
        make.minima(make.formats.values, "joined_v_minimum", p.joined_v_minimum,
                    {p.batch, p.kv_heads, C + M, p.head_size}),
        make.numbers("joined_lengths", p.joined_lengths, {p.batch})};
}

// ---- KvcRaiseBounds

inline void check_numbers(const KvcRaiseBoundsParams& p) {
    check_ranges({{"dtype", p.dtype, KVC_FLOAT32, KVC_BFLOAT16},
                  {"batch", p.batch, 1, 65535},
                  {"kv_heads", p.kv_heads, 1, 65535},
                  {"head_size", p.head_size, 16, 256},
                  {"block", p.block, 1, 1048576},
                  {"pages", p.pages, 1, 1048576}});
    check_ranges({{"page_size", p.page_size, 1, kLargestInt32},
                  {"fp8_bounds", p.fp8_bounds, 0, 1},
                  {"cache_format", p.cache_format, 0, 4},
                  {"reserved", p.reserved, 0, 0}});
    check_multiple("head_size", p.head_size, 8);
}

inline std::vector<Tensor> tensors_of(const KvcRaiseBoundsParams& p) {
    const TensorMaker make = maker(p);
    const int64_t D = p.head_size;
    return {make.input("k_new", p.k_new, {p.batch, p.kv_heads, p.block, p.head_size}),
            make.stored_bounds("bounds", p.bounds, {p.batch, p.kv_heads, 2 * D, p.pages}),
            make.numbers("cache_lengths", p.cache_lengths, {p.batch}), make.numbers("lengths", p.lengths, {p.batch})};
}

// ---- KvcReplaceBounds

inline void check_numbers(const KvcReplaceBoundsParams& p) {
    check_ranges({{"dtype", p.dtype, KVC_FLOAT32, KVC_BFLOAT16},
                  {"batch", p.batch, 1, 65535},
                  {"kv_heads", p.kv_heads, 1, 65535},
                  {"pages", p.pages, 1, 1048576},
                  {"channels", p.channels, 32, 512}});
    check_ranges({{"fp8_bounds", p.fp8_bounds, 0, 1}, {"reserved", p.reserved, 0, 0}});
    check_multiple("channels", p.channels, 16);
}

inline std::vector<Tensor> tensors_of(const KvcReplaceBoundsParams& p) {
    const TensorMaker make = maker(p);

    return {make.stored_bounds("bounds", p.bounds, {p.batch, p.kv_heads, p.channels, p.pages}),
            make.given_bounds("bounds_kept", p.bounds_kept, {p.batch, p.kv_heads, p.channels, p.pages})};
}

// ---- KvcReplaceCache

inline void check_numbers(const KvcReplaceCacheParams& p) {
    check_ranges({{"dtype", p.dtype, KVC_FLOAT32, KVC_BFLOAT16},
                  {"batch", p.batch, 1, 65535},
                  {"kv_heads", p.kv_heads, 1, 65535},
                  {"head_size", p.head_size, 16, 256},
                  {"capacity", p.capacity, 1, 1048576}});
    check_ranges({{"cache_format", p.cache_format, 0, 4}, {"reserved", p.reserved, 0, 0}});
    check_multiple("head_size", p.head_size, 8);
}

inline std::vector<Tensor> tensors_of(const KvcReplaceCacheParams& p) {
    const TensorMaker make = maker(p);

    return {
        make.codes(make.formats.keys, "k_cache", p.k_cache, {p.batch, p.kv_heads, p.capacity, p.head_size}),
        make.scales(make.formats.keys, "k_scale", p.k_scale, {p.batch, p.kv_heads, p.capacity, p.head_size}),
        make.minima(make.formats.keys, "k_minimum", p.k_minimum, {p.batch, p.kv_heads, p.capacity, p.head_size}),
        make.codes(make.formats.values, "v_cache", p.v_cache, {p.batch, p.kv_heads, p.capacity, p.head_size}),
        make.scales(make.formats.values, "v_scale", p.v_scale, {p.batch, p.kv_heads, p.capacity, p.head_size}),
        make.minima(make.formats.values, "v_minimum", p.v_minimum, {p.batch, p.kv_heads, p.capacity, p.head_size}),
        make.numbers("slot_positions", p.slot_positions, {p.batch, p.kv_heads, p.capacity}),
        make.codes(make.formats.keys, "k_kept", p.k_kept, {p.batch, p.kv_heads, p.capacity, p.head_size}),
        make.scales(make.formats.keys, "k_kept_scale", p.k_kept_scale, {p.batch, p.kv_heads, p.capacity, p.head_size}),
        make.minima(make.formats.keys, "k_kept_minimum", p.k_kept_minimum,
                    {p.batch, p.kv_heads, p.capacity, p.head_size}),
        make.codes(make.formats.values, "v_kept", p.v_kept, {p.batch, p.kv_heads, p.capacity, p.head_size}),
        make.scales(make.formats.values, "v_kept_scale", p.v_kept_scale,
                    {p.batch, p.kv_heads, p.capacity, p.head_size}),
        make.minima(make.formats.values, "v_kept_minimum", p.v_kept_minimum,
                    {p.batch, p.kv_heads, p.capacity, p.head_size}),
        make.numbers("positions_kept", p.positions_kept, {p.batch, p.kv_heads, p.capacity})};
}

// ---- KvcRotatedHybridAttention

inline void check_numbers(const KvcRotatedHybridAttentionParams& p) {
    const int64_t top_k = p.top_k;
    const int64_t token_budget = p.token_budget;
    const int64_t dense_until = p.dense_until;
    check_ranges({{"dtype", p.dtype, KVC_FLOAT32, KVC_BFLOAT16},
                  {"batch", p.batch, 1, 65535},
                  {"heads", p.heads, 1, 65535},
                  {"kv_heads", p.kv_heads, 1, p.heads, "heads"},
                  {"head_size", p.head_size, 16, 256},
                  {"capacity", p.capacity, 1, 1048576}});
    check_ranges({{"page_size", p.page_size, 1, kLargestInt32},
                  {"fp8_bounds", p.fp8_bounds, 0, 1},
                  {"cache_format", p.cache_format, 0, 4},
                  {"token_budget", p.token_budget, 0, kLargestInt32},
                  {"dense_until", p.dense_until, 0, kLargestInt32},
                  {"top_r", p.top_r, 1, p.head_size, "head_size"},
                  {"top_k", p.top_k, 1, p.capacity, "capacity"},
                  {"recent", p.recent, 0, p.top_k, "top_k"},
                  {"selected_width", p.selected_width, std::max({top_k, token_budget, dense_until}),
                   std::max({top_k, token_budget, dense_until}), "max(top_k, token_budget, dense_until)"}});
    check_multiple("heads", p.heads, p.kv_heads, "kv_heads");
    check_multiple("head_size", p.head_size, 8);
    check_group(p);
}

inline std::vector<Tensor> tensors_of(const KvcRotatedHybridAttentionParams& p) {
    const TensorMaker make = maker(p);
    const int64_t heads = p.heads;
    const int64_t G = p.kv_heads;
    const int64_t C = p.capacity;
    const int64_t page_size = p.page_size;
    const int64_t element_bytes = make.element_bytes;
    const int64_t fp8_bounds = p.fp8_bounds;
    const int64_t D = p.head_size;
    return {make.input("joined", p.joined, {p.batch, heads + 2 * G, p.head_size}),
            make.numbers("cosines", p.cosines, {p.batch, D / 2}),
            make.numbers("sines", p.sines, {p.batch, D / 2}),
            make.codes(make.formats.keys, "k_cache", p.k_cache, {p.batch, p.kv_heads, p.capacity, p.head_size}),
            make.scales(make.formats.keys, "k_scale", p.k_scale, {p.batch, p.kv_heads, p.capacity, p.head_size}),
            make.minima(make.formats.keys, "k_minimum", p.k_minimum, {p.batch, p.kv_heads, p.capacity, p.head_size}),
            make.codes(make.formats.values, "v_cache", p.v_cache, {p.batch, p.kv_heads, p.capacity, p.head_size}),
            make.scales(make.formats.values, "v_scale", p.v_scale, {p.batch, p.kv_heads, p.capacity, p.head_size}),
            make.minima(make.formats.values, "v_minimum", p.v_minimum, {p.batch, p.kv_heads, p.capacity, p.head_size}),
            make.stored_bounds("bounds", p.bounds,
                               {p.batch, p.kv_heads, 2 * D, stored_pages(C, page_size, element_bytes, fp8_bounds)}),
            make.numbers("cache_lengths", p.cache_lengths, {p.batch}),
            make.output("output", p.output, {p.batch, p.heads, p.head_size}),
            make.optional(make.numbers("selected", p.selected, {p.batch, p.kv_heads, p.selected_width})),
            make.output("query", p.query, {p.batch, p.heads, p.head_size})};
}

// ---- KvcRotatedDenseAttention

inline void check_numbers(const KvcRotatedDenseAttentionParams& p) {
    check_ranges({{"dtype", p.dtype, KVC_FLOAT32, KVC_BFLOAT16},
                  {"batch", p.batch, 1, 65535},
                  {"heads", p.heads, 1, 65535},
                  {"kv_heads", p.kv_heads, 1, p.heads, "heads"},
                  {"head_size", p.head_size, 16, 256},
                  {"capacity", p.capacity, 1, 1048576}});
    check_ranges({{"cache_format", p.cache_format, 0, 4}});
    check_multiple("heads", p.heads, p.kv_heads, "kv_heads");
    check_multiple("head_size", p.head_size, 8);
    check_group(p);
}

inline std::vector<Tensor> tensors_of(const KvcRotatedDenseAttentionParams& p) {
    const TensorMaker make = maker(p);
    const int64_t heads = p.heads;
    const int64_t G = p.kv_heads;
    const int64_t D = p.head_size;
    return {make.input("joined", p.joined, {p.batch, heads + 2 * G, p.head_size}),
            make.numbers("cosines", p.cosines, {p.batch, D / 2}),
            make.numbers("sines", p.sines, {p.batch, D / 2}),
            make.codes(make.formats.keys, "k_cache", p.k_cache, {p.batch, p.kv_heads, p.capacity, p.head_size}),
            make.scales(make.formats.keys, "k_scale", p.k_scale, {p.batch, p.kv_heads, p.capacity, p.head_size}),
            make.minima(make.formats.keys, "k_minimum", p.k_minimum, {p.batch, p.kv_heads, p.capacity, p.head_size}),
            make.codes(make.formats.values, "v_cache", p.v_cache, {p.batch, p.kv_heads, p.capacity, p.head_size}),
            make.scales(make.formats.values, "v_scale", p.v_scale, {p.batch, p.kv_heads, p.capacity, p.head_size}),
            make.minima(make.formats.values, "v_minimum", p.v_minimum, {p.batch, p.kv_heads, p.capacity, p.head_size}),
            make.numbers("cache_lengths", p.cache_lengths, {p.batch}),
            make.output("output", p.output, {p.batch, p.heads, p.head_size}),
            make.output("query", p.query, {p.batch, p.heads, p.head_size})};
}

}  // namespace kvc::checks

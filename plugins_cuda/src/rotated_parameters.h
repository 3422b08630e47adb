// Generated from the operators' schemas (kvc_trt/operators) by `python -m plugins_cuda.generate`; edit those.
// The parameters of a step that rotates its token, as those of the plain step with the rotated query.
#pragma once

#include "kvc/parameters.h"

namespace kvc {

inline KvcHybridAttentionParams with_rotated_query(const KvcRotatedHybridAttentionParams& p) {
    KvcHybridAttentionParams params{};
    params.dtype = p.dtype;
    params.batch = p.batch;
    params.heads = p.heads;
    params.kv_heads = p.kv_heads;
    params.head_size = p.head_size;
    params.page_size = p.page_size;
    params.top_r = p.top_r;
    params.fp8_bounds = p.fp8_bounds;
    params.cache_format = p.cache_format;
    params.recent = p.recent;
    params.capacity = p.capacity;
    params.top_k = p.top_k;
    params.token_budget = p.token_budget;
    params.dense_until = p.dense_until;
    params.selected_width = p.selected_width;
    params.query = p.query;
    params.k_cache = p.k_cache;
    params.k_scale = p.k_scale;
    params.k_minimum = p.k_minimum;
    params.v_cache = p.v_cache;
    params.v_scale = p.v_scale;
    params.v_minimum = p.v_minimum;
    params.bounds = p.bounds;
    params.cache_lengths = p.cache_lengths;
    params.output = p.output;
    params.selected = p.selected;
    return params;
}

inline KvcDenseAttentionParams with_rotated_query(const KvcRotatedDenseAttentionParams& p) {
    KvcDenseAttentionParams params{};
    params.dtype = p.dtype;
    params.batch = p.batch;
    params.heads = p.heads;
    params.kv_heads = p.kv_heads;
    params.head_size = p.head_size;
    params.cache_format = p.cache_format;
    params.capacity = p.capacity;
    params.query = p.query;
    params.k_cache = p.k_cache;
    params.k_scale = p.k_scale;
    params.k_minimum = p.k_minimum;
    params.v_cache = p.v_cache;
    params.v_scale = p.v_scale;
    params.v_minimum = p.v_minimum;
    params.cache_lengths = p.cache_lengths;
    params.output = p.output;
    return params;
}

}  // namespace kvc

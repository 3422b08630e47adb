// The parameters of the kernels that store a turn's block in a format.
#pragma once

#include "kernels/stored_rows.cuh"
#include "src/cache_tables.h"

namespace kvc {

/// Of a call of KvcAppendBlockParams or KvcJoinBlockParams.
template <class T, class Params>
BlockInFormatParams<T> block_in_format(const Params& p) {
    const CachePair tables = cache_tables(p);
    BlockInFormatParams<T> params{};
    params.k_new = static_cast<const T*>(p.k_new);
    params.v_new = static_cast<const T*>(p.v_new);
    params.keys = tables.keys;
    params.values = tables.values;
    params.cache_lengths = p.cache_lengths;
    params.lengths = p.lengths;
    params.capacity = p.capacity;
    params.block = p.block;
    params.kv_heads = p.kv_heads;
    params.head_size = p.head_size;
    return params;
}

}  // namespace kvc

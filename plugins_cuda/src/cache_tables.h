// The caches of a call as the kernels read and write them.
#pragma once

#include "kernels/stored_vector.cuh"
#include "kernels/vector_formats.h"
#include "src/launch.h"

namespace kvc {

/// Keys or values, given the addresses of their parts.
inline VectorTable vector_table(VectorFormat format, int32_t dtype, int32_t head_size, const void* codes,
                                const void* scales, const void* minima) {
    VectorTable table{};
    table.codes = const_cast<void*>(codes);
    table.scales = const_cast<void*>(scales);
    table.minima = static_cast<half_t*>(const_cast<void*>(minima));
    table.format = format;
    table.code_bytes = static_cast<int32_t>(code_bytes(format, head_size, element_bytes_of(dtype)));
    table.groups = static_cast<int32_t>(numbers_of(format, head_size));
    return table;
}

struct CachePair {
    VectorTable keys;
    VectorTable values;
};

/// The caches of a call.
template <class Params>
CachePair cache_tables(const Params& p) {
    const CacheFormat formats = formats_of(p.cache_format);
    return {vector_table(formats.keys, p.dtype, p.head_size, p.k_cache, p.k_scale, p.k_minimum),
            vector_table(formats.values, p.dtype, p.head_size, p.v_cache, p.v_scale, p.v_minimum)};
}

/// The joined tables [B,G,S,.] of stored and new tokens that a turn's operations read or write.
template <class Params>
CachePair joined_tables(const Params& p) {
    const CacheFormat formats = formats_of(p.cache_format);
    return {vector_table(formats.keys, p.dtype, p.head_size, p.k, p.joined_k_scale, p.joined_k_minimum),
            vector_table(formats.values, p.dtype, p.head_size, p.v, p.joined_v_scale, p.joined_v_minimum)};
}

}  // namespace kvc

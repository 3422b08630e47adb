// (under construction: parameters first, so that callers can be written against them)
#pragma once

#include "kernels/attended_row.cuh"
#include "src/launch.h"

namespace kvc {

/// Scratch of the attention: partial results of the splits of a row, and how many splits have arrived.
struct AttentionScratch {
    int32_t* arrivals;  // [B,G]: zeros before the launch (the kernel that appends the token writes them)
    float2* statistics; // [B,G,splits,H/G]: maximum and sum of each split's softmax
    float* partials;    // [B,G,splits,H/G,D]: each split's unnormalised output
    int32_t splits;     // most splits of a row
};

template <class T>
struct SparseAttentionParams {
    const T* query;               // [B,H,D]
    const T* k_cache;             // [B,G,C,D]
    const T* v_cache;             // [B,G,C,D]
    const int64_t* cache_lengths; // [B]: entries before the append
    const int32_t* indices;       // [B,G,index_stride]: slots that a sparse row reads, ascending; null if none is sparse
    T* output;                    // [B,H,D]
    AttentionScratch scratch;
    AttentionLimits limits;
    int64_t index_stride;
    int32_t batch;     // B
    int32_t heads;     // H
    int32_t kv_heads;  // G
    int32_t head_size; // D
};

/// Cut the scratch of an attention over rows of at most `most_attended(limits)` entries.
AttentionScratch take_attention_scratch(Workspace& workspace, int32_t batch, int32_t heads, int32_t kv_heads,
                                        int32_t head_size, int64_t most_attended);

/// Queue the attention of every row; `params.scratch.arrivals` must be zero by then.
template <class T>
void launch_sparse_attention(const SparseAttentionParams<T>& params, cudaStream_t stream);

} // namespace kvc

/* One decode step of one layer: append a token, choose what to read, attend (RocketKV, arXiv 2502.14051, stage 2).
 *
 * Symbols: B batch, H query heads, G KV heads, D head size, C capacity, p page size, P = ceil(C / p), m entries of a
 * row after the append. All tensors are contiguous. k_cache, v_cache and bounds are updated in place.
 * A row whose cache length is outside 0..C-1 is inactive: nothing of it is touched but its output, which becomes
 * zero, and its selected list, which becomes -1.
 * NaN scores rank lowest; a NaN that is read makes the output NaN, as softmax does. An infinite value in a 16-bit cache
 * makes its channel of the output NaN where exact arithmetic may give infinity. */
#ifndef KVC_ATTENTION_H
#define KVC_ATTENTION_H

#include "kvc/types.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct KvcHybridAttentionParams {
    uint64_t struct_bytes;        /* sizeof(KvcHybridAttentionParams) of the caller */
    int32_t dtype;                /* KvcDtype */
    int32_t batch;                /* B in 1..65535 */
    int32_t heads;                /* H in 1..65535, a multiple of kv_heads; H / G in 1..16 */
    int32_t kv_heads;             /* G in 1..65535 */
    int32_t head_size;            /* D, a multiple of 8 in 16..256 */
    int32_t page_size;            /* p >= 1 */
    int32_t top_r;                /* 1..D: channels that score pages */
    int64_t capacity;             /* C in 1..2^20 */
    int64_t top_k;                /* 1..capacity: tokens that a sparse step reads */
    int64_t token_budget;         /* 0..2^31-1 */
    int64_t dense_until;          /* 0..2^31-1; rows of m <= max(token_budget, dense_until) read all their entries */
    int64_t selected_width;       /* max(top_k, token_budget, dense_until) */
    const void* query;            /* [B,H,D] after RoPE */
    const void* k_new;            /* [B,G,D] after RoPE */
    const void* v_new;            /* [B,G,D] */
    void* k_cache;                /* [B,G,C,D] */
    void* v_cache;                /* [B,G,C,D] */
    void* bounds;                 /* [B,G,2D,P]: page maxima of K, then of -K; empty pages: the lowest finite value */
    const int64_t* cache_lengths; /* [B], on the device: entries before the append, where the new one goes */
    void* output;                 /* [B,H,D] */
    int32_t* selected;            /* [B,G,selected_width]: slots read, ascending, -1 past the end; or null */
} KvcHybridAttentionParams;

typedef struct KvcDenseAttentionParams {
    uint64_t struct_bytes;        /* sizeof(KvcDenseAttentionParams) of the caller */
    int32_t dtype;                /* KvcDtype */
    int32_t batch;                /* B in 1..65535 */
    int32_t heads;                /* H in 1..65535, a multiple of kv_heads; H / G in 1..16 */
    int32_t kv_heads;             /* G in 1..65535 */
    int32_t head_size;            /* D, a multiple of 8 in 16..256 */
    int32_t reserved;             /* 0 */
    int64_t capacity;             /* C in 1..2^20 */
    const void* query;            /* [B,H,D] after RoPE */
    const void* k_new;            /* [B,G,D] after RoPE */
    const void* v_new;            /* [B,G,D] */
    void* k_cache;                /* [B,G,C,D] */
    void* v_cache;                /* [B,G,C,D] */
    const int64_t* cache_lengths; /* [B], on the device: entries before the append, where the new one goes */
    void* output;                 /* [B,H,D] */
} KvcDenseAttentionParams;

/* Bytes of scratch memory, a multiple of 256; a function of sizes, never of pointers. The memory itself starts at a
 * multiple of 16. */
KVC_API KvcStatus kvc_hybrid_attention_workspace(const KvcHybridAttentionParams* params, uint64_t* bytes,
                                                 KvcMessage* message);
KVC_API KvcStatus kvc_dense_attention_workspace(const KvcDenseAttentionParams* params, uint64_t* bytes,
                                                KvcMessage* message);

/* Queue the step on `stream` (a cudaStream_t): a fixed number of launches, safe to capture in a CUDA graph.
 * Both run the same attention kernel: a row that reads all its entries gets the same bits from either. */
KVC_API KvcStatus kvc_hybrid_attention(const KvcHybridAttentionParams* params, void* workspace,
                                       uint64_t workspace_bytes, void* stream, KvcMessage* message);
KVC_API KvcStatus kvc_dense_attention(const KvcDenseAttentionParams* params, void* workspace, uint64_t workspace_bytes,
                                      void* stream, KvcMessage* message);

#ifdef __cplusplus
}
#endif
#endif

/* KvcCompact: keep the part of a prompt's cache that its last queries look at (RocketKV, arXiv 2502.14051, stage 1).
 *
 * Symbols: B batch, H query heads, G KV heads, D head size, W window, S prompt length, C capacity, p page size,
 * P = ceil(C / p). All tensors are contiguous except k and v, whose strides are given. */
#ifndef KVC_COMPACT_H
#define KVC_COMPACT_H

#include "kvc/types.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct KvcCompactParams {
    uint64_t struct_bytes;         /* sizeof(KvcCompactParams) of the caller */
    int32_t dtype;                 /* KvcDtype */
    int32_t batch;                 /* B in 1..65535 */
    int32_t heads;                 /* H in 1..65535, a multiple of kv_heads; H / G in 1..16 */
    int32_t kv_heads;              /* G in 1..65535 */
    int32_t head_size;             /* D, a multiple of 8 in 16..256 */
    int32_t window;                /* W in 1..1024; at most prompt_budget if any prompt can exceed the budget */
    int32_t pool_kernel;           /* odd, in 1..4095 */
    int32_t page_size;             /* p >= 1 */
    int64_t prompt_length;         /* S in 1..2^20 */
    int64_t prompt_budget;         /* 1..capacity: tokens kept per KV head, window included */
    int64_t capacity;              /* C in min(S, prompt_budget)..2^20 */
    int64_t kv_stride_batch;       /* elements between rows of k and v */
    int64_t kv_stride_head;        /* elements between KV heads; strides are at least D and multiples of 8 */
    int64_t kv_stride_token;       /* elements between tokens of k and v; head elements are contiguous */
    const void* q_window;          /* [B,H,W,D]: row i is the query at n-W+i; rows before the prompt are ignored */
    const void* k;                 /* [B,G,S,D] after RoPE, by the strides above */
    const void* v;                 /* [B,G,S,D], same strides */
    const int64_t* prompt_lengths; /* [B], on the device: n, clamped to 0..S */
    void* k_cache;                 /* [B,G,C,D]: zeros past a row's end. k itself where the strides say [B,G,S=C,D] */
    void* v_cache;                 /* [B,G,C,D]; in place exactly if k_cache is */
    void* bounds;                  /* [B,G,2D,P]: page maxima of K, then of -K; or null where no pages are kept */
    int64_t* cache_lengths;        /* [B]: min(n, prompt_budget) */
    int32_t* indices;              /* [B,G,C]: prompt position of each slot, ascending; -1 past the row's end */
} KvcCompactParams;

/* Bytes of scratch memory that kvc_compact needs, a multiple of 256; a function of sizes, never of pointers. The memory
 * itself starts at a multiple of 16. */
KVC_API KvcStatus kvc_compact_workspace(const KvcCompactParams* params, uint64_t* bytes, KvcMessage* message);

/* Queue the compaction on `stream` (a cudaStream_t). Synchronises nothing and allocates nothing. */
KVC_API KvcStatus kvc_compact(const KvcCompactParams* params, void* workspace, uint64_t workspace_bytes, void* stream,
                              KvcMessage* message);

#ifdef __cplusplus
}
#endif
#endif

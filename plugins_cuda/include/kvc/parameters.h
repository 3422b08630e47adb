/* Generated from the operators' schemas (kvc_trt/operators) by `python -m plugins_cuda.generate`; edit those. */
/* The parameters of every operation. A value outside of its range is refused, by the name of its member.
 *
 * Symbols: B batch, H heads, G kv heads, D head size, W window,
 * S prompt length, C capacity, M block, P pages, K selected width.
 * P = ceil(C / page_size), in 16 bit rounded up to a multiple of 8, in fp8 of 16.
 * All tensors are contiguous except those whose strides are given. */
#ifndef KVC_PARAMETERS_H
#define KVC_PARAMETERS_H

#include "kvc/types.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Store a turn's keys and values behind the entries of a cache. */
typedef struct KvcAppendBlockParams {
    uint64_t struct_bytes;        /* sizeof(KvcAppendBlockParams) of the caller */
    int32_t dtype;                /* KvcDtype */
    int32_t batch;                /* B in 1..65535 */
    int32_t kv_heads;             /* G in 1..65535 */
    int32_t head_size;            /* D in 16..256, a multiple of 8 */
    int32_t cache_format;         /* 0..4: how keys and values are stored */
    int32_t reserved;             /* 0 */
    int64_t capacity;             /* C in 1..2^20 */
    int64_t block;                /* M in 1..2^20 */
    const void* k_new;            /* [B,G,M,D], after RoPE; padded on the right */
    const void* v_new;            /* [B,G,M,D] */
    void* k_cache;                /* [B,G,C,D] */
    void* k_scale;                /* [B,G,C,groups], fp16 or bytes of exponents, in formats */
    void* k_minimum;              /* [B,G,C,groups], fp16, in int4; groups is 1 in other formats */
    void* v_cache;                /* [B,G,C,D] */
    void* v_scale;                /* [B,G,C,groups], fp16 or bytes of exponents, in formats */
    void* v_minimum;              /* [B,G,C,groups], fp16, in int4; groups is 1 in other formats */
    const int64_t* cache_lengths; /* [B], on the device: entries before the append, where the new one goes */
    const int64_t* lengths;       /* [B], new tokens of each row, 1..M */
} KvcAppendBlockParams;

/* Keep the part of a prompt's cache that its last queries look at. */
typedef struct KvcCompactParams {
    uint64_t struct_bytes;         /* sizeof(KvcCompactParams) of the caller */
    int32_t dtype;                 /* KvcDtype */
    int32_t batch;                 /* B in 1..65535 */
    int32_t heads;                 /* H in 1..65535, a multiple of kv_heads, H / G in 1..16 */
    int32_t kv_heads;              /* G in 1..H */
    int32_t head_size;             /* D in 16..256, a multiple of 8 */
    int32_t window;                /* W in 1..1024, at most prompt_budget if any prompt can exceed the budget */
    int32_t pool_kernel;           /* odd, in 1..4095: width of the max-pooling over scores */
    int32_t page_size;             /* 1..2^31-1: tokens of a page */
    int32_t fp8_bounds;            /* 0..1: 1: bounds are fp8 (E5M2), rounded up; 0: they have the cache's type */
    int32_t by_length;             /* 0..1: 1: each row has its own prompt_budgets and pool_kernels */
    int32_t cache_format;          /* 0..4: how keys and values are stored */
    int32_t reserved;              /* 0 */
    int64_t prompt_length;         /* S in 1..2^20 */
    int64_t prompt_budget;         /* 1..capacity: tokens kept per KV head, window included */
    int64_t capacity;              /* C in 1..2^20: slots of the cache */
    int64_t kv_stride_batch;       /* elements between rows of k and v */
    int64_t kv_stride_head;        /* elements between KV heads; strides are at least D and multiples of 8 */
    int64_t kv_stride_token;       /* elements between tokens of k and v; head elements are contiguous */
    const void* q_window;          /* [B,H,W,D], row i is the query at n-W+i; rows before the prompt are ignored */
    const void* k;                 /* [B,G,S,D], after RoPE, by the strides above */
    const void* v;                 /* [B,G,S,D], same strides */
    const int64_t* prompt_lengths; /* [B], on the device: n, clamped to 0..S */
    const int64_t* prompt_budgets; /* [B], tokens that a row keeps, clamped to window..prompt_budget; or null */
    const int64_t* pool_kernels;   /* [B], odd: a row's width of the max-pooling, at most pool_kernel; or null */
    void* k_cache;                 /* [B,G,C,D], zeros past a row's end. k itself where the strides say [B,G,S=C,D] */
    void* k_scale;                 /* [B,G,C,groups], fp16 or bytes of exponents, in formats */
    void* k_minimum;               /* [B,G,C,groups], fp16, in int4; groups is 1 in other formats */
    void* v_cache;                 /* [B,G,C,D], in place exactly if k_cache is */
    void* v_scale;                 /* [B,G,C,groups], fp16 or bytes of exponents, in formats */
    void* v_minimum;               /* [B,G,C,groups], fp16, in int4; groups is 1 in other formats */
    void* bounds;                  /* [B,G,2D,P], page maxima of K, then of -K; or null */
    int64_t* cache_lengths;        /* [B], min(n, the row's budget) */
    int32_t* indices;              /* [B,G,C], prompt position of each slot, ascending; -1 past the row's end */
} KvcCompactParams;

/* Keep the part of stored and new tokens that the last queries of a turn look at. */
typedef struct KvcCompactTurnParams {
    uint64_t struct_bytes;         /* sizeof(KvcCompactTurnParams) of the caller */
    int32_t dtype;                 /* KvcDtype */
    int32_t batch;                 /* B in 1..65535 */
    int32_t heads;                 /* H in 1..65535, a multiple of kv_heads, H / G in 1..16 */
    int32_t kv_heads;              /* G in 1..H */
    int32_t head_size;             /* D in 16..256, a multiple of 8 */
    int32_t window;                /* W in 1..1024, at most prompt_budget if any prompt can exceed the budget */
    int32_t pool_kernel;           /* odd, in 1..4095: width of the max-pooling over scores */
    int32_t page_size;             /* 1..2^31-1: tokens of a page */
    int32_t fp8_bounds;            /* 0..1: 1: bounds are fp8 (E5M2), rounded up; 0: they have the cache's type */
    int32_t by_length;             /* 0..1: 1: each row has its own prompt_budgets and pool_kernels */
    int32_t cache_format;          /* 0..4: how keys and values are stored */
    int32_t reserved;              /* 0 */
    int64_t prompt_length;         /* S in 1..2^20 */
    int64_t prompt_budget;         /* 1..capacity: tokens kept per KV head, window included */
    int64_t capacity;              /* C in 1..2^20: slots of the cache */
    const void* q_window;          /* [B,H,W,D], the last queries of the turn, right-aligned */
    const void* k;                 /* [B,G,S,D], the stored tokens, then the new ones; after RoPE */
    const void* joined_k_scale;    /* [B,G,S,groups], fp16 or bytes of exponents, in formats */
    const void* joined_k_minimum;  /* [B,G,S,groups], fp16, in int4; groups is 1 in other formats */
    const void* v;                 /* [B,G,S,D] */
    const void* joined_v_scale;    /* [B,G,S,groups], fp16 or bytes of exponents, in formats */
    const void* joined_v_minimum;  /* [B,G,S,groups], fp16, in int4; groups is 1 in other formats */
    const int64_t* prompt_lengths; /* [B], stored and new tokens */
    const int64_t* window_lengths; /* [B], how many rows of q_window are the row's own, 1..W */
    const int64_t* prompt_budgets; /* [B], tokens that a row keeps, clamped to window..prompt_budget; or null */
    const int64_t* pool_kernels;   /* [B], odd: a row's width of the max-pooling, at most pool_kernel; or null */
    void* k_cache;                 /* [B,G,C,D], zeros past a row's end */
    void* k_scale;                 /* [B,G,C,groups], fp16 or bytes of exponents, in formats */
    void* k_minimum;               /* [B,G,C,groups], fp16, in int4; groups is 1 in other formats */
    void* v_cache;                 /* [B,G,C,D] */
    void* v_scale;                 /* [B,G,C,groups], fp16 or bytes of exponents, in formats */
    void* v_minimum;               /* [B,G,C,groups], fp16, in int4; groups is 1 in other formats */
    void* bounds; /* [B,G,2D,P], page maxima of K, then of -K; empty pages: the lowest finite value; or null */
    int64_t* cache_lengths; /* [B], min(n, the row's budget) */
    int32_t* indices;       /* [B,G,C], kept entries of k, ascending; -1 past the row's end */
} KvcCompactTurnParams;

/* Append one token, attend to every entry. */
typedef struct KvcDenseAttentionParams {
    uint64_t struct_bytes;        /* sizeof(KvcDenseAttentionParams) of the caller */
    int32_t dtype;                /* KvcDtype */
    int32_t batch;                /* B in 1..65535 */
    int32_t heads;                /* H in 1..65535, a multiple of kv_heads, H / G in 1..16 */
    int32_t kv_heads;             /* G in 1..H */
    int32_t head_size;            /* D in 16..256, a multiple of 8 */
    int32_t cache_format;         /* 0..4: how keys and values are stored */
    int64_t capacity;             /* C in 1..2^20 */
    const void* query;            /* [B,H,D], after RoPE */
    const void* k_new;            /* [B,G,D], after RoPE */
    const void* v_new;            /* [B,G,D] */
    void* k_cache;                /* [B,G,C,D] */
    void* k_scale;                /* [B,G,C,groups], fp16 or bytes of exponents, in formats */
    void* k_minimum;              /* [B,G,C,groups], fp16, in int4; groups is 1 in other formats */
    void* v_cache;                /* [B,G,C,D] */
    void* v_scale;                /* [B,G,C,groups], fp16 or bytes of exponents, in formats */
    void* v_minimum;              /* [B,G,C,groups], fp16, in int4; groups is 1 in other formats */
    const int64_t* cache_lengths; /* [B], on the device: entries before the append, where the new one goes */
    void* output;                 /* [B,H,D] */
} KvcDenseAttentionParams;

/* Append one token, select the pages that matter, attend to their tokens. */
typedef struct KvcHybridAttentionParams {
    uint64_t struct_bytes;        /* sizeof(KvcHybridAttentionParams) of the caller */
    int32_t dtype;                /* KvcDtype */
    int32_t batch;                /* B in 1..65535 */
    int32_t heads;                /* H in 1..65535, a multiple of kv_heads, H / G in 1..16 */
    int32_t kv_heads;             /* G in 1..H */
    int32_t head_size;            /* D in 16..256, a multiple of 8 */
    int32_t page_size;            /* 1..2^31-1: tokens of a page */
    int32_t top_r;                /* 1..head_size: channels that score pages */
    int32_t fp8_bounds;           /* 0..1: 1: bounds are fp8 (E5M2), rounded up; 0: they have the cache's type */
    int32_t cache_format;         /* 0..4: how keys and values are stored */
    int32_t recent;               /* 0..top_k: last tokens that a sparse step reads in any case, of its top_k */
    int64_t capacity;             /* C in 1..2^20 */
    int64_t top_k;                /* 1..capacity: tokens that a sparse step reads */
    int64_t token_budget;         /* 0..2^31-1 */
    int64_t dense_until;          /* 0..2^31-1: rows of m <= max(token_budget, dense_until) read all their entries */
    int64_t selected_width;       /* max(top_k, token_budget, dense_until) */
    const void* query;            /* [B,H,D], after RoPE */
    const void* k_new;            /* [B,G,D], after RoPE */
    const void* v_new;            /* [B,G,D] */
    void* k_cache;                /* [B,G,C,D] */
    void* k_scale;                /* [B,G,C,groups], fp16 or bytes of exponents, in formats */
    void* k_minimum;              /* [B,G,C,groups], fp16, in int4; groups is 1 in other formats */
    void* v_cache;                /* [B,G,C,D] */
    void* v_scale;                /* [B,G,C,groups], fp16 or bytes of exponents, in formats */
    void* v_minimum;              /* [B,G,C,groups], fp16, in int4; groups is 1 in other formats */
    void* bounds;                 /* [B,G,2D,P], page maxima of K, then of -K; empty pages: the lowest finite value */
    const int64_t* cache_lengths; /* [B], on the device: entries before the append, where the new one goes */
    void* output;                 /* [B,H,D] */
    int32_t* selected;            /* [B,G,K], slots read, ascending, -1 past the end; or null */
} KvcHybridAttentionParams;

/* Stored and new tokens of a turn in one table. */
typedef struct KvcJoinBlockParams {
    uint64_t struct_bytes;        /* sizeof(KvcJoinBlockParams) of the caller */
    int32_t dtype;                /* KvcDtype */
    int32_t batch;                /* B in 1..65535 */
    int32_t kv_heads;             /* G in 1..65535 */
    int32_t head_size;            /* D in 16..256, a multiple of 8 */
    int32_t cache_format;         /* 0..4: how keys and values are stored */
    int32_t reserved;             /* 0 */
    int64_t capacity;             /* C in 1..2^20 */
    int64_t block;                /* M in 1..2^20 */
    const void* k_new;            /* [B,G,M,D], after RoPE; padded on the right */
    const void* v_new;            /* [B,G,M,D] */
    const void* k_cache;          /* [B,G,C,D] */
    const void* k_scale;          /* [B,G,C,groups], fp16 or bytes of exponents, in formats */
    const void* k_minimum;        /* [B,G,C,groups], fp16, in int4; groups is 1 in other formats */
    const void* v_cache;          /* [B,G,C,D] */
    const void* v_scale;          /* [B,G,C,groups], fp16 or bytes of exponents, in formats */
    const void* v_minimum;        /* [B,G,C,groups], fp16, in int4; groups is 1 in other formats */
    const int64_t* cache_lengths; /* [B], entries before the new ones */
    const int64_t* lengths;       /* [B], new tokens of each row, 1..M */
    void* k;                      /* [B,G,C+M,D], the stored entries, then the new ones; after RoPE */
    void* joined_k_scale;         /* [B,G,C+M,groups], fp16 or bytes of exponents, in formats */
    void* joined_k_minimum;       /* [B,G,C+M,groups], fp16, in int4; groups is 1 in other formats */
    void* v;                      /* [B,G,C+M,D] */
    void* joined_v_scale;         /* [B,G,C+M,groups], fp16 or bytes of exponents, in formats */
    void* joined_v_minimum;       /* [B,G,C+M,groups], fp16, in int4; groups is 1 in other formats */
    int64_t* joined_lengths;      /* [B], stored and new tokens */
} KvcJoinBlockParams;

/* Let the bounds of the pages cover a turn's keys. */
typedef struct KvcRaiseBoundsParams {
    uint64_t struct_bytes; /* sizeof(KvcRaiseBoundsParams) of the caller */
    int32_t dtype;         /* KvcDtype */
    int32_t batch;         /* B in 1..65535 */
    int32_t kv_heads;      /* G in 1..65535 */
    int32_t head_size;     /* D in 16..256, a multiple of 8 */
    int32_t page_size;     /* 1..2^31-1: tokens of a page */
    int32_t fp8_bounds;    /* 0..1: 1: bounds are fp8 (E5M2), rounded up; 0: they have the cache's type */
    int32_t cache_format;  /* 0..4: how keys and values are stored */
    int32_t reserved;      /* 0 */
    int64_t block;         /* M in 1..2^20 */
    int64_t pages;     /* P in 1..2^20, ceil(C / page_size), in 16 bit rounded up to a multiple of 8, in fp8 of 16 */
    const void* k_new; /* [B,G,M,D], after RoPE; padded on the right */
    void* bounds;      /* [B,G,2D,P], page maxima of K, then of -K; empty pages: the lowest finite value */
    const int64_t* cache_lengths; /* [B], on the device: entries before the append, where the new one goes */
    const int64_t* lengths;       /* [B], new tokens of each row, 1..M */
} KvcRaiseBoundsParams;

/* Overwrite the bounds of a cache's pages. */
typedef struct KvcReplaceBoundsParams {
    uint64_t struct_bytes; /* sizeof(KvcReplaceBoundsParams) of the caller */
    int32_t dtype;         /* KvcDtype */
    int32_t batch;         /* B in 1..65535 */
    int32_t kv_heads;      /* G in 1..65535 */
    int32_t channels;      /* 2D in 32..512, a multiple of 16 */
    int32_t fp8_bounds;    /* 0..1: 1: bounds are fp8 (E5M2), rounded up; 0: they have the cache's type */
    int32_t reserved;      /* 0 */
    int64_t pages; /* P in 1..2^20, ceil(C / page_size), in 16 bit rounded up to a multiple of 8, in fp8 of 16 */
    void* bounds;  /* [B,G,2D,P], page maxima of K, then of -K; empty pages: the lowest finite value */
    const void* bounds_kept; /* [B,G,2D,P], the bounds from now on */
} KvcReplaceBoundsParams;

/* Overwrite a cache and the positions of its slots. */
typedef struct KvcReplaceCacheParams {
    uint64_t struct_bytes;         /* sizeof(KvcReplaceCacheParams) of the caller */
    int32_t dtype;                 /* KvcDtype */
    int32_t batch;                 /* B in 1..65535 */
    int32_t kv_heads;              /* G in 1..65535 */
    int32_t head_size;             /* D in 16..256, a multiple of 8 */
    int32_t cache_format;          /* 0..4: how keys and values are stored */
    int32_t reserved;              /* 0 */
    int64_t capacity;              /* C in 1..2^20 */
    void* k_cache;                 /* [B,G,C,D] */
    void* k_scale;                 /* [B,G,C,groups], fp16 or bytes of exponents, in formats */
    void* k_minimum;               /* [B,G,C,groups], fp16, in int4; groups is 1 in other formats */
    void* v_cache;                 /* [B,G,C,D] */
    void* v_scale;                 /* [B,G,C,groups], fp16 or bytes of exponents, in formats */
    void* v_minimum;               /* [B,G,C,groups], fp16, in int4; groups is 1 in other formats */
    int32_t* slot_positions;       /* [B,G,C], position of each entry in the text, -1 in an empty slot */
    const void* k_kept;            /* [B,G,C,D], what the cache holds from now on */
    const void* k_kept_scale;      /* [B,G,C,groups], fp16 or bytes of exponents, in formats */
    const void* k_kept_minimum;    /* [B,G,C,groups], fp16, in int4; groups is 1 in other formats */
    const void* v_kept;            /* [B,G,C,D] */
    const void* v_kept_scale;      /* [B,G,C,groups], fp16 or bytes of exponents, in formats */
    const void* v_kept_minimum;    /* [B,G,C,groups], fp16, in int4; groups is 1 in other formats */
    const int32_t* positions_kept; /* [B,G,C] */
} KvcReplaceCacheParams;

/* Rotate the new token, then append one token, select the pages that matter, attend to their tokens. */
typedef struct KvcRotatedHybridAttentionParams {
    uint64_t struct_bytes;        /* sizeof(KvcRotatedHybridAttentionParams) of the caller */
    int32_t dtype;                /* KvcDtype */
    int32_t batch;                /* B in 1..65535 */
    int32_t kv_heads;             /* G in 1..H */
    int32_t head_size;            /* D in 16..256, a multiple of 8 */
    int32_t heads;                /* H in 1..65535: query heads, a multiple of kv_heads, H / G in 1..16 */
    int32_t page_size;            /* 1..2^31-1: tokens of a page */
    int32_t top_r;                /* 1..head_size: channels that score pages */
    int32_t fp8_bounds;           /* 0..1: 1: bounds are fp8 (E5M2), rounded up; 0: they have the cache's type */
    int32_t cache_format;         /* 0..4: how keys and values are stored */
    int32_t recent;               /* 0..top_k: last tokens that a sparse step reads in any case, of its top_k */
    int64_t capacity;             /* C in 1..2^20 */
    int64_t top_k;                /* 1..capacity: tokens that a sparse step reads */
    int64_t token_budget;         /* 0..2^31-1 */
    int64_t dense_until;          /* 0..2^31-1: rows of m <= max(token_budget, dense_until) read all their entries */
    int64_t selected_width;       /* max(top_k, token_budget, dense_until) */
    const void* joined;           /* [B,H+2G,D], queries, keys and values of the new token, before RoPE */
    const float* cosines;         /* [B,D/2], of the row's position */
    const float* sines;           /* [B,D/2] */
    void* k_cache;                /* [B,G,C,D] */
    void* k_scale;                /* [B,G,C,groups], fp16 or bytes of exponents, in formats */
    void* k_minimum;              /* [B,G,C,groups], fp16, in int4; groups is 1 in other formats */
    void* v_cache;                /* [B,G,C,D] */
    void* v_scale;                /* [B,G,C,groups], fp16 or bytes of exponents, in formats */
    void* v_minimum;              /* [B,G,C,groups], fp16, in int4; groups is 1 in other formats */
    void* bounds;                 /* [B,G,2D,P], page maxima of K, then of -K; empty pages: the lowest finite value */
    const int64_t* cache_lengths; /* [B], on the device: entries before the append, where the new one goes */
    void* output;                 /* [B,H,D] */
    int32_t* selected;            /* [B,G,K], slots read, ascending, -1 past the end; or null */
    void* query;                  /* [B,H,D], the rotated query */
} KvcRotatedHybridAttentionParams;

/* Rotate the new token, then append one token, attend to every entry. */
typedef struct KvcRotatedDenseAttentionParams {
    uint64_t struct_bytes;        /* sizeof(KvcRotatedDenseAttentionParams) of the caller */
    int32_t dtype;                /* KvcDtype */
    int32_t batch;                /* B in 1..65535 */
    int32_t kv_heads;             /* G in 1..H */
    int32_t head_size;            /* D in 16..256, a multiple of 8 */
    int32_t heads;                /* H in 1..65535: query heads, a multiple of kv_heads, H / G in 1..16 */
    int32_t cache_format;         /* 0..4: how keys and values are stored */
    int64_t capacity;             /* C in 1..2^20 */
    const void* joined;           /* [B,H+2G,D], queries, keys and values of the new token, before RoPE */
    const float* cosines;         /* [B,D/2], of the row's position */
    const float* sines;           /* [B,D/2] */
    void* k_cache;                /* [B,G,C,D] */
    void* k_scale;                /* [B,G,C,groups], fp16 or bytes of exponents, in formats */
    void* k_minimum;              /* [B,G,C,groups], fp16, in int4; groups is 1 in other formats */
    void* v_cache;                /* [B,G,C,D] */
    void* v_scale;                /* [B,G,C,groups], fp16 or bytes of exponents, in formats */
    void* v_minimum;              /* [B,G,C,groups], fp16, in int4; groups is 1 in other formats */
    const int64_t* cache_lengths; /* [B], on the device: entries before the append, where the new one goes */
    void* output;                 /* [B,H,D] */
    void* query;                  /* [B,H,D], the rotated query */
} KvcRotatedDenseAttentionParams;

#ifdef __cplusplus
}
#endif
#endif

/* One decode step of one layer: append a token, choose what to read, attend (RocketKV, arXiv 2502.14051, stage 2).
 *
 * Symbols: B batch, H query heads, G KV heads, D head size, C capacity, p page size, P pages as in parameters.h,
 * m entries of a row after the append. All tensors are contiguous. k_cache, v_cache and bounds are updated in place.
 * A row whose cache length is outside 0..C-1 is inactive: the call writes only its output, which becomes zero, and
 * its selected list, which becomes -1.
 * In a cache format the new token is stored, then read: bounds and attention are those of what is read back. A vector with
 * a NaN or an infinity is stored as one that is NaN in all channels.
 * NaN scores rank lowest; a NaN that is read makes the output NaN, as softmax does. An infinite value in a 16-bit cache
 * makes its channel of the output NaN where exact arithmetic may give infinity. */
#ifndef KVC_ATTENTION_H
#define KVC_ATTENTION_H

#include "kvc/parameters.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Bytes of scratch memory, a multiple of 256; a function of sizes, never of pointers. The memory itself starts at a
 * multiple of 16. */
KVC_API KvcStatus kvc_hybrid_attention_workspace(const KvcHybridAttentionParams* params, uint64_t* bytes,
                                                 KvcMessage* message);
KVC_API KvcStatus kvc_dense_attention_workspace(const KvcDenseAttentionParams* params, uint64_t* bytes,
                                                KvcMessage* message);

/* Queue the step on `stream` (a cudaStream_t): a fixed number of launches, safe to capture in a CUDA graph.
 * Both operations run the same attention kernel: a row that reads all its entries gets the same bits from either. */
KVC_API KvcStatus kvc_hybrid_attention(const KvcHybridAttentionParams* params, void* workspace,
                                       uint64_t workspace_bytes, void* stream, KvcMessage* message);
KVC_API KvcStatus kvc_dense_attention(const KvcDenseAttentionParams* params, void* workspace, uint64_t workspace_bytes,
                                      void* stream, KvcMessage* message);

/* The same steps, given the product of the joined projections, [B,H+2G,D]: queries, keys and values of the new token,
 * without rotary embedding. Query and key are rotated (arXiv 2104.09864; two halves of a head form the pairs): products
 * and their sum in fp32, each rounded, the result rounded to the call's type. The number of launches is the same.
 * The rotated query is written to `query`, also that of inactive rows. */
KVC_API KvcStatus kvc_rotated_hybrid_attention_workspace(const KvcRotatedHybridAttentionParams* params, uint64_t* bytes,
                                                         KvcMessage* message);
KVC_API KvcStatus kvc_rotated_dense_attention_workspace(const KvcRotatedDenseAttentionParams* params, uint64_t* bytes,
                                                        KvcMessage* message);
KVC_API KvcStatus kvc_rotated_hybrid_attention(const KvcRotatedHybridAttentionParams* params, void* workspace,
                                               uint64_t workspace_bytes, void* stream, KvcMessage* message);
KVC_API KvcStatus kvc_rotated_dense_attention(const KvcRotatedDenseAttentionParams* params, void* workspace,
                                              uint64_t workspace_bytes, void* stream, KvcMessage* message);

#ifdef __cplusplus
}
#endif
#endif

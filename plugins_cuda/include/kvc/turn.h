/* Changes that a turn of a conversation makes to a cache: many new tokens at once (kvc/compact.h compacts both).
 *
 * Symbols: B batch, G KV heads, D head size, C capacity, M tokens of a block, P pages as in parameters.h. All tensors are
 * contiguous. A row's new tokens come first in its block; `lengths` gives their number. A length out of range counts as
 * the nearest value in range, and a token without a slot is dropped.
 * In a cache format the block's keys and values are exact. kvc_append_block stores them, kvc_join_block stores them and
 * moves what is stored already, and kvc_raise_bounds takes each as the cache will read it back. */
#ifndef KVC_TURN_H
#define KVC_TURN_H

#include "kvc/parameters.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Bytes of scratch memory: 0. */
KVC_API KvcStatus kvc_append_block_workspace(const KvcAppendBlockParams* params, uint64_t* bytes, KvcMessage* message);
KVC_API KvcStatus kvc_raise_bounds_workspace(const KvcRaiseBoundsParams* params, uint64_t* bytes, KvcMessage* message);
KVC_API KvcStatus kvc_join_block_workspace(const KvcJoinBlockParams* params, uint64_t* bytes, KvcMessage* message);
KVC_API KvcStatus kvc_replace_cache_workspace(const KvcReplaceCacheParams* params, uint64_t* bytes,
                                              KvcMessage* message);
KVC_API KvcStatus kvc_replace_bounds_workspace(const KvcReplaceBoundsParams* params, uint64_t* bytes,
                                               KvcMessage* message);

/* Store keys and values of the block behind the entries of the caches, in place. */
KVC_API KvcStatus kvc_append_block(const KvcAppendBlockParams* params, void* workspace, uint64_t workspace_bytes,
                                   void* stream, KvcMessage* message);

/* Raise the bounds of the pages in which the block's tokens are stored, in place. */
KVC_API KvcStatus kvc_raise_bounds(const KvcRaiseBoundsParams* params, void* workspace, uint64_t workspace_bytes,
                                   void* stream, KvcMessage* message);

/* Write stored and new tokens into one table; past a row's end it is zero. */
KVC_API KvcStatus kvc_join_block(const KvcJoinBlockParams* params, void* workspace, uint64_t workspace_bytes,
                                 void* stream, KvcMessage* message);

/* Overwrite state by tensors of the same shape. */
KVC_API KvcStatus kvc_replace_cache(const KvcReplaceCacheParams* params, void* workspace, uint64_t workspace_bytes,
                                    void* stream, KvcMessage* message);
KVC_API KvcStatus kvc_replace_bounds(const KvcReplaceBoundsParams* params, void* workspace, uint64_t workspace_bytes,
                                     void* stream, KvcMessage* message);

#ifdef __cplusplus
}
#endif
#endif

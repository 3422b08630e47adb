/* KvcCompact: keep the part of a prompt's cache that its last queries look at (RocketKV, arXiv 2502.14051, stage 1).
 * KvcCompactTurn: the same for stored and new tokens after a turn; each row has its own number of voting queries.
 *
 * In a cache format k and v of KvcCompact are exact, those of KvcCompactTurn are stored already: codes move, and votes read
 * what is read back. Bounds are those of what is read back. A cache in a format is not compacted in place.
 *
 * Symbols: B batch, H query heads, G KV heads, D head size, W window, S prompt length, C capacity, p page size,
 * P pages as in parameters.h. All tensors are contiguous except k and v, whose strides are given. */
#ifndef KVC_COMPACT_H
#define KVC_COMPACT_H

#include "kvc/parameters.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Bytes of scratch memory that a compaction needs, a multiple of 256; a function of sizes, never of pointers. The memory
 * itself starts at a multiple of 16. */
KVC_API KvcStatus kvc_compact_workspace(const KvcCompactParams* params, uint64_t* bytes, KvcMessage* message);

KVC_API KvcStatus kvc_compact_turn_workspace(const KvcCompactTurnParams* params, uint64_t* bytes, KvcMessage* message);

/* Queue the compaction on `stream` (a cudaStream_t). Synchronises nothing and allocates nothing. */
KVC_API KvcStatus kvc_compact(const KvcCompactParams* params, void* workspace, uint64_t workspace_bytes, void* stream,
                              KvcMessage* message);
KVC_API KvcStatus kvc_compact_turn(const KvcCompactTurnParams* params, void* workspace, uint64_t workspace_bytes,
                                   void* stream, KvcMessage* message);

#ifdef __cplusplus
}
#endif
#endif

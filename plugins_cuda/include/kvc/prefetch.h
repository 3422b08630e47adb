/* Reads memory into the L2 cache ahead of the kernels that will need it: a hint, without a result. */
#ifndef KVC_PREFETCH_H
#define KVC_PREFETCH_H

#include "kvc/types.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct KvcPrefetchParams {
    uint64_t struct_bytes; /* sizeof(KvcPrefetchParams) of the caller */
    int64_t bytes;         /* 16..2^40, a multiple of 16 */
    const void* first;     /* where they are; on an sm_80 nothing is read */
} KvcPrefetchParams;

/* Starts to read the bytes. The launch ends before they have arrived. */
KVC_API KvcStatus kvc_prefetch(const KvcPrefetchParams* params, void* stream, KvcMessage* message);

#ifdef __cplusplus
}
#endif
#endif

/* Exports of an emulated library next to the C ABI: the order in which it runs blocks and threads, the GPU whose limits
   it enforces, and its record of launches. A correct kernel gives the same bits in every order; tests run all three. */
#ifndef KVC_EMULATION_H
#define KVC_EMULATION_H

#include "kvc/types.h"

#ifdef __cplusplus
extern "C" {
#endif

/* The choice of the next thread among those that can run: the lowest, the highest, or a random one; same for blocks. */
typedef enum KvcEmulationOrder {
    KVC_EMULATION_FORWARD = 0,
    KVC_EMULATION_REVERSE = 1,
    KVC_EMULATION_SHUFFLED = 2
} KvcEmulationOrder;

/* Holds for every later launch of the process. The seed matters to the shuffled order only. */
KVC_API KvcStatus kvc_emulation_set_schedule(int32_t order, uint64_t seed);

/* "sm_80" (until another is chosen), "sm_90a" or "sm_100". Holds for every later launch of the process. */
KVC_API KvcStatus kvc_emulation_set_device(const char* architecture);

/* The clusters that a GPU holds at once, as one with smaller groups of multiprocessors; 0 for those of the chosen GPU. */
KVC_API void kvc_emulation_set_active_clusters(int64_t count);

/* The next `count` questions of launches about clusters, and requests for shared memory, fail; 0 undoes it. */
KVC_API void kvc_emulation_refuse_queries(int64_t count);

/* With 1, launches are checked and recorded, and no kernel runs: nothing is read or written. 0 runs them again. */
KVC_API void kvc_emulation_set_checks_only(int32_t checks_only);

typedef struct KvcEmulationLaunch {
    char name[64];
    uint32_t grid[3];
    uint32_t block[3];
    uint64_t static_shared_bytes; /* as nvcc counts them; for a test's kernel, the most that any block declared */
    uint64_t dynamic_shared_bytes;
    uint64_t switches;              /* times that a thread was resumed: the cost of emulating the launch */
    uint32_t registers;             /* of a thread, as nvcc counts them; 0 for a test's kernel */
    uint32_t begins_early;          /* 1 where the launch may begin before the one before it has ended */
    uint64_t products;              /* mma.sync of all warps */
    uint64_t exchanges;             /* shuffles and votes of all warps */
    uint64_t barriers;              /* __syncthreads of all blocks */
    uint64_t cluster_barriers;      /* of all blocks: a barrier of a cluster counts once for each of its blocks */
    uint64_t cluster_blocks;        /* blocks of a cluster; 1 without clusters */
    uint64_t prefers_shared_memory; /* 1 where the kernel has asked for as much as a multiprocessor can have */
} KvcEmulationLaunch;

/* Copies the launches since the last clear, oldest first, into records[0..capacity); returns how many there were.
   A process that never clears them does not grow for ever: they are cleared at 65536. */
KVC_API int64_t kvc_emulation_launches(KvcEmulationLaunch* records, int64_t capacity);
KVC_API void kvc_emulation_clear_launches(void);

/* A straight piece of a launched kernel: the address at which its code continues (relative to the library's beginning),
   and its executions: by all warps together; by the warp that ran it most of each block, or of its cluster, added over
   the blocks; and by all lanes, for what a warp does lane by lane. */
typedef struct KvcEmulationExecutions {
    char kernel[64];
    uint64_t address;
    uint64_t warps;
    uint64_t longest;
    uint64_t lanes;
} KvcEmulationExecutions;

/* As kvc_emulation_launches, and cleared with them. Empty except in the library kvc_emulation_executions. */
KVC_API int64_t kvc_emulation_executions(KvcEmulationExecutions* records, int64_t capacity);

#ifdef __cplusplus
}
#endif
#endif

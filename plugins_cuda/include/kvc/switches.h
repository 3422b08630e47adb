/* Switches of the environment that turn one feature off each, so that a measurement can tell what it is worth. Results do
   not depend on them: the value "0" turns a feature off, and any other value, or none, leaves it on.

     KVC_TRT_EARLY_LAUNCH  launches begin while the one before them still runs
     KVC_TRT_CLUSTERS      clusters of blocks score and select for few rows, and select from prompts
     KVC_TRT_CLUSTER_STEP  such clusters also attend, for up to 16 rows
     KVC_TRT_RING          attention copies two tiles ahead where blocks are few
     KVC_TRT_CARVEOUT      kernels ask for as much shared memory as a multiprocessor can have

   kvc_trt/kernels/switches.py has them too, and those that the library does not know. */
#ifndef KVC_SWITCHES_H
#define KVC_SWITCHES_H

#include "kvc/types.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Reads the environment again; the library itself reads it once, at its first launch. Call it while nothing is launched. */
KVC_API void kvc_read_switches(void);

#ifdef __cplusplus
}
#endif
#endif

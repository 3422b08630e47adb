/* Common to every operation of the C ABI: element types, status codes, and the message that explains a refusal. */
#ifndef KVC_TYPES_H
#define KVC_TYPES_H

#include <stdint.h>

#if defined(__GNUC__)
#define KVC_API __attribute__((visibility("default")))
#else
#define KVC_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* Raised whenever an operation is added, or a parameter struct or the meaning of a field changes. */
#define KVC_ABI_VERSION 5

/* Type of queries, keys, values and outputs of one call, and of its bounds where fp8_bounds is 0: else they are codes of
 * fp8 E5M2, a byte each. Scores and sums are always fp32.
 *
 * cache_format says how caches store keys and values: 0 as they are, 1 int8, 2 fp8 E4M3, 3 int4, 4 keys in int8 and values
 * in int4. Except for 0 a cache holds codes, D bytes of a vector or, in int4, D / 2 (the even channel in the lower bits), and
 * beside them are its scales (fp16; in fp8 a byte, the exponent of a power of two plus 127) and, in int4, its minima (fp16).
 * In int4 groups of 32 channels have numbers of their own where 32 divides D. An address of numbers that a format does not
 * have is not looked at. */
typedef enum KvcDtype { KVC_FLOAT32 = 0, KVC_FLOAT16 = 1, KVC_BFLOAT16 = 2 } KvcDtype;

typedef enum KvcStatus {
    KVC_OK = 0,
    KVC_INVALID_PARAMETER = 1,   /* a field is out of its range; nothing was launched, nothing was written */
    KVC_WORKSPACE_TOO_SMALL = 2, /* nothing was launched, nothing was written */
    KVC_LAUNCH_FAILED = 3        /* the CUDA runtime refused a launch; the message carries its reason */
} KvcStatus;

/* One line: the field, its value, and the allowed values. Empty after KVC_OK. */
typedef struct KvcMessage {
    char text[256];
} KvcMessage;

/* The executor of this library's kernels: "cuda", or "emulation" (host pointers, stream ignored). */
KVC_API const char* kvc_executor(void);

/* KVC_ABI_VERSION of the library; a caller refuses any version but its own. */
KVC_API int32_t kvc_abi_version(void);

#ifdef __cplusplus
}
#endif
#endif

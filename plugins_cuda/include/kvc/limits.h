/* Generated from the operators' schemas (kvc_trt/operators) by `python -m plugins_cuda.generate`; edit those. */
/* The largest sizes that the kernels serve. A call beyond one of them is refused. */
#ifndef KVC_LIMITS_H
#define KVC_LIMITS_H

#define KVC_LARGEST_HEAD_SIZE 256 /* D */
#define KVC_LARGEST_GROUP 16      /* H / G: query heads of a KV head */

#endif

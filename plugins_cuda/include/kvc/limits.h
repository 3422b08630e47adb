/* The largest sizes that the kernels serve. A call beyond one of them is refused. */
#ifndef KVC_LIMITS_H
#define KVC_LIMITS_H

#define KVC_LARGEST_HEAD_SIZE 256    /* D */
#define KVC_LARGEST_GROUP 16         /* H / G: query heads of a KV head */
#define KVC_LARGEST_WINDOW 1024      /* W: queries of the observation window */
#define KVC_LARGEST_POOL_KERNEL 4095 /* votes that one pooled vote covers */
#define KVC_MOST_TOKENS 1048576      /* of a prompt, and of a cache */

#endif

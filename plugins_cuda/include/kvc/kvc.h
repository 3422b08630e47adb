/* The whole C ABI. No CUDA, TensorRT or C++ header is needed to call it. */
#ifndef KVC_KVC_H
#define KVC_KVC_H

#include "kvc/attention.h"
#include "kvc/compact.h"
#include "kvc/limits.h"
#include "kvc/parameters.h"
#include "kvc/prefetch.h"
#include "kvc/switches.h"
#include "kvc/turn.h"
#include "kvc/types.h"

#endif

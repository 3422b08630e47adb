// Generated from the operators' schemas (kvc_trt/operators) by `python -m plugins_cuda.generate`; edit those.
// Every operator, each in a file of its own in operators/.
#pragma once

#include "tensorrt/plugin.h"

namespace kvc::tensorrt {

extern const Operator kAppendBlock;
extern const Operator kRaiseBounds;
extern const Operator kCompact;
extern const Operator kCompactTurn;
extern const Operator kDenseAttention;
extern const Operator kHybridAttention;
extern const Operator kJoinBlock;
extern const Operator kReplaceCache;
extern const Operator kReplaceBounds;

inline constexpr const Operator* kOperators[] = {&kAppendBlock, &kRaiseBounds,    &kCompact,
                                                 &kCompactTurn, &kDenseAttention, &kHybridAttention,
                                                 &kJoinBlock,   &kReplaceCache,   &kReplaceBounds};

}  // namespace kvc::tensorrt

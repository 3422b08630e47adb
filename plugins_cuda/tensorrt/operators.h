// Generated from the operators' schemas (kvc_trt/operators) by `python -m plugins_cuda.generate`; edit those.
// Every operator, each in a file of its own in operators/.
#pragma once

#include "tensorrt/plugin.h"

namespace kvc::tensorrt {

extern const Operator kAppendBlock;
extern const Operator kCompact;
extern const Operator kCompactTurn;
extern const Operator kDenseAttention;
extern const Operator kHybridAttention;
extern const Operator kJoinBlock;
extern const Operator kRaiseBounds;
extern const Operator kReplaceBounds;
extern const Operator kReplaceCache;

inline constexpr const Operator* kOperators[] = {&kAppendBlock,    &kCompact,         &kCompactTurn,
                                                 &kDenseAttention, &kHybridAttention, &kJoinBlock,
                                                 &kRaiseBounds,    &kReplaceBounds,   &kReplaceCache};

}  // namespace kvc::tensorrt

// One launch that stands for all of a hybrid step, for few rows.
#pragma once

#include "kernels/append.cuh"
#include "kvc/attention.h"
#include "src/launch.h"

namespace kvc {

/// Queues the launch and returns true; returns false, and queues nothing, where its rule (src/cluster_step.cu) forbids it.
template <class T>
bool launch_cluster_step(const KvcHybridAttentionParams& p, const AppendParams<T>& append, int32_t pages,
                         Stream& stream);

}  // namespace kvc

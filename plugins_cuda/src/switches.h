// The switches of include/kvc/switches.h, as launches ask for them.
#pragma once

namespace kvc {

enum class Switch { kEarlyLaunch, kClusters, kClusterStep, kRing, kCarveout };

/// True unless the environment turns the feature off. The environment is read at the first call of the process.
bool is_on(Switch feature);

}  // namespace kvc

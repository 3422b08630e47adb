#include "operators/all.h"

namespace kvc {

std::span<const Implementation> implementations() {
    static const Implementation all[] = {kAddNormImplementation,
                                         kCompactImplementation,
                                         kCompactTurnImplementation,
                                         kCompactAverageImplementation,
                                         kCompactAverageTurnImplementation,
                                         kExtendAttentionImplementation,
                                         kJoinBlockImplementation,
                                         kDenseAttentionImplementation,
                                         kGatedHalvesImplementation,
                                         kGatedUnitImplementation,
                                         kHybridAttentionImplementation,
                                         kLinearImplementation,
                                         kNarrowLinearImplementation,
                                         kPrefillAttentionImplementation,
                                         kQuantisedLinearImplementation,
                                         kRotatedHeadsImplementation};
    return all;
}

}  // namespace kvc

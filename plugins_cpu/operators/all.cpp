#include "operators/all.h"

namespace kvc {

std::span<const Implementation> implementations() {
    static const Implementation all[] = {kAddNormImplementation,
                                         kClampedExpertsImplementation,
                                         kCompactImplementation,
                                         kCompactTurnImplementation,
                                         kCompactAverageImplementation,
                                         kCompactAverageTurnImplementation,
                                         kDeltaRuleImplementation,
                                         kDeltaStepImplementation,
                                         kExpertsImplementation,
                                         kExtendAttentionImplementation,
                                         kJoinBlockImplementation,
                                         kDenseAttentionImplementation,
                                         kGatedHalvesImplementation,
                                         kGatedUnitImplementation,
                                         kHybridAttentionImplementation,
                                         kLinearImplementation,
                                         kNarrowLinearImplementation,
                                         kPrefillAttentionImplementation,
                                         kQuantisedClampedExpertsImplementation,
                                         kQuantisedExpertsImplementation,
                                         kQuantisedLinearImplementation,
                                         kRotatedHeadsImplementation};
    return all;
}

}  // namespace kvc

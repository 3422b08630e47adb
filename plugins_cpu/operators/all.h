// The operators that the library computes, one file each.
#pragma once

#include <span>

#include "onnxruntime/call.h"

namespace kvc {

/// All operators; the registration and Python's list of native operators are made from this table.
std::span<const Implementation> implementations();

extern const Implementation kCompactImplementation;
extern const Implementation kCompactTurnImplementation;
extern const Implementation kCompactAverageImplementation;
extern const Implementation kCompactAverageTurnImplementation;
extern const Implementation kDeltaRuleImplementation;
extern const Implementation kDeltaStepImplementation;
extern const Implementation kExpertsImplementation;
extern const Implementation kClampedExpertsImplementation;
extern const Implementation kExtendAttentionImplementation;
extern const Implementation kJoinBlockImplementation;
extern const Implementation kDenseAttentionImplementation;
extern const Implementation kQuantisedExpertsImplementation;
extern const Implementation kQuantisedClampedExpertsImplementation;
extern const Implementation kQuantisedLinearImplementation;
extern const Implementation kAddNormImplementation;
extern const Implementation kGatedHalvesImplementation;
extern const Implementation kGatedUnitImplementation;
extern const Implementation kRotatedHeadsImplementation;
extern const Implementation kLinearImplementation;
extern const Implementation kNarrowLinearImplementation;
extern const Implementation kHybridAttentionImplementation;
extern const Implementation kPrefillAttentionImplementation;

}  // namespace kvc

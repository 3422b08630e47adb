#include "operators/all.h"

namespace kvc {

std::span<const Implementation> implementations() {
    static const Implementation all[] = {
        kAddNormImplementation,          kDenseAttentionImplementation,  kGatedHalvesImplementation,
        kGatedUnitImplementation,        kHybridAttentionImplementation, kLinearImplementation,
        kPrefillAttentionImplementation, kQuantisedLinearImplementation, kRotatedHeadsImplementation};
    return all;
}

}  // namespace kvc

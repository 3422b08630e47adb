#include "operators/all.h"

namespace kvc {

std::span<const Implementation> implementations() {
    static const Implementation all[] = {kDenseAttentionImplementation, kHybridAttentionImplementation,
                                         kPrefillAttentionImplementation, kQuantisedLinearImplementation};
    return all;
}

}  // namespace kvc

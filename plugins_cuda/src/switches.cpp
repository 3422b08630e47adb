#include "src/switches.h"

#include "kvc/switches.h"

#include <array>
#include <atomic>
#include <cstdlib>
#include <cstring>

namespace kvc {
namespace {

// By Switch.
constexpr std::array<const char*, 5> kVariables = {"KVC_TRT_EARLY_LAUNCH", "KVC_TRT_CLUSTERS", "KVC_TRT_CLUSTER_STEP",
                                                   "KVC_TRT_RING", "KVC_TRT_CARVEOUT"};

// Bit i is 1 where switch i is on.
unsigned environment() {
    unsigned on = 0;
    for (unsigned i = 0; i < kVariables.size(); ++i) {
        const char* value = std::getenv(kVariables[i]);
        if (value == nullptr || std::strcmp(value, "0") != 0) {
            on |= 1u << i;
        }
    }
    return on;
}

std::atomic<unsigned>& switches() {
    static std::atomic<unsigned> found{environment()};
    return found;
}

}  // namespace

bool is_on(Switch feature) {
    return (switches().load(std::memory_order_relaxed) >> static_cast<unsigned>(feature) & 1u) != 0;
}

}  // namespace kvc

extern "C" void kvc_read_switches(void) { kvc::switches().store(kvc::environment(), std::memory_order_relaxed); }

#include "emulation/shared_array.h"

#include <string>

namespace kvc::platform {

void fail_shared_access(int64_t index, size_t count) {
    emulation::current_block->fail("shared access [" + std::to_string(index) + "] of " + std::to_string(count));
}

void check_shared_alignment(size_t address, size_t alignment) {
    if (address % alignment == 0) return;
    emulation::current_block->fail("shared memory " + std::to_string(address % alignment) +
                                   " bytes past a multiple of " + std::to_string(alignment) +
                                   ", where the type needs one");
}

}  // namespace kvc::platform

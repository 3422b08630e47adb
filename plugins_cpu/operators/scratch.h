// Memory of one call, in whole cache lines.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <memory>
#include <new>

namespace kvc {

struct Free {
    void operator()(uint8_t* memory) const { std::free(memory); }
};
using Scratch = std::unique_ptr<uint8_t, Free>;

/// Allocates uninitialised bytes, aligned to 64; throws std::bad_alloc on failure.
inline Scratch aligned(int64_t bytes) {
    constexpr int64_t line = 64;
    Scratch made(
        static_cast<uint8_t*>(std::aligned_alloc(line, static_cast<size_t>((bytes + line - 1) / line * line))));
    if (made == nullptr) throw std::bad_alloc();
    return made;
}

}  // namespace kvc

// The number of pages that the bounds of a cache have room for: for kernels, launchers, checks and plugins.
#pragma once

#include <cstdint>

namespace kvc {

/// P: the pages of `capacity` slots, in 16 bit rounded up to a multiple of 8, in fp8 of 16, so that a row of bounds starts
/// at a multiple of 16 bytes. No row of a cache reaches the pages past its last slot: they stay empty. `element_bytes` are
/// those of the cache's type.
constexpr int64_t stored_pages(int64_t capacity, int64_t page_size, int64_t element_bytes, int64_t fp8_bounds) {
    const int64_t multiple = fp8_bounds != 0 ? 16 : element_bytes == 2 ? 8 : 1;
    const int64_t slots = page_size * multiple;
    return (capacity + slots - 1) / slots * multiple;
}

}  // namespace kvc

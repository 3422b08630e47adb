// Shared by every launch: errors, sizes and workspaces, grids, and the choice of a kernel by type and head size.
#pragma once

#include "kernels/numeric.cuh"
#include "src/error.h"
#include "src/launch_kernel.h"
#include "src/sizes.h"

namespace kvc {

/// Names an element type: `dispatch_dtype(dtype, [&](auto tag) { using T = typename decltype(tag)::Type; ... })`.
template <class T>
struct TypeTag {
    using Type = T;
};

/// Calls `body` with the tag of a validated KvcDtype.
template <class Body>
void dispatch_dtype(int32_t dtype, Body&& body) {
    switch (dtype) {
        case KVC_FLOAT32: return body(TypeTag<float>{});
        case KVC_FLOAT16: return body(TypeTag<half_t>{});
        case KVC_BFLOAT16: return body(TypeTag<bfloat16_t>{});
        default: throw Error(KVC_INVALID_PARAMETER, "dtype is " + std::to_string(dtype) + "; expected 0, 1 or 2");
    }
}

/// Calls `body` with the smallest of 64, 128, 256 (a std::integral_constant) that holds `head_size` channels.
template <class Body>
void dispatch_head_size(int32_t head_size, Body&& body) {
    if (head_size <= 64) {
        return body(std::integral_constant<int, 64>{});
    }
    if (head_size <= 128) {
        return body(std::integral_constant<int, 128>{});
    }
    return body(std::integral_constant<int, 256>{});
}

/// A grid of at least one block on every axis.
inline dim3 grid_of(int64_t x, int64_t y, int64_t z = 1) {
    return dim3(static_cast<unsigned>(x), static_cast<unsigned>(y), static_cast<unsigned>(z));
}

}  // namespace kvc

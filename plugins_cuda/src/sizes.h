// Sizes in 64 bits that never wrap, and the layout of a scratch buffer.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <limits>

#include "src/error.h"

namespace kvc {

/// Alignment of a workspace and of every part of it.
inline constexpr uint64_t kWorkspaceAlignment = 256;

/// a / b rounded up, for a >= 0 and b > 0.
template <class Integer>
constexpr Integer ceil_div(Integer a, Integer b) {
    return a / b + (a % b != 0 ? 1 : 0);
}

/// Bytes of an element of a validated KvcDtype.
constexpr int64_t element_bytes_of(int32_t dtype) { return dtype == KVC_FLOAT32 ? 4 : 2; }

/// Largest size in bytes: offsets are signed 64-bit.
inline constexpr uint64_t kLargestSize = std::numeric_limits<int64_t>::max();

[[noreturn]] inline void refuse_size(const char* what) {
    throw Error(KVC_INVALID_PARAMETER, std::string(what) + " overflows; expected at most 2^63-1 bytes");
}

/// Product of non-negative sizes. Throws Error (KVC_INVALID_PARAMETER) naming `what` if it does not fit an int64.
inline uint64_t checked_product(const char* what, std::initializer_list<int64_t> factors) {
    uint64_t product = 1;
    for (const int64_t factor : factors) {
        const auto size = static_cast<uint64_t>(factor);
        if (size != 0 && product > kLargestSize / size) {
            refuse_size(what);
        }
        product *= size;
    }
    return product;
}

/// Sum of sizes that each fit an int64. Throws Error as checked_product does.
inline uint64_t checked_sum(const char* what, std::initializer_list<uint64_t> terms) {
    uint64_t sum = 0;
    for (const uint64_t term : terms) {
        if (term > kLargestSize - sum) {
            refuse_size(what);
        }
        sum += term;
    }
    return sum;
}

/// `bytes` rounded up to a multiple of `alignment`. Throws Error as checked_product does.
inline uint64_t align_up(uint64_t bytes, uint64_t alignment) {
    if (bytes > kLargestSize - alignment) {
        refuse_size("workspace");
    }
    return ceil_div(bytes, alignment) * alignment;
}

/// Cuts a scratch buffer into aligned parts. Without a buffer it only measures: the same code lays the parts out and
/// counts their bytes, so that the two cannot disagree.
class Workspace {
public:
    /// Only measures.
    Workspace() = default;

    /// Cuts up [base, base + bytes).
    Workspace(void* base, uint64_t bytes) : base_(static_cast<char*>(base)), bytes_(bytes) {}

    /// The next part, with as many elements as the product of `sizes`; null while measuring and for an empty part.
    /// Throws Error (KVC_WORKSPACE_TOO_SMALL) if the buffer ends before the part does.
    template <class T>
    T* take(std::initializer_list<int64_t> sizes) {
        const uint64_t count = checked_product("workspace", sizes);
        const uint64_t part = checked_product("workspace", {static_cast<int64_t>(count), int64_t{sizeof(T)}});
        const uint64_t start = used_;
        used_ = align_up(used_ + part, kWorkspaceAlignment);
        if (base_ == nullptr || part == 0) {
            return nullptr;
        }
        if (used_ > bytes_) {
            throw Error(KVC_WORKSPACE_TOO_SMALL, "workspace ends inside a part; expected the size that was asked for");
        }
        return reinterpret_cast<T*>(base_ + start);
    }

    /// Bytes of all parts so far.
    uint64_t used() const { return used_; }

private:
    char* base_ = nullptr;
    uint64_t bytes_ = 0;
    uint64_t used_ = 0;
};

}  // namespace kvc

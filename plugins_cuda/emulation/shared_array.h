// The host side of kernels/shared.cuh: storage in the running block, and an extent that checks indices.
#pragma once

#include "emulation/cluster.h"

#include <cstddef>
#include <cstdint>

namespace kvc::platform {

[[noreturn]] void fail_shared_access(int64_t index, size_t count);
void check_shared_alignment(size_t address, size_t alignment);

// The number of elements of a SharedSpan, and the block that owns them.
class SharedExtent {
public:
    explicit SharedExtent(size_t count, const emulation::Block* owner = nullptr) : count_(count), owner_(owner) {}
    void check(int64_t index) const {
        if (static_cast<uint64_t>(index) >= count_) fail_shared_access(index, count_);
        if (owner_ != nullptr) emulation::current_block->cluster().check_access(*owner_);
    }
    void check_range(int64_t first, size_t count) const {
        if (first < 0 || static_cast<uint64_t>(first) > count_ || count > count_ - static_cast<uint64_t>(first)) {
            fail_shared_access(first + static_cast<int64_t>(count) - 1, count_);
        }
    }
    static void check_alignment(const void* first, size_t alignment) {
        check_shared_alignment(reinterpret_cast<size_t>(first), alignment);
    }
    size_t count() const { return count_; }
    SharedExtent with_count(size_t count) const { return SharedExtent(count, owner_); }
    SharedExtent of_block(int rank) const {
        return SharedExtent(count_, emulation::current_block->cluster().block_at(rank));
    }

private:
    size_t count_;
    const emulation::Block* owner_;  // null: the block that runs
};

inline void* dynamic_shared_bytes(size_t offset, size_t bytes, size_t alignment) {
    check_shared_alignment(offset, alignment);
    return emulation::current_block->shared().dynamic_array(offset, bytes);
}

}  // namespace kvc::platform

// Storage of one array declaration, the same for every thread of the block.
#define KVC_SHARED_STORAGE(T, name, count)     \
    static const char name##_key = 0;          \
    T* const name##_storage = static_cast<T*>( \
        ::kvc::emulation::current_block->shared().static_array(&name##_key, #name, sizeof(T) * (count)))

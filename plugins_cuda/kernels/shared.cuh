// Shared memory of a block as checked spans.
//
//     KVC_SHARED(float, partial, 32);                             // static: partial[0..31], a SharedSpan<float>
//     SharedSpan<float> scores = dynamic_shared<float>(0, count); // dynamic: `count` floats at byte offset 0
//
// Under nvcc a span is one pointer and an access is a plain one; the emulation also keeps the count and reports an
// access out of range with kernel, block and thread. Contents are undefined at the start of a block (the emulation
// fills them with NaN). Static arrays start at a multiple of 16 bytes.
#pragma once

#include "kernels/platform.cuh"

#include <cstddef>
#include <cstdint>

namespace kvc {

template <class T>
struct SharedSpan : platform::SharedExtent {
    __device__ __forceinline__ SharedSpan(T* first, size_t count) : SharedExtent(count), first_(first) {}
    __device__ __forceinline__ SharedSpan(platform::SharedExtent extent, T* first)
        : SharedExtent(extent), first_(first) {}

    template <class Index>
    __device__ __forceinline__ T& operator[](Index index) const {
        this->check(index);
        return first_[index];
    }

    // The same bytes as elements of another type; the span must start at a multiple of alignof(U).
    template <class U>
    __device__ __forceinline__ SharedSpan<U> cast() const {
        this->check_alignment(first_, alignof(U));
        return SharedSpan<U>(this->with_count(this->count() * sizeof(T) / sizeof(U)), reinterpret_cast<U*>(first_));
    }

    // Elements [first, first + count): a warp's or a row's share.
    __device__ __forceinline__ SharedSpan<T> part(int64_t first, size_t count) const {
        this->check_range(first, count);
        return SharedSpan<T>(this->with_count(count), first_ + first);
    }

    // The same elements of another block of the cluster (kernels/cluster.cuh), by its rank there.
    __device__ __forceinline__ SharedSpan<T> of_block(int rank) const {
        return SharedSpan<T>(SharedExtent::of_block(rank), static_cast<T*>(platform::map_to_block(first_, rank)));
    }

private:
    T* first_;
};

// `count` elements at `byte_offset` of the dynamic shared memory of the launch; the caller lays them out.
template <class T>
__device__ __forceinline__ SharedSpan<T> dynamic_shared(size_t byte_offset, size_t count) {
    return SharedSpan<T>(static_cast<T*>(platform::dynamic_shared_bytes(byte_offset, count * sizeof(T), alignof(T))),
                         count);
}

}  // namespace kvc

#define KVC_SHARED(T, name, count)      \
    KVC_SHARED_STORAGE(T, name, count); \
    const ::kvc::SharedSpan<T> name(name##_storage, count)

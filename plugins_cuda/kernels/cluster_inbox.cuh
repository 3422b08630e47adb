// What the blocks of a cluster send each other without a barrier (sm_90 and later): asynchronous stores, which an mbarrier
// of the receiver counts. A barrier of the cluster that makes writes visible waits for all writes of a thread, wherever
// they go; here the receiver waits for the bytes that it needs.
//
//     KVC_SHARED(uint64_t, counters, 2);
//     const Inbox inbox{counters.part(0, 1)};
//     inbox.make();                        // by one thread
//     inbox.expect(bytes);                 // by the same: all that comes, of this block's own sends too
//     fence_inboxes();                     // the same: other blocks may know of it
//     announce_to_cluster(); ... wait_for_cluster();
//     inbox.outgoing(span, rank)[i] = value;  // any thread of any block: element i of that span of block `rank`
//     inbox.copy(span, from, bytes);       // or, behind a barrier of the block: from global memory, into its own span
//     inbox.wait();                        // every thread that reads: all bytes are there
//
// A copy is one instruction of one thread for any number of bytes. Until it has come, nobody may write what it reads or
// touch what it writes; and as it goes another way than loads and stores (the asynchronous proxy), what threads of the
// same launch have written before, it may not see.
//
// An inbox serves one exchange. A block waits for all that it gets before it ends, so no bytes come to a block that has
// ended, and no barrier is needed behind the exchange. A wait orders these stores, and what their senders did to shared
// memory before them; it does not order other memory.
#pragma once

#include <cstdint>

#include "kernels/cluster.cuh"
#include "kernels/shared.cuh"

namespace kvc {

// A span of another block, of which elements are written by asynchronous stores of 4, 8 or 16 bytes.
template <class T>
struct OutgoingSpan {
    struct Element {
        T* to;
        uint64_t* counter;
        int rank;

        __device__ __forceinline__ void operator=(const T& value) const {
            platform::store_async(to, counter, rank, value);
        }
        Element& operator=(const Element&) = delete;
    };

    SharedSpan<T> span;  // of this block
    SharedSpan<uint64_t> counter;
    int rank;

    template <class Index>
    __device__ __forceinline__ Element operator[](Index index) const {
        return {&span[index], &counter[0], rank};
    }
    template <class U>
    __device__ __forceinline__ OutgoingSpan<U> cast() const {
        return {span.template cast<U>(), counter, rank};
    }
};

struct Inbox {
    SharedSpan<uint64_t> counter;  // [1], of every block at the same place

    __device__ __forceinline__ void make() const { platform::make_mbarrier(&counter[0], 1); }
    __device__ __forceinline__ void expect(uint32_t bytes) const { platform::expect_at_mbarrier(&counter[0], bytes); }
    __device__ __forceinline__ void wait() const { platform::wait_at_mbarrier(&counter[0], 0); }

    // Starts to copy so many bytes, a multiple of 16, to the beginning of `to`; both sides are 16-byte aligned.
    template <class T>
    __device__ __forceinline__ void copy(const SharedSpan<T>& to, const void* from, uint32_t bytes) const {
        platform::copy_in_bulk(&to[0], from, bytes, &counter[0]);
    }

    template <class T>
    __device__ __forceinline__ OutgoingSpan<T> outgoing(const SharedSpan<T>& span, int rank) const {
        return {span, counter, rank};
    }
};

__device__ __forceinline__ void fence_inboxes() { platform::fence_mbarriers(); }

}  // namespace kvc

// The mbarriers in a block's shared memory (sm_90 and later), and the asynchronous stores and copies in bulk that they
// count. A phase of an mbarrier is complete once all its threads have arrived and all bytes that they expect have come.
// What is stored and copied in a phase takes effect when it is complete and not before, so that a missing wait shows:
// until then these bytes are NaN.
//
// Reported:
//   - a wait for a phase that never completes;
//   - more bytes than a phase expects;
//   - an mbarrier that was not made, or whose making the thread cannot know of: in the same block it takes a barrier
//     behind it, in another one fence_mbarriers and then a barrier of the cluster;
//   - a block that ends while one of its mbarriers expects bytes, or before a thread has waited for those that came.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <list>
#include <string>
#include <vector>

namespace kvc::emulation {

class Block;
struct Thread;

struct Mbarrier {
    // Bytes of a store that is under way.
    struct Store {
        void* to;
        std::array<char, 16> value;
        size_t bytes;
    };
    // A copy that is under way; what it reads is read at its end.
    struct Copy {
        void* to;
        const void* from;
        size_t bytes;
    };

    const void* address;
    uint32_t arrivals;                   // of a phase
    uint32_t arrivals_left;              // of the current one
    int64_t bytes_left = 0;              // of the current phase; negative where they came before they were expected
    uint32_t phases = 0;                 // that are complete
    std::vector<uint32_t> transactions;  // by phase: the race detector's number of it
    std::vector<Store> stores;           // of the current phase
    std::vector<Copy> copies;            // the same
    bool is_unread = false;              // bytes of a complete phase that no thread has waited for

    const Thread* maker;
    uint64_t made_at;          // barriers of the block
    uint32_t cluster_barrier;  // the first of the cluster that the maker arrives at after making it
    bool is_fenced = false;    // before that barrier
};

class Mbarriers {
public:
    explicit Mbarriers(Block& block) : block_(block) {}

    void begin_block() { all_.clear(); }
    // Called by the running thread, of the block itself.
    void make(const void* address, uint32_t arrivals);
    void fence();
    void expect(const void* address, uint32_t bytes);
    void wait(const void* address, uint32_t parity);
    // By a thread of any block of the cluster: `bytes` come, and are for `to`, in the block.
    void store(const void* address, void* to, const void* value, size_t bytes);
    // By a thread of the block: so many bytes of global memory come, and are for `to`.
    void copy(const void* address, void* to, const void* from, size_t bytes);
    // Called as the block ends.
    void check_end() const;

    std::string explain(const Mbarrier& mbarrier) const;

private:
    Mbarrier& at(const void* address);
    void require_known(const Mbarrier& mbarrier) const;
    void complete_phase(Mbarrier& mbarrier);

    Block& block_;
    std::list<Mbarrier> all_;
};

}  // namespace kvc::emulation

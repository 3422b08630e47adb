// Finds two accesses to the same byte, at least one of them a write, that nothing orders. Schedules show a
// race only where it changes a result; the detector shows it in any schedule.
//
// The compiler reports the accesses: a kernel compiled with -fsanitize=thread calls a __tsan_ function at each load and
// store. The library is not linked with that sanitizer's runtime; emulation/race_hooks.cpp defines the functions, and a
// library without instrumented code pays nothing.
//
// Order between two accesses of one block: the same thread; a __syncthreads between them; a __syncwarp with both lanes
// in its mask. In a cluster, or in one block: the first access's thread, or one behind a __syncthreads after it,
// arrives, with release, at a barrier of the cluster that the second's, or one ahead of a __syncthreads before it, waits
// for; without release, if the thread calls __threadfence between. Shuffles, votes and mma.sync order no memory, as CUDA says. Two atomic accesses need no order.
// An asynchronous store comes before accesses of threads that have waited for its phase at the mbarrier, or are behind a
// __syncthreads after such a wait, and before nothing else. Accesses to shared memory of the thread that stores, and
// those that a __syncthreads orders before the store, come before theirs too. (Those to global memory do not: no fence
// stands between.)
// A copy in bulk writes as an asynchronous store does, and reads global memory until its phase is waited for. It goes by
// another proxy, and kernels have no fence for that: what threads of the same launch have written it may not read, and
// what threads of the same cluster have touched it may not write.
// A write of one block comes before an access of another if the writer (or, after a barrier, the thread that
// arrives for it) calls __threadfence and then arrives at an atomic in global memory; a thread of the other block calls
// an atomic at the same address later, and the access is by that thread or after a barrier.
//
// Per byte the last write and the latest reads of two threads are kept. A race between an older read and a write can
// escape; every report is a race.
#pragma once

#include "emulation/ready_set.h"

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <unordered_map>
#include <vector>

namespace kvc::emulation {

class RaceDetector {
public:
    enum class Kind : uint32_t { kRead, kWrite, kAtomic };
    // A thread, by its number in a block of the running cluster.
    struct Who {
        uint32_t rank;
        int thread;
    };

    // Set once instrumented code is loaded.
    static bool instrumented;

    void begin_launch();
    // Blocks are numbered along the grid.
    void begin_cluster(uint32_t first_block, uint32_t blocks, int threads);

    void access(Who who, const void* address, size_t bytes, Kind kind, bool shared);
    // cp.async brings `bytes` to shared memory. Their source counts as read when a thread reads them there, not before:
    // a copy of 16 bytes may also bring a neighbour's bytes that no thread reads.
    void copy(Who who, const void* to, const void* from, size_t bytes);
    void fence(Who who);
    void barrier(uint32_t rank);
    void warp_barrier(uint32_t rank, int first_thread, uint32_t mask);
    void arrive_at_cluster(Who who, bool releases);
    void wait_at_cluster(Who who);
    // A phase of an mbarrier: the stores that it counts, and the threads that wait for it.
    uint32_t begin_transaction();
    void send(Who who, const void* to, size_t bytes, uint32_t transaction);
    void copy_in_bulk(Who who, const void* to, const void* from, size_t bytes, uint32_t transaction);
    void wait_for_transaction(Who who, uint32_t transaction);

    static constexpr uint32_t kNoBlock = ~uint32_t{0};

    // One access, and how many barriers of the block, own __syncwarps, own fences, own arrivals at barriers of the
    // cluster and own asynchronous stores its thread had passed.
    struct Access {
        uint32_t block = kNoBlock;
        uint32_t epoch = 0;
        uint32_t clock = 0;
        uint32_t sends = 0;
        uint32_t transaction = 0;  // of an asynchronous store or a copy in bulk
        uint32_t fences : 10 = 0;
        uint32_t arrivals : 10 = 0;
        uint32_t thread : 10 = 0;
        Kind kind : 2 = Kind::kRead;
    };
    struct Race {
        Access past;
        Access present;
        const void* address;
        bool shared;
    };

    // The first race of the launch.
    const std::optional<Race>& found() const { return found_; }

private:
    struct Byte {
        Access write;
        std::array<Access, 2> reads;  // of different threads, the later one first
        uintptr_t copied_from = 0;    // by cp.async of `write`
    };
    static constexpr size_t kPageBytes = 256;
    using Page = std::array<Byte, kPageBytes>;

    // A thread's arrival at a global atomic, and the fences of its block until then.
    struct Arrival {
        Access access;
        uint32_t fence_epoch;  // barriers before the last fence of the arriving thread
        std::vector<uint32_t> fences;
    };
    // The arrivals of one other block that a running block has learned from atomics.
    struct Acquired {
        Access access;
        std::shared_ptr<const Arrival> arrival;
    };
    // What one block has stored in a transaction.
    struct Part {
        std::vector<uint32_t> sends;  // by thread: its stores up to the last of the transaction
        uint32_t epoch = 0;           // of the last
        std::vector<uint32_t> known;  // transactions that the senders had waited for
    };
    // A block of the running cluster. Vectors without a comment are by thread.
    struct Block {
        uint32_t epoch = 1;  // barriers of the block, and one
        std::vector<uint32_t> clocks;
        std::vector<uint32_t> fences;
        std::vector<uint32_t> fence_epochs;
        std::vector<std::array<uint32_t, kWarpSize>> seen;  // by lane: its clock at the last common __syncwarp
        std::vector<uint32_t> arrivals;                     // at barriers of the cluster
        std::vector<uint32_t> waits;
        uint32_t all_waited = 0;               // most waits of any thread before the last barrier of the block
        std::vector<uint32_t> arrival_epochs;  // by barrier of the cluster: the latest at which a thread arrived
        std::vector<std::vector<uint32_t>> arrival_fences;  // by barrier and thread: its fences before it arrived
        std::vector<uint32_t> sends;                        // asynchronous stores
        std::vector<std::vector<uint32_t>> waited;          // transactions, and what their senders had waited for
        std::vector<uint32_t> all_waited_for;  // the same of all threads before the last barrier of the block
        std::unordered_map<uint32_t, std::vector<Acquired>> acquired;  // by the other block
    };

    Access now(Who who, Kind kind) const;
    Byte& byte_at(uintptr_t address);
    bool in_cluster(uint32_t block) const { return block - first_block_ < blocks_.size(); }
    const Block& block_of(const Access& access) const { return blocks_[access.block - first_block_]; }
    void check(const Access& past, const Access& present, uintptr_t address, bool shared);
    void report(const Access& past, const Access& present, uintptr_t address, bool shared);
    void note_send(Who who, uint32_t transaction);
    bool ordered(const Access& past, const Access& present, bool shared) const;
    bool ordered_in_block(const Access& past, const Access& present) const;
    bool ordered_in_cluster(const Access& past, const Access& present) const;
    bool ordered_by_transaction(const Access& past, const Access& present) const;
    bool published(const Access& past, const Arrival& arrival) const;
    void acquire(const Access& present, uintptr_t address);

    std::unordered_map<uintptr_t, std::unique_ptr<Page>> pages_;
    uintptr_t latest_page_number_ = 0;
    Page* latest_page_ = nullptr;

    uint32_t first_block_ = 0;
    std::vector<Block> blocks_;   // of the running cluster
    std::vector<bool> releases_;  // by barrier of the cluster, the same for all threads: they arrive at one line
    std::vector<std::vector<Part>> transactions_;  // by number and block; 0 is none
    std::unordered_map<uintptr_t, std::vector<std::shared_ptr<const Arrival>>> arrivals_;  // by address of the atomic
    std::optional<Race> found_;
};

}  // namespace kvc::emulation

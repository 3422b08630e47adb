// The blocks of a cluster (sm_90 and later): they run side by side, meet at a barrier of their own, and reach into each
// other's shared memory. A launch without clusters counts as one with clusters of one block.
//
// Reported, in addition to the reports of a block:
//   - a barrier that some thread of the cluster does not reach, or reaches at another source line; a thread that arrives
//     twice, waits without having arrived, or exits without waiting for a barrier at which it has arrived;
//   - an access to another block's shared memory before the thread has passed a barrier of the cluster (the block may not
//     have begun), and one that nothing orders before the block's end, after which its memory may be another's. Both in
//     every schedule, because they depend on the barriers that the two blocks have passed;
//   - mistakes with mbarriers and asynchronous stores (emulation/mbarriers.h).
#pragma once

#include "emulation/block.h"
#include "emulation/executions.h"
#include "emulation/race_detector.h"

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace kvc::emulation {

class Cluster {
public:
    // The constructor and run throw LaunchError on behalf of the kernel.
    void begin_launch(const Launch& launch, const SharedLimits& limits, Body body, Schedule& schedule);
    // Runs the blocks from `first` on, neighbours along x.
    void run(uint3 first);

    // Called by the running thread.
    void arrive(Site site, bool releases);
    void wait(Site site);
    // `address` is in the running block's shared memory; returns the same place in the block of that rank.
    void* map(const void* address, int rank);
    const Block* block_at(int rank) const;
    // The block of that rank, into which the running thread may store asynchronously now.
    Block& receiver(int rank);
    // Fails where the running thread may not access shared memory of `owner` now.
    void check_access(const Block& owner);
    // The same, of bytes that the owner waits for: its end needs no barrier behind them.
    void check_exists(const Block& owner) const;
    void end_thread(Block& block, const Thread& thread);

    // The block whose shared memory holds the bytes, and the block of a number; null where this cluster has none.
    const Block* owner_of(const void* address, size_t bytes) const;
    const Block* block_of(uint32_t number) const;

    RaceDetector& races() { return races_; }
    Executions& executions() { return executions_; }
    uint64_t switches() const;
    size_t most_static_bytes() const;
    Collectives collectives() const;

private:
    // Barriers of the cluster that a block must have passed before it may end, because another block reads its memory.
    struct Visits {
        uint32_t barriers = 0;
        std::string reader;
    };

    Block* next();
    std::string explain_deadlock() const;

    std::vector<std::unique_ptr<Block>> blocks_;
    uint32_t size_ = 1;  // blocks of a cluster
    uint32_t first_number_ = 0;
    Schedule* schedule_ = nullptr;
    RaceDetector races_;
    Executions executions_;
    uint32_t barriers_ = 0;  // completed
    int arrived_ = 0;        // threads, at the next one
    std::string first_arrived_;
    Site first_site_;
    std::vector<Visits> visits_;  // by rank
};

}  // namespace kvc::emulation

// kernels/ptx.cuh for the host.
namespace kvc::platform {

inline constexpr bool kHasClusters = true;

void announce_at_cluster_barrier(emulation::Site site = emulation::Site::current());
void arrive_at_cluster_barrier(emulation::Site site = emulation::Site::current());
void wait_at_cluster_barrier(emulation::Site site = emulation::Site::current());
void* map_to_block(void* shared, int rank);
void make_mbarrier(uint64_t* mbarrier, uint32_t arrivals);
void fence_mbarriers();
void expect_at_mbarrier(uint64_t* mbarrier, uint32_t bytes);
void wait_at_mbarrier(uint64_t* mbarrier, uint32_t parity, emulation::Site site = emulation::Site::current());
void store_async_bytes(void* to, uint64_t* mbarrier, int rank, const void* value, size_t bytes);
void copy_in_bulk(void* to, const void* from, uint32_t bytes, uint64_t* mbarrier);

template <class T>
void store_async(T* to, uint64_t* mbarrier, int rank, const T& value) {
    static_assert(sizeof(T) == 4 || sizeof(T) == 8 || sizeof(T) == 16);
    store_async_bytes(to, mbarrier, rank, &value, sizeof(T));
}

}  // namespace kvc::platform

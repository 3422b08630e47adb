// One thread block: its threads as fibers, its barriers, its warps, its shared memory. The blocks of a cluster run side by
// side (emulation/cluster.h), clusters one after another on the same fibers.
//
// A collective operation (a barrier, a shuffle, a vote, an mma) parks every thread that reaches it until the last one
// of its group arrives; that one does the work for all. When no thread can run and one waits, its group can never
// become complete: the block fails and reports who waits where and who is missing. This is stricter than the hardware:
//   - an exited thread does not count as arrived at a barrier, nor an exited or missing lane at a warp operation;
//   - two threads of one barrier must be at the same source line.
#pragma once

#include "emulation/fiber.h"
#include "emulation/mbarriers.h"
#include "emulation/race_detector.h"
#include "emulation/ready_set.h"
#include "emulation/shared_memory.h"
#include "emulation/vector_types.h"

#include <array>
#include <cstdint>
#include <exception>
#include <memory>
#include <source_location>
#include <string>
#include <vector>

// The built-in variables of the running thread.
extern uint3 threadIdx __attribute__((visibility("hidden")));
extern uint3 blockIdx __attribute__((visibility("hidden")));
extern dim3 blockDim __attribute__((visibility("hidden")));
extern dim3 gridDim __attribute__((visibility("hidden")));

namespace kvc::emulation {

class Cluster;
struct Launch;
struct SharedLimits;

using Site = std::source_location;

bool same_site(Site a, Site b);

// The operands of the lanes of one warp operation, null for lanes outside the mask: pointers into their own stacks.
using Lanes = std::array<void*, kWarpSize>;
using WarpOperation = void (*)(const Lanes& operands);

// The operation of __syncwarp, the only warp operation that orders memory.
void synchronize(const Lanes& operands);

struct BarrierResult {
    int count;  // of threads with a predicate that is not zero
    int threads;
};

// A copy that cp.async has started and whose wait has not come.
struct PendingCopy {
    void* to;
    const void* from;
    size_t bytes;
    int group;
};

struct Thread {
    enum class State : uint8_t { kReady, kAtWarpOperation, kAtBarrier, kAtClusterBarrier, kAtMbarrier, kExited };

    explicit Thread(int number_) : number(number_), fiber(static_cast<size_t>(number_)) {}

    int number;
    uint3 index{};
    State state = State::kExited;
    const char* waits_for = "";
    Site site;
    uint32_t mask = 0;
    WarpOperation operation = nullptr;
    void* operand = nullptr;
    bool has_waited = false;  // for the launch before this one
    uint32_t cluster_arrivals = 0;
    uint32_t cluster_waits = 0;
    const Mbarrier* mbarrier = nullptr;  // that it waits at
    std::vector<PendingCopy> copies;
    int copy_groups = 0;  // committed so far
    Fiber fiber;
};

// Collective operations of a launch: of warps, and of whole blocks.
struct Collectives {
    uint64_t products = 0;   // mma.sync
    uint64_t exchanges = 0;  // shuffles and votes
    uint64_t barriers = 0;
    uint64_t cluster_barriers = 0;  // of each block of a cluster
};

struct Schedule {
    Order order = Order::kForward;
    Random random{0};
};

struct Body {
    void (*call)(const void* context);
    const void* context;  // the kernel's parameters
    size_t context_bytes;
};

class Block {
public:
    Block(Cluster& cluster, uint32_t rank) : cluster_(cluster), rank_(rank), mbarriers_(*this) {}

    void begin_launch(const Launch& launch, const SharedLimits& limits, Body body, Schedule& schedule);
    void begin(uint3 index);
    // True if a thread can run; run_thread runs it until it parks. Throws LaunchError on behalf of the kernel.
    bool can_run() const { return !ready_.empty(); }
    void run_thread();
    bool is_over() const { return live_ == 0; }
    int size() const { return size_; }
    uint32_t rank() const { return rank_; }
    uint3 index() const { return index_; }

    // Called by the running thread.
    void warp_operation(const char* name, uint32_t mask, WarpOperation operation, void* operand, Site site);
    BarrierResult barrier(const char* name, bool predicate, Site site);
    void fence();
    // Fails where these bytes are global memory and the thread has not waited for the launch before this one.
    void require_wait(const void* address, size_t bytes) const;
    // Reports an access to the race detector and calls require_wait. Accesses to the thread's own stack do not count.
    void note_access(const void* address, size_t bytes, RaceDetector::Kind kind);
    void note_copy(const void* to, const void* from, size_t bytes);
    void note_execution(const void* address);
    // While one exists, no access counts as the running thread's: the emulation calls functions that the compiler has
    // perhaps instrumented with the kernel. None may be left when the thread parks.
    class OwnWork {
    public:
        explicit OwnWork(Block& block) : block_(block) { block_.is_own_work_ = true; }
        ~OwnWork() { block_.is_own_work_ = false; }
        OwnWork(const OwnWork&) = delete;
        OwnWork& operator=(const OwnWork&) = delete;

    private:
        Block& block_;
    };
    [[noreturn]] void fail(const std::string& what) const;
    Thread& self() { return *running_; }
    Cluster& cluster() { return cluster_; }
    SharedMemory& shared() { return shared_; }
    const SharedMemory& shared() const { return shared_; }
    Mbarriers& mbarriers() { return mbarriers_; }
    const Mbarriers& mbarriers() const { return mbarriers_; }
    Thread& thread(int number) { return *threads_[number]; }
    Collectives& collectives() { return collectives_; }
    uint64_t switches() const { return switches_; }

    void park(Thread::State state);
    void wake(Thread& thread);

    // Texts for reports.
    std::string place() const;
    std::string place_of(const Thread& thread) const;
    std::string describe(const Thread& thread) const;
    // The reason why none of the block's threads can run again; "" if the reason lies with the cluster.
    std::string explain_deadlock() const;

private:
    static void thread_main(void* thread);
    void end_thread(Thread& thread);
    void resume(Thread& thread);
    bool warp_complete(const Thread& arrived) const;
    bool may_touch(const void* address, size_t bytes) const;
    RaceDetector::Who who() const { return {rank_, running_->number}; }
    std::string explain_missing_lane(const Thread& waiting) const;
    std::string explain_race(const RaceDetector::Race& race) const;

    Cluster& cluster_;
    uint32_t rank_;  // in the cluster
    uint3 index_{};

    std::vector<std::unique_ptr<Thread>> threads_;
    int size_ = 0;
    const char* kernel_ = "";
    Body body_{};
    Schedule* schedule_ = nullptr;
    Thread* running_ = nullptr;
    bool is_own_work_ = false;
    ReadySet ready_;
    SharedMemory shared_;
    Mbarriers mbarriers_;
    std::array<uint32_t, kMaxThreads / kWarpSize> at_warp_operation_{};  // lanes, by warp
    int live_ = 0;
    int at_barrier_ = 0;
    const Thread* first_at_barrier_ = nullptr;
    int predicates_ = 0;
    BarrierResult barrier_result_{};
    std::exception_ptr error_;
    const Thread* early_ = nullptr;  // the first thread of the block that touched global memory before it had waited
    uint64_t switches_ = 0;
    Collectives collectives_;
};

// The block whose thread runs: one at a time in the process.
extern Block* current_block __attribute__((visibility("hidden")));

}  // namespace kvc::emulation

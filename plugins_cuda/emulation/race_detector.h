// Finds two accesses to the same byte, at least one of them a write, with nothing that orders them. Schedules show a
// race only where it changes a result; this shows it in any schedule.
//
// The compiler reports the accesses: a kernel compiled with -fsanitize=thread calls a __tsan_ function at each load and
// store. The library is not linked with that sanitizer's runtime; emulation/race_hooks.cpp defines the functions, and a
// library without instrumented code pays nothing.
//
// What orders two accesses of one block: the same thread; a __syncthreads between them; a __syncwarp with both lanes in
// its mask. Shuffles, votes and mma.sync order no memory, as CUDA says. Two atomic accesses need no order.
// What orders a write of one block before an access of another: the writer (or, after a barrier, the thread that
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

    // Set once instrumented code is loaded.
    static bool instrumented;

    void begin_launch();
    void begin_block(uint32_t block, int threads);

    // Of the running thread.
    void access(int thread, const void* address, size_t bytes, Kind kind, bool shared);
    // cp.async brings `bytes` to shared memory. Their source counts as read by whoever reads them there, not before:
    // a copy of 16 bytes may bring a neighbour's along that no thread reads.
    void copy(int thread, const void* to, const void* from, size_t bytes);
    void fence(int thread);
    void barrier() { ++epoch_; }
    void warp_barrier(int first_thread, uint32_t mask);

    static constexpr uint32_t kNoBlock = ~uint32_t{0};

    // One access, and how many barriers of the block, own __syncwarps and own fences its thread had passed.
    struct Access {
        uint32_t block = kNoBlock;
        uint32_t epoch = 0;
        uint32_t clock = 0;
        uint32_t fences : 20 = 0;
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
        uintptr_t copied_from = 0;    // by cp.async, in the block of `write`
    };
    static constexpr size_t kPageBytes = 256;
    using Page = std::array<Byte, kPageBytes>;

    // A thread's arrival at a global atomic, and the fences of its block until then.
    struct Arrival {
        Access access;
        uint32_t fence_epoch;  // barriers before the last fence of the arriving thread
        std::vector<uint32_t> fences;
    };
    // What an atomic has told the running block of an earlier one.
    struct Acquired {
        Access access;
        std::shared_ptr<const Arrival> arrival;
    };

    Access now(int thread, Kind kind) const;
    Byte& byte_at(uintptr_t address);
    void check(const Access& past, const Access& present, uintptr_t address, bool shared);
    bool ordered(const Access& past, const Access& present) const;
    bool ordered_in_block(const Access& past, const Access& present) const;
    bool published(const Access& past, const Arrival& arrival) const;
    void acquire(const Access& present, uintptr_t address);

    std::unordered_map<uintptr_t, std::unique_ptr<Page>> pages_;
    uintptr_t latest_page_number_ = 0;
    Page* latest_page_ = nullptr;

    uint32_t block_ = kNoBlock;
    uint32_t epoch_ = 0;
    std::vector<uint32_t> clocks_;
    std::vector<uint32_t> fences_;
    std::vector<uint32_t> fence_epochs_;
    std::vector<std::array<uint32_t, kWarpSize>>
        seen_;  // [thread][lane]: the lane's clock at the last common __syncwarp

    std::unordered_map<uintptr_t, std::vector<std::shared_ptr<const Arrival>>> arrivals_;  // by address of the atomic
    std::unordered_map<uint32_t, std::vector<Acquired>> acquired_;                         // by earlier block
    std::optional<Race> found_;
};

}  // namespace kvc::emulation

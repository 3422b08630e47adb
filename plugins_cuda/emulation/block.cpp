#include "emulation/block.h"

#include "emulation/cluster.h"
#include "emulation/devices.h"

#include <bit>
#include <cstdint>
#include <cstring>

uint3 threadIdx;
uint3 blockIdx;
dim3 blockDim;
dim3 gridDim;

namespace kvc::emulation {

Block* current_block = nullptr;

namespace {

constexpr const char* kEarly = "touches global memory before wait_for_previous_launch";

bool is_product(const char* operation) { return std::strncmp(operation, "mma", 3) == 0; }

}  // namespace

bool same_site(Site a, Site b) {
    const bool same_file = a.file_name() == b.file_name() || std::strcmp(a.file_name(), b.file_name()) == 0;
    return same_file && a.line() == b.line() && a.column() == b.column();
}

void Block::begin_launch(const Launch& launch, const SharedLimits& limits, Body body, Schedule& schedule) {
    const dim3 block = launch.block;
    kernel_ = launch.name;
    body_ = body;
    schedule_ = &schedule;
    size_ = static_cast<int>(block.x * block.y * block.z);
    while (static_cast<int>(threads_.size()) < size_) {
        threads_.push_back(std::make_unique<Thread>(static_cast<int>(threads_.size())));
    }
    for (int i = 0; i < size_; ++i) {
        const auto n = static_cast<unsigned>(i);
        threads_[i]->index = {n % block.x, n / block.x % block.y, n / block.x / block.y};
        threads_[i]->fiber.prepare(&Block::thread_main, threads_[i].get());
    }
    shared_.begin_launch(launch.dynamic_shared_bytes, limits);
    switches_ = 0;
    collectives_ = {};
}

void Block::begin(uint3 index) {
    index_ = index;
    error_ = nullptr;
    early_ = nullptr;
    at_barrier_ = 0;
    predicates_ = 0;
    live_ = size_;
    shared_.begin_block();
    mbarriers_.begin_block();
    ready_.clear();
    at_warp_operation_.fill(0);
    for (int i = 0; i < size_; ++i) {
        threads_[i]->waits_for = "";
        threads_[i]->has_waited = false;
        threads_[i]->cluster_arrivals = 0;
        threads_[i]->cluster_waits = 0;
        threads_[i]->copies.clear();
        threads_[i]->copy_groups = 0;
        wake(*threads_[i]);
    }
}

void Block::run_thread() {
    current_block = this;
    blockIdx = index_;
    resume(*threads_[ready_.take(schedule_->order, schedule_->random)]);
    running_ = nullptr;  // none until the next one, so that no access of the host counts as a thread's
    if (early_ != nullptr) throw LaunchError(place_of(*early_) + ": " + kEarly);
    if (error_) std::rethrow_exception(error_);
    const auto& race = cluster_.races().found();
    if (race) throw LaunchError(place() + ": " + explain_race(*race));
}

// A fiber lives through all blocks of a launch: when its thread ends, the next resume() begins the next block's.
void Block::thread_main(void* argument) {
    auto& thread = *static_cast<Thread*>(argument);
    for (;;) {
        Block& block = *current_block;
        try {
            block.body_.call(block.body_.context);
            block.end_thread(thread);
        } catch (...) {
            block.error_ = std::current_exception();
        }
        block.park(Thread::State::kExited);
    }
}

void Block::end_thread(Thread& thread) {
    --live_;
    if (!thread.copies.empty()) fail("exits without a wait for what cp.async has started");
    if (!thread.has_waited) fail("exits without wait_for_previous_launch");
    if (is_over()) mbarriers_.check_end();
    cluster_.end_thread(*this, thread);
}

void Block::resume(Thread& thread) {
    ++switches_;
    running_ = &thread;
    threadIdx = thread.index;
    thread.fiber.resume();
}

void Block::park(Thread::State state) {
    running_->state = state;
    running_->fiber.pause();
}

void Block::wake(Thread& thread) {
    thread.state = Thread::State::kReady;
    ready_.add(thread.number);
}

void Block::warp_operation(const char* name, uint32_t mask, WarpOperation operation, void* operand, Site site) {
    Thread& thread = self();
    const int first = thread.number / kWarpSize * kWarpSize;
    thread.waits_for = name;
    thread.site = site;
    thread.mask = mask;
    thread.operation = operation;
    thread.operand = operand;
    if ((mask >> (thread.number - first) & 1) == 0) fail(describe(thread) + " is not in its own mask");
    uint32_t& waiting = at_warp_operation_[thread.number / kWarpSize];
    waiting |= 1u << (thread.number - first);
    if ((waiting & mask) != mask || !warp_complete(thread)) return park(Thread::State::kAtWarpOperation);
    waiting &= ~mask;

    Lanes operands{};
    for (uint32_t left = mask; left != 0; left &= left - 1) {
        const int lane = std::countr_zero(left);
        operands[lane] = threads_[first + lane]->operand;
    }
    operation(operands);
    if (operation != synchronize) ++(is_product(name) ? collectives_.products : collectives_.exchanges);
    if (RaceDetector::instrumented && operation == synchronize) cluster_.races().warp_barrier(rank_, first, mask);
    for (uint32_t left = mask; left != 0; left &= left - 1) {
        Thread& lane = *threads_[first + std::countr_zero(left)];
        if (&lane != &thread) wake(lane);
    }
}

// Every lane of the mask waits at some warp operation: is it this one?
bool Block::warp_complete(const Thread& arrived) const {
    const int first = arrived.number / kWarpSize * kWarpSize;
    for (uint32_t left = arrived.mask; left != 0; left &= left - 1) {
        const int number = first + std::countr_zero(left);
        const Thread& lane = *threads_[number];
        if (lane.mask != arrived.mask || lane.operation != arrived.operation) return false;
    }
    return true;
}

BarrierResult Block::barrier(const char* name, bool predicate, Site site) {
    Thread& thread = self();
    thread.waits_for = name;
    thread.site = site;
    thread.operation = nullptr;
    if (at_barrier_ == 0) {
        first_at_barrier_ = &thread;
    } else if (!same_site(site, first_at_barrier_->site)) {
        fail("divergent barrier: " + describe(*first_at_barrier_) + ", " + describe(thread));
    }
    ++at_barrier_;
    predicates_ += predicate ? 1 : 0;
    if (at_barrier_ < size_) {
        park(Thread::State::kAtBarrier);
        return barrier_result_;  // the next barrier completes only after everybody has read this
    }
    if (RaceDetector::instrumented) cluster_.races().barrier(rank_);
    ++collectives_.barriers;
    barrier_result_ = {predicates_, size_};
    at_barrier_ = 0;
    predicates_ = 0;
    for (int i = 0; i < size_; ++i) {
        if (threads_[i].get() != &thread) wake(*threads_[i]);
    }
    return barrier_result_;
}

void Block::fence() {
    if (RaceDetector::instrumented) cluster_.races().fence(who());
}

// True after the wait, and outside global memory: shared memory, parameters, built-in variables, the emulation itself.
bool Block::may_touch(const void* address, size_t bytes) const {
    if (running_->has_waited || cluster_.owner_of(address, bytes) != nullptr) return true;
    const struct {
        const void* first;
        size_t bytes;
    } others[] = {
        {body_.context, body_.context_bytes}, {&threadIdx, sizeof threadIdx}, {&blockIdx, sizeof blockIdx},
        {&blockDim, sizeof blockDim},         {&gridDim, sizeof gridDim},     {&current_block, sizeof current_block},
        {&cluster_, sizeof cluster_},         {this, sizeof *this},           {running_, sizeof *running_}};
    const auto at = reinterpret_cast<uintptr_t>(address);
    for (const auto& other : others) {
        const auto first = reinterpret_cast<uintptr_t>(other.first);
        if (at >= first && at + bytes <= first + other.bytes) return true;
    }
    return false;
}

void Block::require_wait(const void* address, size_t bytes) const {
    if (!may_touch(address, bytes)) fail(kEarly);
}

// The compiler's calls may not throw, nor make texts, whose functions may be instrumented too: run() throws once the
// thread has paused.
void Block::note_access(const void* address, size_t bytes, RaceDetector::Kind kind) {
    if (!RaceDetector::instrumented || running_ == nullptr || is_own_work_ || running_->fiber.owns(address)) return;
    if (early_ == nullptr && !may_touch(address, bytes)) early_ = running_;
    cluster_.races().access(who(), address, bytes, kind, cluster_.owner_of(address, bytes) != nullptr);
}

void Block::note_execution(const void* address) {
    if (running_ != nullptr) cluster_.executions().note(rank_, running_->number, address);
}

void Block::note_copy(const void* to, const void* from, size_t bytes) {
    if (RaceDetector::instrumented) cluster_.races().copy(who(), to, from, bytes);
}

}  // namespace kvc::emulation

#include "emulation/cluster.h"

#include "emulation/devices.h"

#include <algorithm>

namespace kvc::emulation {

void Cluster::begin_launch(const Launch& launch, const SharedLimits& limits, Body body, Schedule& schedule) {
    size_ = launch.cluster_blocks;
    schedule_ = &schedule;
    while (blocks_.size() < size_) blocks_.push_back(std::make_unique<Block>(*this, blocks_.size()));
    for (uint32_t rank = 0; rank < size_; ++rank) blocks_[rank]->begin_launch(launch, limits, body, schedule);
    races_.begin_launch();
    executions_.begin_launch(launch.name, size_);
}

void Cluster::run(uint3 first) {
    first_number_ = (first.z * gridDim.y + first.y) * gridDim.x + first.x;
    barriers_ = 0;
    arrived_ = 0;
    visits_.assign(size_, {});
    if (RaceDetector::instrumented) races_.begin_cluster(first_number_, size_, blocks_[0]->size());
    for (uint32_t rank = 0; rank < size_; ++rank) blocks_[rank]->begin({first.x + rank, first.y, first.z});
    while (Block* const block = next()) block->run_thread();
    const auto end = blocks_.begin() + size_;
    if (!std::all_of(blocks_.begin(), end, [](const auto& block) { return block->is_over(); })) {
        throw LaunchError(explain_deadlock());
    }
    executions_.end_cluster(blocks_[0]->size());
}

// The block whose thread runs next: the block of the lowest rank runs as far ahead of the others as the barriers allow,
// or that of the highest. Null where no thread can run.
Block* Cluster::next() {
    uint32_t ready = 0;
    for (uint32_t rank = 0; rank < size_; ++rank) ready |= static_cast<uint32_t>(blocks_[rank]->can_run()) << rank;
    if (ready == 0) return nullptr;
    if (size_ == 1) return blocks_[0].get();
    return blocks_[ReadySet::choose(ready, schedule_->order, schedule_->random)].get();
}

void Cluster::arrive(Site site, bool releases) {
    Block& block = *current_block;
    const Block::OwnWork work(block);
    Thread& thread = block.self();
    thread.waits_for = "the cluster's barrier";
    thread.site = site;
    thread.operation = nullptr;
    if (thread.cluster_arrivals != thread.cluster_waits) {
        block.fail("arrives at the cluster's barrier again and has not waited");
    }
    if (arrived_ == 0) {
        first_arrived_ = block.place() + " " + block.describe(thread);
        first_site_ = site;
    } else if (!same_site(site, first_site_)) {
        block.fail("divergent barrier of the cluster: " + first_arrived_ + ", " + block.describe(thread));
    }
    if (RaceDetector::instrumented) races_.arrive_at_cluster({block.rank(), thread.number}, releases);
    ++thread.cluster_arrivals;
    if (++arrived_ < static_cast<int>(size_) * block.size()) return;
    arrived_ = 0;
    ++barriers_;
    for (uint32_t rank = 0; rank < size_; ++rank) {
        ++blocks_[rank]->collectives().cluster_barriers;
        for (int i = 0; i < block.size(); ++i) {
            Thread& other = blocks_[rank]->thread(i);
            if (other.state == Thread::State::kAtClusterBarrier) blocks_[rank]->wake(other);
        }
    }
}

void Cluster::wait(Site site) {
    Block& block = *current_block;
    Thread& thread = block.self();
    thread.waits_for = "the cluster's barrier";
    thread.site = site;
    thread.operation = nullptr;
    if (thread.cluster_arrivals == thread.cluster_waits) {
        block.fail("waits at the cluster's barrier without having arrived");
    }
    if (barriers_ < thread.cluster_arrivals) block.park(Thread::State::kAtClusterBarrier);
    const Block::OwnWork work(block);
    ++thread.cluster_waits;
    if (RaceDetector::instrumented) races_.wait_at_cluster({block.rank(), thread.number});
}

void* Cluster::map(const void* address, int rank) {
    block_at(rank);
    const Block::OwnWork work(*current_block);
    return blocks_[rank]->shared().at(current_block->shared().place_of(address));
}

const Block* Cluster::block_at(int rank) const {
    if (rank < 0 || rank >= static_cast<int>(size_)) {
        current_block->fail("block " + std::to_string(rank) + " of a cluster of " + std::to_string(size_));
    }
    return blocks_[rank].get();
}

Block& Cluster::receiver(int rank) {
    block_at(rank);
    const Block::OwnWork work(*current_block);
    check_exists(*blocks_[rank]);
    return *blocks_[rank];
}

void Cluster::check_exists(const Block& owner) const {
    Block& block = *current_block;
    if (&owner == &block) return;
    const auto fail = [&](const char* why) {
        block.fail("accesses shared memory of block number " + std::to_string(first_number_ + owner.rank()) + why);
    };
    if (block.self().cluster_waits == 0) fail(" before a barrier of the cluster: it may not have begun");
    if (owner.is_over()) fail(", which has ended");
}

void Cluster::check_access(const Block& owner) {
    Block& block = *current_block;
    const Block::OwnWork work(block);
    if (&owner == &block) return;
    check_exists(owner);
    const Thread& thread = block.self();
    // The owner certainly exists until this thread arrives at its next barrier.
    Visits& visits = visits_[owner.rank()];
    if (visits.barriers > thread.cluster_arrivals) return;
    visits = {thread.cluster_arrivals + 1, block.place_of(thread)};
}

void Cluster::end_thread(Block& block, const Thread& thread) {
    const Block::OwnWork work(block);
    if (thread.cluster_arrivals != thread.cluster_waits) {
        block.fail("exits without waiting for the barrier of the cluster that it has arrived at");
    }
    const Visits& visits = visits_[block.rank()];
    if (block.is_over() && thread.cluster_waits < visits.barriers) {
        block.fail("ends its block, whose shared memory " + visits.reader +
                   " accesses with no barrier of the cluster after");
    }
}

const Block* Cluster::owner_of(const void* address, size_t bytes) const {
    for (uint32_t rank = 0; rank < size_; ++rank) {
        if (blocks_[rank]->shared().contains(address, bytes)) return blocks_[rank].get();
    }
    return nullptr;
}

const Block* Cluster::block_of(uint32_t number) const {
    return number - first_number_ < size_ ? blocks_[number - first_number_].get() : nullptr;
}

uint64_t Cluster::switches() const {
    uint64_t sum = 0;
    for (uint32_t rank = 0; rank < size_; ++rank) sum += blocks_[rank]->switches();
    return sum;
}

size_t Cluster::most_static_bytes() const {
    size_t most = 0;
    for (uint32_t rank = 0; rank < size_; ++rank) most = std::max(most, blocks_[rank]->shared().most_static_bytes());
    return most;
}

Collectives Cluster::collectives() const {
    Collectives sum;
    for (uint32_t rank = 0; rank < size_; ++rank) {
        const Collectives& own = blocks_[rank]->collectives();
        sum.products += own.products;
        sum.exchanges += own.exchanges;
        sum.barriers += own.barriers;
        sum.cluster_barriers += own.cluster_barriers;
    }
    return sum;
}

std::string Cluster::explain_deadlock() const {
    for (uint32_t rank = 0; rank < size_; ++rank) {
        const std::string own = blocks_[rank]->explain_deadlock();
        if (!own.empty()) return blocks_[rank]->place() + ": " + own;
    }
    for (uint32_t rank = 0; rank < size_; ++rank) {  // every remaining thread waits for others of the cluster
        for (int i = 0; i < blocks_[rank]->size(); ++i) {
            const Thread& thread = blocks_[rank]->thread(i);
            if (thread.state != Thread::State::kAtMbarrier) continue;
            return blocks_[rank]->place() + ": " + blocks_[rank]->describe(thread) + ": " +
                   blocks_[rank]->mbarriers().explain(*thread.mbarrier);
        }
    }
    for (uint32_t rank = 0; rank < size_; ++rank) {
        for (int i = 0; i < blocks_[rank]->size(); ++i) {
            const Thread& thread = blocks_[rank]->thread(i);
            if (thread.cluster_arrivals > barriers_) continue;
            return blocks_[rank]->place() + ": divergent barrier of the cluster: " + blocks_[rank]->describe(thread) +
                   ", " + first_arrived_ + " with " + std::to_string(arrived_ - 1) + " others";
        }
    }
    return "divergent barrier of the cluster";  // unreachable: a barrier with everybody at it is complete
}

}  // namespace kvc::emulation

namespace kvc::platform {

using emulation::current_block;

void announce_at_cluster_barrier(emulation::Site site) { current_block->cluster().arrive(site, false); }

void arrive_at_cluster_barrier(emulation::Site site) { current_block->cluster().arrive(site, true); }

void wait_at_cluster_barrier(emulation::Site site) { current_block->cluster().wait(site); }

void* map_to_block(void* shared, int rank) { return current_block->cluster().map(shared, rank); }

}  // namespace kvc::platform

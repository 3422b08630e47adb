#include "emulation/mbarriers.h"

#include "emulation/block.h"
#include "emulation/builtins.h"
#include "emulation/cluster.h"

#include <algorithm>
#include <cstring>

namespace kvc::emulation {
namespace {

constexpr int64_t kMostBytes = (1 << 20) - 1;  // that an mbarrier counts

}  // namespace

Mbarrier& Mbarriers::at(const void* address) {
    const auto found = std::ranges::find(all_, address, &Mbarrier::address);
    if (found == all_.end()) {
        current_block->fail("uses an mbarrier in " + block_.shared().describe(address) + ", where none was made");
    }
    require_known(*found);
    return *found;
}

void Mbarriers::require_known(const Mbarrier& mbarrier) const {
    const Thread& thread = current_block->self();
    const bool is_own = current_block == &block_;
    if (is_own && (&thread == mbarrier.maker || block_.collectives().barriers > mbarrier.made_at)) return;
    if (mbarrier.is_fenced && thread.cluster_waits >= mbarrier.cluster_barrier) return;
    current_block->fail("uses the mbarrier in " + block_.shared().describe(mbarrier.address) +
                        ", of which nothing tells it that it was made");
}

void Mbarriers::make(const void* address, uint32_t arrivals) {
    const Thread& thread = block_.self();
    if (arrivals == 0 || arrivals > kMostBytes)
        block_.fail("makes an mbarrier of " + std::to_string(arrivals) + " arrivals");
    if (std::ranges::find(all_, address, &Mbarrier::address) != all_.end()) {
        block_.fail("makes the mbarrier in " + block_.shared().describe(address) + " again");
    }
    const uint32_t transaction = block_.cluster().races().begin_transaction();
    all_.push_back({.address = address,
                    .arrivals = arrivals,
                    .arrivals_left = arrivals,
                    .transactions = {transaction},
                    .stores = {},
                    .copies = {},
                    .maker = &thread,
                    .made_at = block_.collectives().barriers,
                    .cluster_barrier = thread.cluster_arrivals + 1});
}

void Mbarriers::fence() {
    const Thread& thread = block_.self();
    for (Mbarrier& mbarrier : all_) {
        if (mbarrier.maker == &thread && mbarrier.cluster_barrier == thread.cluster_arrivals + 1)
            mbarrier.is_fenced = true;
    }
}

void Mbarriers::expect(const void* address, uint32_t bytes) {
    Mbarrier& mbarrier = at(address);
    if (mbarrier.arrivals_left == 0) block_.fail("arrives at an mbarrier at which all have arrived");
    --mbarrier.arrivals_left;
    mbarrier.bytes_left += bytes;
    if (mbarrier.bytes_left > kMostBytes) block_.fail("expects more than 2^20 - 1 bytes at an mbarrier");
    complete_phase(mbarrier);
}

void Mbarriers::store(const void* address, void* to, const void* value, size_t bytes) {
    Mbarrier& mbarrier = at(address);
    Mbarrier::Store& store = mbarrier.stores.emplace_back(Mbarrier::Store{to, {}, bytes});
    std::memcpy(store.value.data(), value, bytes);
    mbarrier.bytes_left -= static_cast<int64_t>(bytes);
    if (RaceDetector::instrumented) {
        block_.cluster().races().send({current_block->rank(), current_block->self().number}, to, bytes,
                                      mbarrier.transactions.back());
    }
    SharedMemory::poison(to, bytes);
    complete_phase(mbarrier);
}

void Mbarriers::copy(const void* address, void* to, const void* from, size_t bytes) {
    Mbarrier& mbarrier = at(address);
    mbarrier.copies.push_back({to, from, bytes});
    mbarrier.bytes_left -= static_cast<int64_t>(bytes);
    if (RaceDetector::instrumented) {
        block_.cluster().races().copy_in_bulk({block_.rank(), block_.self().number}, to, from, bytes,
                                              mbarrier.transactions.back());
    }
    SharedMemory::poison(to, bytes);
    complete_phase(mbarrier);
}

void Mbarriers::complete_phase(Mbarrier& mbarrier) {
    if (mbarrier.arrivals_left > 0 || mbarrier.bytes_left > 0) return;
    if (mbarrier.bytes_left < 0) {
        current_block->fail("the mbarrier in " + block_.shared().describe(mbarrier.address) + " has " +
                            std::to_string(-mbarrier.bytes_left) + " bytes more than it expects");
    }
    for (const Mbarrier::Store& store : mbarrier.stores) std::memcpy(store.to, store.value.data(), store.bytes);
    for (const Mbarrier::Copy& copy : mbarrier.copies) std::memcpy(copy.to, copy.from, copy.bytes);
    mbarrier.is_unread = mbarrier.is_unread || !mbarrier.stores.empty() || !mbarrier.copies.empty();
    mbarrier.stores.clear();
    mbarrier.copies.clear();
    mbarrier.arrivals_left = mbarrier.arrivals;
    ++mbarrier.phases;
    mbarrier.transactions.push_back(block_.cluster().races().begin_transaction());
    for (int i = 0; i < block_.size(); ++i) {
        Thread& thread = block_.thread(i);
        if (thread.state == Thread::State::kAtMbarrier && thread.mbarrier == &mbarrier) block_.wake(thread);
    }
}

void Mbarriers::wait(const void* address, uint32_t parity) {
    Thread& thread = block_.self();
    Mbarrier& mbarrier = at(address);
    thread.mbarrier = &mbarrier;
    if (mbarrier.phases % 2 == parity) block_.park(Thread::State::kAtMbarrier);
    const Block::OwnWork work(block_);
    mbarrier.is_unread = false;
    if (RaceDetector::instrumented && mbarrier.phases > 0) {
        block_.cluster().races().wait_for_transaction({block_.rank(), thread.number},
                                                      mbarrier.transactions[mbarrier.phases - 1]);
    }
}

std::string Mbarriers::explain(const Mbarrier& mbarrier) const {
    return "the mbarrier in " + block_.shared().describe(mbarrier.address) + ", which lacks " +
           std::to_string(mbarrier.arrivals_left) + " arrivals and " + std::to_string(mbarrier.bytes_left) + " bytes";
}

void Mbarriers::check_end() const {
    const Block::OwnWork work(block_);
    for (const Mbarrier& mbarrier : all_) {
        const std::string where = "the mbarrier in " + block_.shared().describe(mbarrier.address);
        if (mbarrier.bytes_left > 0) block_.fail("ends its block while " + explain(mbarrier));
        if (mbarrier.bytes_left < 0) {
            block_.fail("ends its block, and " + where + " has bytes that it does not expect");
        }
        if (mbarrier.is_unread) block_.fail("ends its block, and no thread has waited for the bytes at " + where);
    }
}

}  // namespace kvc::emulation

namespace kvc::platform {

using emulation::Block;
using emulation::current_block;

void make_mbarrier(uint64_t* mbarrier, uint32_t arrivals) {
    emulation::check_alignment(mbarrier, sizeof *mbarrier);
    const Block::OwnWork work(*current_block);
    current_block->mbarriers().make(mbarrier, arrivals);
}

void fence_mbarriers() {
    const Block::OwnWork work(*current_block);
    current_block->mbarriers().fence();
}

void expect_at_mbarrier(uint64_t* mbarrier, uint32_t bytes) {
    const Block::OwnWork work(*current_block);
    current_block->mbarriers().expect(mbarrier, bytes);
}

void wait_at_mbarrier(uint64_t* mbarrier, uint32_t parity, emulation::Site site) {
    emulation::Thread& thread = current_block->self();
    thread.waits_for = "an mbarrier";
    thread.site = site;
    thread.operation = nullptr;
    current_block->mbarriers().wait(mbarrier, parity);
}

void store_async_bytes(void* to, uint64_t* mbarrier, int rank, const void* value, size_t bytes) {
    emulation::check_alignment(to, bytes);
    void* const there = current_block->cluster().map(to, rank);
    const void* const counter = current_block->cluster().map(mbarrier, rank);
    Block& owner = current_block->cluster().receiver(rank);
    const Block::OwnWork work(*current_block);
    owner.mbarriers().store(counter, there, value, bytes);
}

void copy_in_bulk(void* to, const void* from, uint32_t bytes, uint64_t* mbarrier) {
    emulation::check_alignment(to, 16);
    emulation::check_alignment(from, 16);
    const Block::OwnWork work(*current_block);
    if (bytes == 0 || bytes % 16 != 0) {
        current_block->fail("copies " + std::to_string(bytes) + " bytes in bulk, no multiple of 16");
    }
    if (!current_block->shared().contains(to, bytes)) current_block->fail("copies in bulk outside shared memory");
    current_block->require_wait(from, bytes);
    current_block->mbarriers().copy(mbarrier, to, from, bytes);
}

}  // namespace kvc::platform

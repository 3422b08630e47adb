#include "emulation/race_detector.h"

#include <algorithm>
#include <bit>

namespace kvc::emulation {

namespace {

void add(const std::vector<uint32_t>& more, std::vector<uint32_t>& to) {
    for (const uint32_t one : more) {
        if (std::ranges::find(to, one) == to.end()) to.push_back(one);
    }
}

}  // namespace

bool RaceDetector::instrumented = false;

void RaceDetector::begin_launch() {
    pages_.clear();
    latest_page_ = nullptr;
    arrivals_.clear();
    found_.reset();
}

void RaceDetector::begin_cluster(uint32_t first_block, uint32_t blocks, int threads) {
    first_block_ = first_block;
    releases_.assign(1, false);
    transactions_.assign(1, {});
    blocks_.resize(blocks);
    const auto count = static_cast<size_t>(threads);
    for (Block& block : blocks_) {
        block.epoch = 1;
        block.clocks.assign(count, 1);
        block.fences.assign(count, 0);
        block.fence_epochs.assign(count, 0);
        block.seen.assign(count, {});
        block.arrivals.assign(count, 0);
        block.waits.assign(count, 0);
        block.all_waited = 0;
        block.arrival_epochs.assign(1, 0);
        block.arrival_fences.assign(1, {});
        block.sends.assign(count, 0);
        block.waited.assign(count, {});
        block.all_waited_for.clear();
        block.acquired.clear();
    }
}

RaceDetector::Access RaceDetector::now(Who who, Kind kind) const {
    const Block& block = blocks_[who.rank];
    Access access{first_block_ + who.rank, block.epoch, block.clocks[who.thread]};
    access.sends = block.sends[who.thread];
    access.fences = block.fences[who.thread] & 0x3ff;
    access.arrivals = block.arrivals[who.thread] & 0x3ff;
    access.thread = static_cast<uint32_t>(who.thread) & 0x3ff;
    access.kind = kind;
    return access;
}

RaceDetector::Byte& RaceDetector::byte_at(uintptr_t address) {
    const uintptr_t number = address / kPageBytes;
    if (latest_page_ == nullptr || number != latest_page_number_) {
        std::unique_ptr<Page>& page = pages_[number];
        if (!page) page = std::make_unique<Page>();
        latest_page_number_ = number;
        latest_page_ = page.get();
    }
    return (*latest_page_)[address % kPageBytes];
}

void RaceDetector::access(Who who, const void* pointer, size_t bytes, Kind kind, bool shared) {
    const Access present = now(who, kind);
    const auto first = reinterpret_cast<uintptr_t>(pointer);
    if (kind == Kind::kAtomic && !shared) acquire(present, first);
    for (uintptr_t address = first; address < first + bytes; ++address) {
        Byte& byte = byte_at(address);
        check(byte.write, present, address, shared);
        if (kind == Kind::kRead) {
            const bool again = byte.reads[0].block == present.block && byte.reads[0].thread == present.thread;
            if (!again) byte.reads[1] = byte.reads[0];
            byte.reads[0] = present;
            const uintptr_t source = in_cluster(byte.write.block) ? byte.copied_from : 0;
            if (source != 0) access(who, reinterpret_cast<const void*>(source), 1, kind, false);
            continue;
        }
        for (const Access& read : byte.reads) check(read, present, address, shared);
        byte = {present, {}, 0};
    }
}

void RaceDetector::copy(Who who, const void* to, const void* from, size_t bytes) {
    access(who, to, bytes, Kind::kWrite, true);
    const auto target = reinterpret_cast<uintptr_t>(to);
    const auto source = reinterpret_cast<uintptr_t>(from);
    for (size_t i = 0; i < bytes; ++i) byte_at(target + i).copied_from = source + i;
}

void RaceDetector::check(const Access& past, const Access& present, uintptr_t address, bool shared) {
    if (past.block == kNoBlock || found_) return;
    if (shared && !in_cluster(past.block)) return;  // an earlier block's memory in the same place
    if (past.kind == Kind::kAtomic && present.kind == Kind::kAtomic) return;
    if (!ordered(past, present, shared)) report(past, present, address, shared);
}

void RaceDetector::report(const Access& past, const Access& present, uintptr_t address, bool shared) {
    if (!found_) found_ = Race{past, present, reinterpret_cast<const void*>(address), shared};
}

bool RaceDetector::ordered_in_block(const Access& past, const Access& present) const {
    if (past.thread == present.thread || past.epoch < present.epoch) return true;
    const bool same_warp = past.thread / kWarpSize == present.thread / kWarpSize;
    return same_warp && block_of(present).seen[present.thread][past.thread % kWarpSize] >= past.clock;
}

bool RaceDetector::ordered_in_cluster(const Access& past, const Access& present) const {
    const Block& before = block_of(past);
    const Block& after = block_of(present);
    const uint32_t waits = std::max(after.waits[present.thread], after.all_waited);
    for (uint32_t barrier = 1; barrier <= waits; ++barrier) {
        if (releases_[barrier]) {
            if (past.arrivals < barrier || past.epoch < before.arrival_epochs[barrier]) return true;
        } else if (past.arrivals < barrier && before.arrival_fences[barrier][past.thread] > past.fences) {
            return true;
        }
    }
    return false;
}

bool RaceDetector::ordered_by_transaction(const Access& past, const Access& present) const {
    const Block& after = block_of(present);
    const auto behind = [&](uint32_t transaction) {
        if (past.transaction != 0) return past.transaction == transaction;
        const Part& part = transactions_[transaction][past.block - first_block_];
        return !part.sends.empty() && (part.sends[past.thread] > past.sends || past.epoch < part.epoch);
    };
    return std::ranges::any_of(after.waited[present.thread], behind) ||
           std::ranges::any_of(after.all_waited_for, behind);
}

bool RaceDetector::ordered(const Access& past, const Access& present, bool shared) const {
    const bool may_be_waited_for = shared || past.transaction != 0;  // else it is global memory, which no store orders
    if (may_be_waited_for && in_cluster(past.block) && ordered_by_transaction(past, present)) return true;
    if (past.transaction != 0) return false;
    if (past.block == present.block && ordered_in_block(past, present)) return true;
    if (in_cluster(past.block) && ordered_in_cluster(past, present)) return true;
    if (past.block == present.block) return false;
    const auto& acquired_by = block_of(present).acquired;
    const auto found = acquired_by.find(past.block);
    if (found == acquired_by.end()) return false;
    return std::ranges::any_of(found->second, [&](const Acquired& acquired) {
        return ordered_in_block(acquired.access, present) && published(past, *acquired.arrival);
    });
}

// True if the access was visible to the whole device when its block arrived.
bool RaceDetector::published(const Access& past, const Arrival& arrival) const {
    const bool before = past.thread == arrival.access.thread || past.epoch < arrival.access.epoch;
    const bool own_fence = arrival.fences[past.thread] > past.fences;
    return before && (own_fence || arrival.fence_epoch > past.epoch);
}

// An atomic in global memory: takes over the arrivals of every block before it, then arrives itself.
void RaceDetector::acquire(const Access& present, uintptr_t address) {
    auto& here = arrivals_[address];
    Block& own = blocks_[present.block - first_block_];
    for (const auto& arrival : here) {
        if (arrival->access.block != present.block) own.acquired[arrival->access.block].push_back({present, arrival});
    }
    here.push_back(std::make_shared<Arrival>(Arrival{present, own.fence_epochs[present.thread], own.fences}));
}

void RaceDetector::fence(Who who) {
    Block& block = blocks_[who.rank];
    ++block.fences[who.thread];
    block.fence_epochs[who.thread] = block.epoch;
}

void RaceDetector::barrier(uint32_t rank) {
    Block& block = blocks_[rank];
    ++block.epoch;
    block.all_waited = *std::max_element(block.waits.begin(), block.waits.end());
    for (const auto& waited : block.waited) add(waited, block.all_waited_for);
}

uint32_t RaceDetector::begin_transaction() {
    if (!instrumented) return 0;
    transactions_.emplace_back(blocks_.size());
    return static_cast<uint32_t>(transactions_.size() - 1);
}

void RaceDetector::send(Who who, const void* to, size_t bytes, uint32_t transaction) {
    Access present = now(who, Kind::kWrite);
    present.transaction = transaction;
    const auto first = reinterpret_cast<uintptr_t>(to);
    for (uintptr_t address = first; address < first + bytes; ++address) {
        Byte& byte = byte_at(address);
        check(byte.write, present, address, true);
        for (const Access& read : byte.reads) check(read, present, address, true);
        byte = {present, {}, 0};
    }
    note_send(who, transaction);
}

void RaceDetector::copy_in_bulk(Who who, const void* to, const void* from, size_t bytes, uint32_t transaction) {
    Access present = now(who, Kind::kWrite);
    present.transaction = transaction;
    const auto target = reinterpret_cast<uintptr_t>(to);
    for (uintptr_t address = target; address < target + bytes; ++address) {
        Byte& byte = byte_at(address);
        for (const Access& past : {byte.write, byte.reads[0], byte.reads[1]}) {
            if (in_cluster(past.block)) report(past, present, address, true);
        }
        byte = {present, {}, 0};
    }
    present.kind = Kind::kRead;
    const auto source = reinterpret_cast<uintptr_t>(from);
    for (uintptr_t address = source; address < source + bytes; ++address) {
        Byte& byte = byte_at(address);
        if (byte.write.block != kNoBlock) report(byte.write, present, address, false);
        byte.reads = {present, byte.reads[0]};
    }
    note_send(who, transaction);
}

void RaceDetector::note_send(Who who, uint32_t transaction) {
    Block& block = blocks_[who.rank];
    Part& part = transactions_[transaction][who.rank];
    part.sends.resize(block.sends.size());
    part.sends[who.thread] = ++block.sends[who.thread];
    part.epoch = block.epoch;
    add(block.waited[who.thread], part.known);
    add(block.all_waited_for, part.known);
}

void RaceDetector::wait_for_transaction(Who who, uint32_t transaction) {
    auto& waited = blocks_[who.rank].waited[who.thread];
    add({transaction}, waited);
    for (const Part& part : transactions_[transaction]) add(part.known, waited);
}

void RaceDetector::arrive_at_cluster(Who who, bool releases) {
    Block& block = blocks_[who.rank];
    const uint32_t barrier = ++block.arrivals[who.thread];
    if (barrier >= releases_.size()) releases_.resize(barrier + 1, false);
    releases_[barrier] = releases;
    if (barrier >= block.arrival_epochs.size()) block.arrival_epochs.resize(barrier + 1, 0);
    block.arrival_epochs[barrier] = std::max(block.arrival_epochs[barrier], block.epoch);
    if (barrier >= block.arrival_fences.size()) block.arrival_fences.resize(barrier + 1, block.fences);
    block.arrival_fences[barrier][who.thread] = block.fences[who.thread];
}

void RaceDetector::wait_at_cluster(Who who) { ++blocks_[who.rank].waits[who.thread]; }

void RaceDetector::warp_barrier(uint32_t rank, int first_thread, uint32_t mask) {
    Block& block = blocks_[rank];
    std::array<uint32_t, kWarpSize> together{};
    for (uint32_t left = mask; left != 0; left &= left - 1) {
        const int lane = std::countr_zero(left);
        auto& seen = block.seen[first_thread + lane];
        seen[lane] = block.clocks[first_thread + lane];
        for (int other = 0; other < kWarpSize; ++other) together[other] = std::max(together[other], seen[other]);
    }
    for (uint32_t left = mask; left != 0; left &= left - 1) {
        const int lane = std::countr_zero(left);
        block.seen[first_thread + lane] = together;
        ++block.clocks[first_thread + lane];
    }
}

}  // namespace kvc::emulation

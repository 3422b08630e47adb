#include "emulation/race_detector.h"

#include <algorithm>
#include <bit>

namespace kvc::emulation {

bool RaceDetector::instrumented = false;

void RaceDetector::begin_launch() {
    pages_.clear();
    latest_page_ = nullptr;
    arrivals_.clear();
    found_.reset();
}

void RaceDetector::begin_block(uint32_t block, int threads) {
    block_ = block;
    epoch_ = 1;
    const auto count = static_cast<size_t>(threads);
    clocks_.assign(count, 1);
    fences_.assign(count, 0);
    fence_epochs_.assign(count, 0);
    seen_.assign(count, {});
    acquired_.clear();
}

RaceDetector::Access RaceDetector::now(int thread, Kind kind) const {
    Access access{block_, epoch_, clocks_[thread]};
    access.fences = fences_[thread] & 0xfffff;
    access.thread = static_cast<uint32_t>(thread) & 0x3ff;
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

void RaceDetector::access(int thread, const void* pointer, size_t bytes, Kind kind, bool shared) {
    const Access present = now(thread, kind);
    const auto first = reinterpret_cast<uintptr_t>(pointer);
    if (kind == Kind::kAtomic && !shared) acquire(present, first);
    for (uintptr_t address = first; address < first + bytes; ++address) {
        Byte& byte = byte_at(address);
        check(byte.write, present, address, shared);
        if (kind == Kind::kRead) {
            if (byte.reads[0].block != block_ || byte.reads[0].thread != present.thread) byte.reads[1] = byte.reads[0];
            byte.reads[0] = present;
            const uintptr_t source = byte.write.block == block_ ? byte.copied_from : 0;
            if (source != 0) access(thread, reinterpret_cast<const void*>(source), 1, kind, false);
            continue;
        }
        for (const Access& read : byte.reads) check(read, present, address, shared);
        byte = {present, {}, 0};
    }
}

void RaceDetector::copy(int thread, const void* to, const void* from, size_t bytes) {
    access(thread, to, bytes, Kind::kWrite, true);
    const auto target = reinterpret_cast<uintptr_t>(to);
    const auto source = reinterpret_cast<uintptr_t>(from);
    for (size_t i = 0; i < bytes; ++i) byte_at(target + i).copied_from = source + i;
}

void RaceDetector::check(const Access& past, const Access& present, uintptr_t address, bool shared) {
    if (past.block == kNoBlock || found_) return;
    if (shared && past.block != block_) return;  // another block's memory, at the same place
    if (past.kind == Kind::kAtomic && present.kind == Kind::kAtomic) return;
    if (!ordered(past, present)) found_ = Race{past, present, reinterpret_cast<const void*>(address), shared};
}

bool RaceDetector::ordered_in_block(const Access& past, const Access& present) const {
    if (past.thread == present.thread || past.epoch < present.epoch) return true;
    const bool same_warp = past.thread / kWarpSize == present.thread / kWarpSize;
    return same_warp && seen_[present.thread][past.thread % kWarpSize] >= past.clock;
}

bool RaceDetector::ordered(const Access& past, const Access& present) const {
    if (past.block == block_) return ordered_in_block(past, present);
    const auto found = acquired_.find(past.block);
    if (found == acquired_.end()) return false;
    return std::ranges::any_of(found->second, [&](const Acquired& acquired) {
        return ordered_in_block(acquired.access, present) && published(past, *acquired.arrival);
    });
}

// Was the access over, for the whole device, when its block arrived?
bool RaceDetector::published(const Access& past, const Arrival& arrival) const {
    const bool before = past.thread == arrival.access.thread || past.epoch < arrival.access.epoch;
    const bool own_fence = arrival.fences[past.thread] > past.fences;
    return before && (own_fence || arrival.fence_epoch > past.epoch);
}

// An atomic in global memory: learns of every block that arrived here before, and arrives itself.
void RaceDetector::acquire(const Access& present, uintptr_t address) {
    auto& here = arrivals_[address];
    for (const auto& arrival : here) {
        if (arrival->access.block != block_) acquired_[arrival->access.block].push_back({present, arrival});
    }
    here.push_back(std::make_shared<Arrival>(Arrival{present, fence_epochs_[present.thread], fences_}));
}

void RaceDetector::fence(int thread) {
    ++fences_[thread];
    fence_epochs_[thread] = epoch_;
}

void RaceDetector::warp_barrier(int first_thread, uint32_t mask) {
    std::array<uint32_t, kWarpSize> together{};
    for (uint32_t left = mask; left != 0; left &= left - 1) {
        const int lane = std::countr_zero(left);
        auto& seen = seen_[first_thread + lane];
        seen[lane] = clocks_[first_thread + lane];
        for (int other = 0; other < kWarpSize; ++other) together[other] = std::max(together[other], seen[other]);
    }
    for (uint32_t left = mask; left != 0; left &= left - 1) {
        const int lane = std::countr_zero(left);
        seen_[first_thread + lane] = together;
        ++clocks_[first_thread + lane];
    }
}

}  // namespace kvc::emulation

#include "emulation/executions.h"

#include "emulation/block.h"

#include <algorithm>
#include <cstdio>
#include <numeric>

// The address at which this library begins: addresses are kept relative to it, as in debug information.
extern "C" const char __ehdr_start __attribute__((visibility("hidden")));

namespace kvc::emulation {

void Executions::begin_launch(const char* kernel, uint32_t cluster_blocks) {
    kernel_ = kernel;
    blocks_ = cluster_blocks;
    first_ = static_cast<uint32_t>(records_.size());
    pieces_.assign(pieces_.size(), kNone);
    counts_.clear();
    was_touched_.clear();
    touched_.clear();
}

void Executions::note(uint32_t rank, int thread, const void* address) {
    const auto place = static_cast<size_t>(static_cast<const char*>(address) - &__ehdr_start);
    if (place >= pieces_.size()) pieces_.resize(place + 1, kNone);
    uint32_t& piece = pieces_[place];
    if (piece == kNone) {
        piece = static_cast<uint32_t>(records_.size()) - first_;
        KvcEmulationExecutions& record = records_.emplace_back();
        std::snprintf(record.kernel, sizeof record.kernel, "%s", kernel_);
        record.address = place;
        counts_.resize(counts_.size() + size_t{blocks_} * kMaxThreads, 0);
        was_touched_.push_back(false);
    }
    if (!was_touched_[piece]) {
        was_touched_[piece] = true;
        touched_.push_back(piece);
    }
    ++counts_[(size_t{piece} * blocks_ + rank) * kMaxThreads + thread];
}

void Executions::end_cluster(int threads) {
    for (const uint32_t piece : touched_) {
        KvcEmulationExecutions& record = records_[first_ + piece];
        uint32_t longest = 0;  // of the cluster: its blocks wait for each other
        for (uint32_t rank = 0; rank < blocks_; ++rank) {
            uint32_t* const counts = counts_.data() + (size_t{piece} * blocks_ + rank) * kMaxThreads;
            for (int first = 0; first < threads; first += kWarpSize) {
                uint32_t* const end = counts + std::min(first + kWarpSize, threads);
                const uint32_t warp = *std::max_element(counts + first, end);
                record.warps += warp;
                record.lanes = std::accumulate(counts + first, end, record.lanes);
                longest = std::max(longest, warp);
            }
            std::fill_n(counts, threads, 0);
        }
        record.longest += uint64_t{blocks_} * longest;
        was_touched_[piece] = false;
    }
    touched_.clear();
}

void Executions::clear() {
    records_.clear();
    pieces_.clear();
    first_ = 0;
}

}  // namespace kvc::emulation

// The compiler calls this function, and names it, as a piece begins, in host code too, where no thread of a block runs.
extern "C" __attribute__((visibility("hidden"))) void __sanitizer_cov_trace_pc() {
    if (kvc::emulation::current_block != nullptr) {
        kvc::emulation::current_block->note_execution(__builtin_return_address(0));
    }
}

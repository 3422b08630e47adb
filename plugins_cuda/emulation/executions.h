// Counts how often the warps of a launch run each straight piece of a kernel, for a model of its time on a GPU
// (benchmarks/predict). A kernel compiled with -fsanitize-coverage=trace-pc reports every such piece as it begins one.
//
// A warp runs a piece as often as its busiest lane does: lanes that take a branch together count once. (What a warp does
// lane by lane, it does as often as its lanes do together.) A library without instrumented code pays nothing.
#pragma once

#include "emulation/emulation.h"
#include "emulation/vector_types.h"

#include <cstdint>
#include <vector>

namespace kvc::emulation {

class Executions {
public:
    void begin_launch(const char* kernel, uint32_t cluster_blocks);
    // A thread of the cluster's block of that rank begins the piece whose code continues at `address`.
    void note(uint32_t rank, int thread, const void* address);
    void end_cluster(int threads);

    const std::vector<KvcEmulationExecutions>& records() const { return records_; }
    void clear();

private:
    static constexpr uint32_t kNone = ~uint32_t{0};

    const char* kernel_ = "";
    std::vector<uint32_t> pieces_;  // by address in the library: index into records_; of the current launch
    std::vector<KvcEmulationExecutions> records_;
    uint32_t first_ = 0;             // record of the current launch
    uint32_t blocks_ = 1;            // of a cluster
    std::vector<uint32_t> counts_;   // [record of the launch][block of the cluster][kMaxThreads]
    std::vector<bool> was_touched_;  // by record of the launch
    std::vector<uint32_t> touched_;  // records of the launch that the cluster has run
};

}  // namespace kvc::emulation

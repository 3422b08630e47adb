// A kernel whose warps run a loop as often as the caller asks, for the emulation's counts of executions.
#include "emulation/toy.h"
#include "kernels/dependent_launch.cuh"

namespace kvc {
namespace {

struct RoundsParams {
    const int* rounds;  // [blocks, threads]
    int* sums;          // [blocks, threads]
};

__global__ void rounds(const RoundsParams params) {
    wait_for_previous_launch();
    const int thread = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
    int sum = 0;
    for (int round = 0; round < params.rounds[thread]; ++round) {
        sum = sum * 3 + round % 5;
    }
    params.sums[thread] = sum;
}

}  // namespace
}  // namespace kvc

extern "C" const char* run_rounds(int blocks, int threads, const int* rounds, int* sums) {
    const kvc::RoundsParams params{rounds, sums};
    return message_of(
        [&](kvc::Stream& stream) { kvc::launch<kvc::rounds>("rounds", blocks, threads, 0, stream, params); });
}

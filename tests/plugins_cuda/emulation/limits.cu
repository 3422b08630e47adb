// Launches that a device refuses: too much shared memory that nobody asked for, too many registers, and a kernel that
// declares other arrays than nvcc counted.
#include "emulation/toy.h"
#include "kernels/shared.cuh"

namespace kvc {
namespace {

struct Params {
    float* out;
};

__global__ void with_static_memory(const Params params) {
    wait_for_previous_launch();
    KVC_SHARED(float, values, 1040);
    values[threadIdx.x] = 1.0f;
    params.out[threadIdx.x] = values[threadIdx.x];
}

// A kernel with the name of one of the library's kernels counts as that one.
template <class T, int kHeadSize>
__global__ void sparse_attention(const Params params) {
    wait_for_previous_launch();
    KVC_SHARED(float, values, 1024 / sizeof(float));
    KVC_SHARED(float, more, 1024 / sizeof(float));
    values[0] = more[0] = 1.0f;
    params.out[0] = values[0];
}

}  // namespace
}  // namespace kvc

using namespace kvc;

extern "C" {

// Launches without kvc::launch, which would ask for the memory.
const char* run_unasked(uint64_t dynamic_bytes, float* out) {
    return message_of([&](Stream&) {
        const Params params{out};
        const auto entry = platform::kernel_entry<with_static_memory>();
        platform::launch_kernel("with_static_memory", entry, 1, 32, dynamic_bytes, 1, nullptr, false, &params);
    });
}
const char* run_asked(uint64_t dynamic_bytes, float* out) {
    return message_of(
        [&](Stream& stream) { launch<with_static_memory>("with_static_memory", 1, 32, dynamic_bytes, stream, {out}); });
}
const char* run_counted(int threads, float* out) {
    return message_of([&](Stream& stream) {
        launch<sparse_attention<float, 256>>("sparse_attention", 1, threads, 0, stream, {out});
    });
}
}

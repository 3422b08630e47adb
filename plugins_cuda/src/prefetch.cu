// kvc_prefetch: starts to read memory into the L2 cache.
#include "kvc/prefetch.h"

#include "kernels/prefetch.cuh"
#include "src/launch.h"
#include "src/validate.h"

// Bytes that one thread prefetches.
static constexpr int kPrefetchPiece = 2048;

extern "C" KvcStatus kvc_prefetch(const KvcPrefetchParams* params, void* stream, KvcMessage* message) {
    return kvc::guard(message, [&] {
        kvc::validate(params);
        const kvc::PrefetchParams prefetch{static_cast<const char*>(params->first), params->bytes};
        const int64_t blocks = kvc::ceil_div(params->bytes, int64_t{kvc::kPrefetchThreads} * kPrefetchPiece);
        kvc::Stream launches(static_cast<cudaStream_t>(stream));
        kvc::launch<kvc::prefetch<kPrefetchPiece>>("prefetch", kvc::grid_of(blocks, 1), dim3(kvc::kPrefetchThreads), 0,
                                                   launches, prefetch);
    });
}

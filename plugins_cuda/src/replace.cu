// kvc_replace_cache and kvc_replace_bounds: overwrite state with the entries that a turn's compaction kept.
#include "kernels/replace.cuh"
#include "kvc/turn.h"
#include "src/operation.h"

namespace kvc {
namespace {

dim3 replace_grid(int64_t elements, int64_t width) {
    return grid_of(ceil_div(elements, width * kReplaceThreads * kReplacedPerThread), 1);
}

template <class T>
void launch_replace(void* state, const void* kept, int64_t elements, Stream& stream) {
    const ReplaceParams<T> params{static_cast<T*>(state), static_cast<const T*>(kept), elements};
    launch<replace_vectors<T>>("replace_vectors", replace_grid(elements, kVectorWidth<T>), dim3(kReplaceThreads), 0,
                               stream, params);
}

struct ReplaceCache : WithoutScratch {
    template <class T>
    static void run(const KvcReplaceCacheParams& p, NoScratch, Stream& stream) {
        const int64_t slots = int64_t{p.batch} * p.kv_heads * p.capacity;
        launch_replace<T>(p.k_cache, p.k_kept, slots * p.head_size, stream);
        launch_replace<T>(p.v_cache, p.v_kept, slots * p.head_size, stream);
        const ReplaceParams<int32_t> positions{p.slot_positions, p.positions_kept, slots};
        launch<replace_integers>("replace_integers", replace_grid(slots, 1), dim3(kReplaceThreads), 0, stream,
                                 positions);
    }
};

struct ReplaceBounds : WithoutScratch {
    template <class T>
    static void run(const KvcReplaceBoundsParams& p, NoScratch, Stream& stream) {
        const int64_t bounds = int64_t{p.batch} * p.kv_heads * p.channels * p.pages;
        // Vectors are copied, whatever their elements are. Rows of fp8 are whole vectors too: 16 channels or more.
        const int64_t elements = p.fp8_bounds != 0 ? bounds / static_cast<int64_t>(sizeof(T)) : bounds;
        launch_replace<T>(p.bounds, p.bounds_kept, elements, stream);
    }
};

}  // namespace
}  // namespace kvc

extern "C" KvcStatus kvc_replace_cache_workspace(const KvcReplaceCacheParams* params, uint64_t* bytes,
                                                 KvcMessage* message) {
    return kvc::query_workspace<kvc::ReplaceCache>(params, bytes, message);
}

extern "C" KvcStatus kvc_replace_cache(const KvcReplaceCacheParams* params, void* workspace, uint64_t workspace_bytes,
                                       void* stream, KvcMessage* message) {
    return kvc::call<kvc::ReplaceCache>(params, workspace, workspace_bytes, stream, message);
}

extern "C" KvcStatus kvc_replace_bounds_workspace(const KvcReplaceBoundsParams* params, uint64_t* bytes,
                                                  KvcMessage* message) {
    return kvc::query_workspace<kvc::ReplaceBounds>(params, bytes, message);
}

extern "C" KvcStatus kvc_replace_bounds(const KvcReplaceBoundsParams* params, void* workspace, uint64_t workspace_bytes,
                                        void* stream, KvcMessage* message) {
    return kvc::call<kvc::ReplaceBounds>(params, workspace, workspace_bytes, stream, message);
}

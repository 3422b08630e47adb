// kvc_replace_cache and kvc_replace_bounds: overwrite state with the entries that a turn's compaction kept.
#include "kernels/replace.cuh"
#include "kvc/turn.h"
#include "src/cache_tables.h"
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

void launch_replace_integers(void* state, const void* kept, int64_t count, Stream& stream) {
    const ReplaceParams<int32_t> params{static_cast<int32_t*>(state), static_cast<const int32_t*>(kept), count};
    launch<replace_integers>("replace_integers", replace_grid(count, 1), dim3(kReplaceThreads), 0, stream, params);
}

template <class Integer>
void launch_replace_numbers(void* state, const void* kept, int64_t count, Stream& stream) {
    const ReplaceParams<Integer> params{static_cast<Integer*>(state), static_cast<const Integer*>(kept), count};
    launch<replace_numbers<Integer>>("replace_numbers", replace_grid(count, 1), dim3(kReplaceThreads), 0, stream,
                                     params);
}

/// All parts of `count` vectors in a format. Codes are whole words: D is a multiple of 8.
void launch_replace_vectors(const VectorTable& state, const VectorTable& kept, int64_t count, Stream& stream) {
    launch_replace_integers(state.codes, kept.codes, count * state.code_bytes / 4, stream);
    if (state.format == VectorFormat::kFp8) {
        launch_replace_numbers<uint8_t>(state.scales, kept.scales, count, stream);
        return;
    }
    launch_replace_numbers<uint16_t>(state.scales, kept.scales, count * state.groups, stream);
    if (state.format == VectorFormat::kInt4) {
        launch_replace_numbers<uint16_t>(state.minima, kept.minima, count * state.groups, stream);
    }
}

struct ReplaceCache : WithoutScratch {
    template <class T>
    static void run(const KvcReplaceCacheParams& p, NoScratch, Stream& stream) {
        const int64_t slots = int64_t{p.batch} * p.kv_heads * p.capacity;
        if (p.cache_format == 0) {
            launch_replace<T>(p.k_cache, p.k_kept, slots * p.head_size, stream);
            launch_replace<T>(p.v_cache, p.v_kept, slots * p.head_size, stream);
        } else {
            const CacheFormat formats = formats_of(p.cache_format);
            const auto kept = [&](VectorFormat format, const void* codes, const void* scales, const void* minima) {
                return vector_table(format, p.dtype, p.head_size, codes, scales, minima);
            };
            const CachePair state = cache_tables(p);
            launch_replace_vectors(state.keys, kept(formats.keys, p.k_kept, p.k_kept_scale, p.k_kept_minimum), slots,
                                   stream);
            launch_replace_vectors(state.values, kept(formats.values, p.v_kept, p.v_kept_scale, p.v_kept_minimum),
                                   slots, stream);
        }
        launch_replace_integers(p.slot_positions, p.positions_kept, slots, stream);
    }
};

struct ReplaceBounds : WithoutScratch {
    template <class T>
    static void run(const KvcReplaceBoundsParams& p, NoScratch, Stream& stream) {
        const int64_t bounds = int64_t{p.batch} * p.kv_heads * p.channels * p.pages;
        // Vectors of any element type are copied. Rows of fp8 are whole vectors too: 16 channels or more.
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

// kvc_append_block and kvc_raise_bounds: append a turn's tokens to a cache.
#include "kernels/append_block.cuh"
#include "kernels/stored_bounds.cuh"
#include "kvc/turn.h"
#include "src/block_in_format.h"
#include "src/operation.h"

namespace kvc {
namespace {

struct AppendBlock : WithoutScratch {
    template <class T>
    static void run(const KvcAppendBlockParams& p, NoScratch, Stream& stream) {
        if (p.cache_format != 0) {
            const dim3 rows = grid_of(ceil_div(p.block, int64_t{kRowsOfBlock}), p.kv_heads, p.batch);
            launch<append_block_in_format<T>>("append_block_in_format", rows, dim3(kRowThreads), 0, stream,
                                              block_in_format<T>(p));
            return;
        }
        AppendBlockParams<T> params{};
        params.k_new = static_cast<const T*>(p.k_new);
        params.v_new = static_cast<const T*>(p.v_new);
        params.k_cache = static_cast<T*>(p.k_cache);
        params.v_cache = static_cast<T*>(p.v_cache);
        params.cache_lengths = p.cache_lengths;
        params.lengths = p.lengths;
        params.capacity = p.capacity;
        params.block = p.block;
        params.kv_heads = p.kv_heads;
        params.head_size = p.head_size;
        const dim3 grid = grid_of(ceil_div(p.block, int64_t{kTokensPerBlock}), p.kv_heads, p.batch);
        launch<append_block<T>>("append_block", grid, dim3(kBlockThreads), 0, stream, params);
    }
};

struct RaiseBounds : WithoutScratch {
    template <class T>
    static void run(const KvcRaiseBoundsParams& p, NoScratch, Stream& stream) {
        RaiseBoundsParams<T> params{};
        params.k_new = static_cast<const T*>(p.k_new);
        params.bounds = p.bounds;
        params.fp8_bounds = p.fp8_bounds != 0;
        params.cache_lengths = p.cache_lengths;
        params.lengths = p.lengths;
        params.block = p.block;
        params.page_size = p.page_size;
        params.pages = p.pages;
        params.kv_heads = p.kv_heads;
        params.head_size = p.head_size;
        // A block that starts in the middle of a page touches one page more.
        const int64_t touched = std::min(ceil_div(p.block, params.page_size) + 1, p.pages);
        const dim3 grid = grid_of(ceil_div(touched, int64_t{kRaisedPages}), p.kv_heads, p.batch);
        if (p.cache_format != 0) {
            const VectorFormat keys = formats_of(p.cache_format).keys;
            const RaiseStoredParams<T> stored{params, vector_table(keys, p.dtype, p.head_size, {}, {}, {})};
            launch<raise_bounds_in_format<T>>("raise_bounds_in_format", grid, dim3(kRowThreads), 0, stream, stored);
            return;
        }
        launch<raise_bounds<T>>("raise_bounds", grid, dim3(kBlockThreads), 0, stream, params);
    }
};

}  // namespace
}  // namespace kvc

extern "C" KvcStatus kvc_append_block_workspace(const KvcAppendBlockParams* params, uint64_t* bytes,
                                                KvcMessage* message) {
    return kvc::query_workspace<kvc::AppendBlock>(params, bytes, message);
}

extern "C" KvcStatus kvc_append_block(const KvcAppendBlockParams* params, void* workspace, uint64_t workspace_bytes,
                                      void* stream, KvcMessage* message) {
    return kvc::call<kvc::AppendBlock>(params, workspace, workspace_bytes, stream, message);
}

extern "C" KvcStatus kvc_raise_bounds_workspace(const KvcRaiseBoundsParams* params, uint64_t* bytes,
                                                KvcMessage* message) {
    return kvc::query_workspace<kvc::RaiseBounds>(params, bytes, message);
}

extern "C" KvcStatus kvc_raise_bounds(const KvcRaiseBoundsParams* params, void* workspace, uint64_t workspace_bytes,
                                      void* stream, KvcMessage* message) {
    return kvc::call<kvc::RaiseBounds>(params, workspace, workspace_bytes, stream, message);
}

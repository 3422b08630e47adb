// kvc_join_block: copies stored and new tokens of a turn into one table.
#include "kernels/join_block.cuh"
#include "kvc/turn.h"
#include "src/block_in_format.h"
#include "src/operation.h"

namespace kvc {
namespace {

struct JoinBlock : WithoutScratch {
    template <class T>
    static void run(const KvcJoinBlockParams& p, NoScratch, Stream& stream) {
        if (p.cache_format != 0) {
            BlockInFormatParams<T> stored = block_in_format<T>(p);
            const CachePair joined = joined_tables(p);
            stored.k = joined.keys;
            stored.v = joined.values;
            stored.joined_lengths = p.joined_lengths;
            const dim3 rows = grid_of(ceil_div(p.capacity + p.block, int64_t{kRowsOfBlock}), p.kv_heads, p.batch);
            launch<join_block_in_format<T>>("join_block_in_format", rows, dim3(kRowThreads), 0, stream, stored);
            return;
        }
        JoinBlockParams<T> params{};
        params.k_new = static_cast<const T*>(p.k_new);
        params.v_new = static_cast<const T*>(p.v_new);
        params.k_cache = static_cast<const T*>(p.k_cache);
        params.v_cache = static_cast<const T*>(p.v_cache);
        params.cache_lengths = p.cache_lengths;
        params.lengths = p.lengths;
        params.k = static_cast<T*>(p.k);
        params.v = static_cast<T*>(p.v);
        params.joined_lengths = p.joined_lengths;
        params.capacity = p.capacity;
        params.block = p.block;
        params.kv_heads = p.kv_heads;
        params.head_size = p.head_size;
        const dim3 grid = grid_of(ceil_div(p.capacity + p.block, int64_t{kJoinedPerBlock}), p.kv_heads, p.batch);
        launch<join_block<T>>("join_block", grid, dim3(kJoinThreads), 0, stream, params);
    }
};

}  // namespace
}  // namespace kvc

extern "C" KvcStatus kvc_join_block_workspace(const KvcJoinBlockParams* params, uint64_t* bytes, KvcMessage* message) {
    return kvc::query_workspace<kvc::JoinBlock>(params, bytes, message);
}

extern "C" KvcStatus kvc_join_block(const KvcJoinBlockParams* params, void* workspace, uint64_t workspace_bytes,
                                    void* stream, KvcMessage* message) {
    return kvc::call<kvc::JoinBlock>(params, workspace, workspace_bytes, stream, message);
}

// kvc_dense_attention and kvc_rotated_dense_attention: append the new token, then attend to all entries of each row.
#include "src/attention.h"
#include "src/operation.h"

namespace kvc {
namespace {

struct DenseAttention {
    static AttentionScratch lay_out(const KvcDenseAttentionParams& params, Workspace& workspace) {
        return take_attention_scratch(params, workspace);
    }

    template <class T>
    static void run(const KvcDenseAttentionParams& params, const AttentionScratch& scratch, Stream& stream) {
        step(params, separate_token<T>(params), scratch, stream);
    }

    template <class T>
    static void step(const KvcDenseAttentionParams& params, const NewToken<T>& token, const AttentionScratch& scratch,
                     Stream& stream) {
        const dim3 grid = grid_of(params.kv_heads, params.batch);
        const AppendParams<T> appended = append_params<T>(params, token, scratch.arrivals);
        if (params.cache_format == 0) {
            launch<append<T>>("append", grid, dim3(kAppendThreads), 0, stream, appended);
        } else {
            launch<append_in_format<T>>("append_in_format", grid, dim3(kAppendThreads), 0, stream, appended);
        }
        launch_attention<T>(params, scratch, TokenList{}, stream);
    }
};

}  // namespace
}  // namespace kvc

extern "C" KvcStatus kvc_dense_attention_workspace(const KvcDenseAttentionParams* params, uint64_t* bytes,
                                                   KvcMessage* message) {
    return kvc::query_workspace<kvc::DenseAttention>(params, bytes, message);
}

extern "C" KvcStatus kvc_dense_attention(const KvcDenseAttentionParams* params, void* workspace,
                                         uint64_t workspace_bytes, void* stream, KvcMessage* message) {
    return kvc::call<kvc::DenseAttention>(params, workspace, workspace_bytes, stream, message);
}

extern "C" KvcStatus kvc_rotated_dense_attention_workspace(const KvcRotatedDenseAttentionParams* params,
                                                           uint64_t* bytes, KvcMessage* message) {
    return kvc::query_workspace<kvc::Rotated<kvc::DenseAttention>>(params, bytes, message);
}

extern "C" KvcStatus kvc_rotated_dense_attention(const KvcRotatedDenseAttentionParams* params, void* workspace,
                                                 uint64_t workspace_bytes, void* stream, KvcMessage* message) {
    return kvc::call<kvc::Rotated<kvc::DenseAttention>>(params, workspace, workspace_bytes, stream, message);
}

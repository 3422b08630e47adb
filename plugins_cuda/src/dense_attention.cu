// kvc_dense_attention: append the new token, then attend to all entries of each row.
#include "kernels/append.cuh"
#include "kernels/sparse_attention.cuh"
#include "src/launch.h"
#include "src/validate.h"

namespace kvc {
namespace {

// Every row is dense: its entries are at most the capacity.
AttentionLimits limits_of(const KvcDenseAttentionParams& p) { return {p.capacity, p.capacity, p.capacity}; }

AttentionScratch scratch_of(const KvcDenseAttentionParams& p, Workspace& workspace) {
    return take_attention_scratch(workspace, p.batch, p.heads, p.kv_heads, p.head_size, most_attended(limits_of(p)));
}

uint64_t workspace_bytes_of(const KvcDenseAttentionParams& p) {
    Workspace measured;
    scratch_of(p, measured);
    return measured.used();
}

template <class T>
void launch_append(const KvcDenseAttentionParams& p, int32_t* arrivals, cudaStream_t stream) {
    AppendParams<T> params{};
    params.k_new = static_cast<const T*>(p.k_new);
    params.v_new = static_cast<const T*>(p.v_new);
    params.k_cache = static_cast<T*>(p.k_cache);
    params.v_cache = static_cast<T*>(p.v_cache);
    params.cache_lengths = p.cache_lengths;
    params.arrivals = arrivals;
    params.capacity = p.capacity;
    params.kv_heads = p.kv_heads;
    params.head_size = p.head_size;
    const dim3 grid(static_cast<unsigned>(p.kv_heads), static_cast<unsigned>(p.batch));
    launch("append", append<T>, grid, dim3(kAppendThreads), 0, stream, params);
}

template <class T>
void launch_attention(const KvcDenseAttentionParams& p, const AttentionScratch& scratch, cudaStream_t stream) {
    SparseAttentionParams<T> params{};
    params.query = static_cast<const T*>(p.query);
    params.k_cache = static_cast<const T*>(p.k_cache);
    params.v_cache = static_cast<const T*>(p.v_cache);
    params.cache_lengths = p.cache_lengths;
    params.output = static_cast<T*>(p.output);
    params.scratch = scratch;
    params.limits = limits_of(p);
    params.batch = p.batch;
    params.kv_heads = p.kv_heads;
    params.group = p.heads / p.kv_heads;
    params.head_size = p.head_size;
    launch_sparse_attention(params, stream);
}

}  // namespace
}  // namespace kvc

extern "C" KvcStatus kvc_dense_attention_workspace(const KvcDenseAttentionParams* params, uint64_t* bytes,
                                                   KvcMessage* message) {
    return kvc::guard(message, [&] {
        kvc::validate_sizes(params);
        kvc::validate_result(bytes);
        *bytes = kvc::workspace_bytes_of(*params);
    });
}

extern "C" KvcStatus kvc_dense_attention(const KvcDenseAttentionParams* params, void* workspace,
                                         uint64_t workspace_bytes, void* stream, KvcMessage* message) {
    return kvc::guard(message, [&] {
        kvc::validate(params);
        kvc::validate_workspace(workspace, workspace_bytes, kvc::workspace_bytes_of(*params));
        kvc::Workspace parts(workspace, workspace_bytes);
        const kvc::AttentionScratch scratch = kvc::scratch_of(*params, parts);
        kvc::dispatch_dtype(params->dtype, [&](auto tag) {
            using T = typename decltype(tag)::Type;
            const auto queue = static_cast<cudaStream_t>(stream);
            kvc::launch_append<T>(*params, scratch.arrivals, queue);
            kvc::launch_attention<T>(*params, scratch, queue);
        });
    });
}

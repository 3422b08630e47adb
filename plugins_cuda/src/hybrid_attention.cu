// kvc_hybrid_attention: one decode step of one layer, as three launches whatever the rows hold.
//
//   page_scores       (chunks of pages, G, B)   append key and value; score pages where a row is longer than its budget
//   select_tokens     (G, B)                    rank the pages of a KV head, list its tokens; raise the page's bounds
//   sparse_attention  see sparse_attention.cuh  attend to the listed tokens, or to all
//
// Three, because each needs all of what the one before it wrote for a KV head, and between blocks only a launch gives
// that without spinning. docs/kernels.md has the estimates for fusing the first two. Grids follow from sizes alone, so
// a captured graph serves every length; blocks with nothing to do return.
#include "kernels/page_scores.cuh"
#include "kernels/select_tokens.cuh"
#include "kernels/sparse_attention.cuh"
#include "kvc/attention.h"
#include "src/launch.h"
#include "src/validate.h"

namespace kvc {
namespace {

// Vectors of a staged row of page_scores, which fix the pages of a block. A longer row chooses channels fewer times, which
// is half of a short row's instructions; below kEnoughBlocks blocks (two for each of the 132 multiprocessors of an H100
// or H200) parallel blocks are worth more. Scores do not depend on it.
constexpr int kLongestRow = 64;
constexpr int kShortestRow = 16;
constexpr int64_t kEnoughBlocks = 264;
constexpr int kMostSharedBytes = 64 * 1024;

// The parts of the workspace.
struct Scratch {
    float* scores;     // [B,G,H/G,P]
    uint32_t* keys;    // [B,G,P]
    int32_t* indices;  // [B,G,top_k]
    AttentionScratch attention;
};

AttentionLimits limits_of(const KvcHybridAttentionParams& p) {
    return {p.capacity, p.top_k, p.token_budget > p.dense_until ? p.token_budget : p.dense_until};
}

int32_t pages_of(const KvcHybridAttentionParams& p) {
    return static_cast<int32_t>(ceil_div(p.capacity, int64_t{p.page_size}));
}

// An engine whose every row is read as a whole needs no scores and no lists.
Scratch take_scratch(Workspace& workspace, const KvcHybridAttentionParams& p) {
    const int64_t most = most_attended(limits_of(p));
    const int64_t scored_pages = most < p.capacity ? pages_of(p) : 0;
    const int64_t listed_pages = scored_pages > kMostSharedPages ? scored_pages : 0;
    Scratch scratch;
    scratch.scores = workspace.take<float>({p.batch, p.heads, scored_pages});
    scratch.keys = workspace.take<uint32_t>({p.batch, p.kv_heads, listed_pages});
    scratch.indices = workspace.take<int32_t>({p.batch, p.kv_heads, most < p.capacity ? p.top_k : 0});
    scratch.attention = take_attention_scratch(workspace, p.batch, p.heads, p.kv_heads, p.head_size, most);
    return scratch;
}

template <class T, int kHeads>
int staged_bytes(const KvcHybridAttentionParams& p, int row_vectors) {
    return score_layout<T, kHeads>(row_vectors, p.top_r, p.heads / p.kv_heads, p.head_size).total;
}

template <class T, int kHeads>
void choose_row_vectors(const KvcHybridAttentionParams& p, PageScoresParams<T>& params) {
    for (params.row_vectors = kLongestRow; params.row_vectors > kShortestRow; params.row_vectors /= 2) {
        const int64_t blocks = int64_t{p.batch} * p.kv_heads * ceil_div(params.pages, params.chunk());
        if (blocks >= kEnoughBlocks && staged_bytes<T, kHeads>(p, params.row_vectors) <= kMostSharedBytes) {
            return;
        }
    }
}

template <class T>
AppendParams<T> token_of(const KvcHybridAttentionParams& p, const Scratch& scratch) {
    return {static_cast<const T*>(p.k_new),
            static_cast<const T*>(p.v_new),
            static_cast<T*>(p.k_cache),
            static_cast<T*>(p.v_cache),
            p.cache_lengths,
            scratch.attention.arrivals,
            p.capacity,
            p.kv_heads,
            p.head_size};
}

template <class T, int kHeads>
void launch_page_scores(const KvcHybridAttentionParams& p, const Scratch& scratch, cudaStream_t stream) {
    PageScoresParams<T> params;
    params.query = static_cast<const T*>(p.query);
    params.token = token_of<T>(p, scratch);
    params.bounds = static_cast<const T*>(p.bounds);
    params.scores = scratch.scores;
    params.limits = limits_of(p);
    params.group = p.heads / p.kv_heads;
    params.page_size = p.page_size;
    params.pages = pages_of(p);
    params.top_r = p.top_r;
    choose_row_vectors<T, kHeads>(p, params);
    const dim3 grid(ceil_div(params.pages, params.chunk()), p.kv_heads, p.batch);
    const int bytes = staged_bytes<T, kHeads>(p, params.row_vectors);
    launch("page_scores", page_scores<T, kHeads>, grid, dim3(kScoreThreads), bytes, stream, params);
}

template <class T>
void launch_select_tokens(const KvcHybridAttentionParams& p, const Scratch& scratch, cudaStream_t stream) {
    SelectTokensParams<T> params;
    params.scores = scratch.scores;
    params.k_new = static_cast<const T*>(p.k_new);
    params.bounds = static_cast<T*>(p.bounds);
    params.cache_lengths = p.cache_lengths;
    params.keys = scratch.keys;
    params.indices = scratch.indices;
    params.selected = p.selected;
    params.limits = limits_of(p);
    params.index_stride = p.top_k;
    params.selected_width = p.selected_width;
    params.group = p.heads / p.kv_heads;
    params.page_size = p.page_size;
    params.pages = pages_of(p);
    params.head_size = p.head_size;
    const dim3 grid(p.kv_heads, p.batch);
    if (params.pages <= kMostSharedPages) {
        const size_t bytes = sizeof(uint32_t) * params.pages;
        launch("select_tokens", select_tokens<T, true>, grid, dim3(kTokenThreads), bytes, stream, params);
    } else {
        launch("select_tokens", select_tokens<T, false>, grid, dim3(kTokenThreads), 0, stream, params);
    }
}

template <class T>
void launch_attention(const KvcHybridAttentionParams& p, const Scratch& scratch, cudaStream_t stream) {
    SparseAttentionParams<T> params;
    params.query = static_cast<const T*>(p.query);
    params.k_cache = static_cast<const T*>(p.k_cache);
    params.v_cache = static_cast<const T*>(p.v_cache);
    params.cache_lengths = p.cache_lengths;
    params.indices = scratch.indices;
    params.output = static_cast<T*>(p.output);
    params.scratch = scratch.attention;
    params.limits = limits_of(p);
    params.index_stride = p.top_k;
    params.batch = p.batch;
    params.kv_heads = p.kv_heads;
    params.group = p.heads / p.kv_heads;
    params.head_size = p.head_size;
    launch_sparse_attention(params, stream);
}

template <class T>
void launch_step(const KvcHybridAttentionParams& p, const Scratch& scratch, cudaStream_t stream) {
    switch (p.heads / p.kv_heads) {  // heads that share one pass over the staged bounds
        case 1: launch_page_scores<T, 1>(p, scratch, stream); break;
        case 2: launch_page_scores<T, 2>(p, scratch, stream); break;
        default: launch_page_scores<T, 4>(p, scratch, stream);
    }
    launch_select_tokens<T>(p, scratch, stream);
    launch_attention<T>(p, scratch, stream);
}

uint64_t workspace_bytes(const KvcHybridAttentionParams& p) {
    Workspace measure;
    take_scratch(measure, p);
    return measure.used();
}

}  // namespace
}  // namespace kvc

extern "C" KvcStatus kvc_hybrid_attention_workspace(const KvcHybridAttentionParams* params, uint64_t* bytes,
                                                    KvcMessage* message) {
    return kvc::guard(message, [&] {
        kvc::validate_sizes(params);
        kvc::validate_result(bytes);
        *bytes = kvc::workspace_bytes(*params);
    });
}

extern "C" KvcStatus kvc_hybrid_attention(const KvcHybridAttentionParams* params, void* workspace,
                                          uint64_t workspace_bytes, void* stream, KvcMessage* message) {
    return kvc::guard(message, [&] {
        kvc::validate(params);
        kvc::validate_workspace(workspace, workspace_bytes, kvc::workspace_bytes(*params));
        kvc::Workspace parts(workspace, workspace_bytes);
        const kvc::Scratch scratch = kvc::take_scratch(parts, *params);
        kvc::dispatch_dtype(params->dtype, [&](auto tag) {
            using T = typename decltype(tag)::Type;
            kvc::launch_step<T>(*params, scratch, static_cast<cudaStream_t>(stream));
        });
    });
}

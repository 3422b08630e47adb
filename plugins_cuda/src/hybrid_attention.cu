// kvc_hybrid_attention: one decode step of one layer, as three launches however long the rows are, or as two for few rows
// (src/score_and_select.h).
//
//   page_scores       (chunks of pages, G, B)   append key and value; score pages where a row is longer than its budget
//   select_tokens     (G, B)                    rank the pages of a KV head, list its tokens; raise the page's bounds
//   sparse_attention  see sparse_attention.cuh  attend to the listed tokens, or to all
//
// Three, because each needs all of what the one before it wrote for a KV head, and between blocks only a launch, or the
// barrier of a cluster, gives that without spinning. docs/kernels/decode-selection.md has the estimates for fewer. Grids
// follow from sizes alone, so a captured graph serves every length; blocks with nothing to do return.
#include "kernels/page_scores.cuh"
#include "kernels/select_tokens.cuh"
#include "src/attention.h"
#include "src/operation.h"
#include "src/score_and_select.h"

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
    float* scores;           // [B,G,H/G,8U]
    ScoreStatistics* units;  // [B,G,H/G,U]
    uint32_t* keys;          // [B,G,P]
    int32_t* indices;        // [B,G,list_stride(top_k)]
    AttentionScratch attention;
};

// P.
int32_t pages_of(const KvcHybridAttentionParams& p) {
    return static_cast<int32_t>(stored_pages(p.capacity, p.page_size, element_bytes_of(p.dtype)));
}

template <class T, int kHeads>
int staged_bytes(const KvcHybridAttentionParams& p, int row_vectors) {
    return score_layout<T, kHeads>(row_vectors, p.top_r, group_of(p), p.head_size).total;
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

template <class T, int kHeads>
void launch_page_scores(const KvcHybridAttentionParams& p, const Scratch& scratch, Stream& stream) {
    PageScoresParams<T> params;
    params.query = static_cast<const T*>(p.query);
    params.token = append_params<T>(p, scratch.attention.arrivals);
    params.bounds = static_cast<const T*>(p.bounds);
    params.scores = scratch.scores;
    params.units = scratch.units;
    params.limits = limits_of(p);
    params.group = group_of(p);
    params.page_size = p.page_size;
    params.pages = pages_of(p);
    params.top_r = p.top_r;
    choose_row_vectors<T, kHeads>(p, params);
    const dim3 grid = grid_of(ceil_div(params.pages, params.chunk()), p.kv_heads, p.batch);
    const int bytes = staged_bytes<T, kHeads>(p, params.row_vectors);
    launch<page_scores<T, kHeads>>("page_scores", grid, dim3(kScoreThreads), bytes, stream, params);
}

// Query heads that share one pass over the staged bounds: see PageScorer.
template <class T>
void launch_page_scores_of(const KvcHybridAttentionParams& p, const Scratch& scratch, Stream& stream) {
    const int32_t group = group_of(p);
    if constexpr (sizeof(T) == 2) {
        if (group <= 4) return launch_page_scores<T, 4>(p, scratch, stream);
        if (group <= 8) return launch_page_scores<T, 8>(p, scratch, stream);
        launch_page_scores<T, 16>(p, scratch, stream);
    } else {
        if (group == 1) return launch_page_scores<T, 1>(p, scratch, stream);
        if (group == 2) return launch_page_scores<T, 2>(p, scratch, stream);
        launch_page_scores<T, 4>(p, scratch, stream);
    }
}

template <class T>
void launch_select_tokens(const KvcHybridAttentionParams& p, const Scratch& scratch, Stream& stream) {
    SelectTokensParams<T> params;
    params.scores = scratch.scores;
    params.units = scratch.units;
    params.k_new = static_cast<const T*>(p.k_new);
    params.bounds = static_cast<T*>(p.bounds);
    params.cache_lengths = p.cache_lengths;
    params.keys = scratch.keys;
    params.indices = scratch.indices;
    params.selected = p.selected;
    params.limits = limits_of(p);
    params.index_stride = list_stride(p.top_k);
    params.selected_width = p.selected_width;
    params.group = group_of(p);
    params.page_size = p.page_size;
    params.pages = pages_of(p);
    params.head_size = p.head_size;
    const dim3 grid = grid_of(p.kv_heads, p.batch);
    const auto launch_with = [&]<class Keys>(TypeTag<Keys>, size_t dynamic_shared_bytes) {
        launch<select_tokens<T, Keys>>("select_tokens", grid, dim3(kTokenThreads), dynamic_shared_bytes, stream,
                                       params);
    };
    if (params.pages <= KeysInRegisters<4>::kMostPages) {
        launch_with(TypeTag<KeysInRegisters<4>>(), 0);
    } else if (params.pages <= KeysInRegisters<8>::kMostPages) {
        launch_with(TypeTag<KeysInRegisters<8>>(), 0);
    } else if (params.pages <= KeysInShared::kMostPages) {
        launch_with(TypeTag<KeysInShared>(), sizeof(uint32_t) * params.pages);
    } else {
        launch_with(TypeTag<KeysInWorkspace>(), 0);
    }
}

struct HybridAttention {
    // An engine whose every row is read as a whole needs no scores and no lists.
    static Scratch lay_out(const KvcHybridAttentionParams& p, Workspace& workspace) {
        const bool any_sparse = most_attended(limits_of(p)) < p.capacity;
        const int32_t scored_pages = any_sparse ? pages_of(p) : 0;
        const int32_t units = units_of(scored_pages);
        const int32_t listed_pages = scored_pages > KeysInShared::kMostPages ? scored_pages : 0;
        Scratch scratch;
        scratch.scores = workspace.take<float>({p.batch, p.heads, units, kUnitPages});
        scratch.units = workspace.take<ScoreStatistics>({p.batch, p.heads, units});
        scratch.keys = workspace.take<uint32_t>({p.batch, p.kv_heads, listed_pages});
        scratch.indices = workspace.take<int32_t>({p.batch, p.kv_heads, any_sparse ? list_stride(p.top_k) : 0});
        scratch.attention = take_attention_scratch(p, workspace);
        return scratch;
    }

    template <class T>
    static void run(const KvcHybridAttentionParams& p, const Scratch& scratch, Stream& stream) {
        if (!launch_score_and_select_of<T>(p, pages_of(p), scratch.attention.arrivals, scratch.indices, stream)) {
            launch_page_scores_of<T>(p, scratch, stream);
            launch_select_tokens<T>(p, scratch, stream);
        }
        launch_attention<T>(p, scratch.attention, TokenList{scratch.indices, list_stride(p.top_k)}, stream);
    }
};

}  // namespace
}  // namespace kvc

extern "C" KvcStatus kvc_hybrid_attention_workspace(const KvcHybridAttentionParams* params, uint64_t* bytes,
                                                    KvcMessage* message) {
    return kvc::query_workspace<kvc::HybridAttention>(params, bytes, message);
}

extern "C" KvcStatus kvc_hybrid_attention(const KvcHybridAttentionParams* params, void* workspace,
                                          uint64_t workspace_bytes, void* stream, KvcMessage* message) {
    return kvc::call<kvc::HybridAttention>(params, workspace, workspace_bytes, stream, message);
}

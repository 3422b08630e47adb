// kvc_hybrid_attention and kvc_rotated_hybrid_attention: one decode step of one layer, as four launches for rows of any
// length. For few rows of a cache without a format it is one launch (src/cluster_step.h), or two
// (src/score_and_select.h).
//
//   prepare_step      (G, B)                    rotate and store the token, raise its page's bounds; choose channels
//   page_scores       (chunks of pages, G, B)   score pages where a row is longer than its budget
//   select_tokens     (G, B)                    rank the pages of a KV head, list its tokens
//   sparse_attention  see sparse_attention.cuh  attend to the listed tokens, or to all
//
// Four, because each launch needs everything that the one before wrote for a KV head, and between blocks only a launch,
// or the barrier of a cluster, gives that without spinning. docs/kernels/decode-selection.md estimates fewer. Grids
// follow from sizes alone, so a captured graph serves every length; blocks with nothing to do return.
#include "kernels/page_scores.cuh"
#include "kernels/prepare_step.cuh"
#include "kernels/select_tokens.cuh"
#include "src/attention.h"
#include "src/cluster_step.h"
#include "src/operation.h"
#include "src/score_and_select.h"

namespace kvc {
namespace {

// Vectors of a staged row of page_scores, which fix the pages of a block. With longer rows fewer blocks copy the
// prepared query; below one block per multiprocessor, parallel blocks are worth more. docs/kernels/decode-selection.md
// compares limits. Scores do not depend on the length.
constexpr int kLongestRow = 64;
constexpr int kShortestRow = 16;
constexpr int kMostSharedBytes = 64 * 1024;

// The parts of the workspace.
struct Scratch {
    uint4* prepared;         // [B,G,prepared_vectors]
    float* scores;           // [B,G,H/G,8U]
    ScoreStatistics* units;  // [B,G,H/G,U]
    uint32_t* keys;          // [B,G,P]
    int32_t* indices;        // [B,G,list_stride(top_k)]
    AttentionScratch attention;
};

// True if a row can be longer than the part of it that is read: without such rows an engine needs no scores or lists.
bool any_sparse(const KvcHybridAttentionParams& p) { return most_attended(limits_of(p)) < p.capacity; }

// Calls `body` with the type tag of the bounds, in a call on caches of T.
template <class T, class Body>
void dispatch_bounds(const KvcHybridAttentionParams& p, Body&& body) {
    if (p.fp8_bounds != 0) return body(TypeTag<fp8_t>{});
    return body(TypeTag<T>{});
}

// Calls `body` with the query heads that share one pass over the staged bounds (an integral_constant): see PageScorer.
template <class T, class Body>
auto dispatch_scored_heads(int32_t group, Body&& body) {
    constexpr int kFewest = sizeof(T) == 2 ? 4 : 1;
    if (group <= kFewest) return body(std::integral_constant<int, kFewest>{});
    if (group <= 2 * kFewest) return body(std::integral_constant<int, 2 * kFewest>{});
    return body(std::integral_constant<int, 4 * kFewest>{});
}

template <class T>
int64_t prepared_vectors_of(const KvcHybridAttentionParams& p) {
    return dispatch_scored_heads<T>(group_of(p), [&](auto heads) {
        return prepared_layout<PageScorer<T, decltype(heads)::value>>(p.top_r, group_of(p)).total;
    });
}

// Vectors of a prepared query. Types of equal size have equally many.
int64_t prepared_vectors(const KvcHybridAttentionParams& p) {
    return p.dtype == KVC_FLOAT32 ? prepared_vectors_of<float>(p) : prepared_vectors_of<bfloat16_t>(p);
}

// P, the pages that bounds have room for.
int32_t pages_of(const KvcHybridAttentionParams& p) {
    return static_cast<int32_t>(stored_pages(p.capacity, p.page_size, element_bytes_of(p.dtype), p.fp8_bounds));
}

template <class T>
void launch_prepare_step(const KvcHybridAttentionParams& p, const AppendParams<T>& append, const Scratch& scratch,
                         Stream& stream) {
    PrepareStepParams<T> params;
    params.append = append;
    params.bounds = p.bounds;
    params.fp8_bounds = p.fp8_bounds != 0;
    params.prepared = scratch.prepared;
    params.limits = limits_of(p);
    params.page_size = p.page_size;
    params.pages = pages_of(p);
    params.top_r = p.top_r;
    const dim3 grid = grid_of(p.kv_heads, p.batch);
    const size_t bytes = sizeof(float) * append.group * p.head_size;
    dispatch_scored_heads<T>(append.group, [&](auto heads) {
        constexpr int kHeads = decltype(heads)::value;
        if (p.cache_format == 0) {
            launch<prepare_step<T, kHeads>>("prepare_step", grid, dim3(kScoreThreads), bytes, stream, params);
        } else {
            launch<prepare_step_in_format<T, kHeads>>("prepare_step_in_format", grid, dim3(kScoreThreads), bytes,
                                                      stream, params);
        }
    });
}

template <class T, int kHeads, class Bound>
int staged_bytes(const KvcHybridAttentionParams& p, int row_vectors) {
    return score_layout<T, kHeads, Bound>(row_vectors, p.top_r, group_of(p)).total;
}

template <class T, int kHeads, class Bound>
void choose_row_vectors(const KvcHybridAttentionParams& p, PageScoresParams<Bound>& params) {
    constexpr const char* kName = "page_scores";
    const int64_t enough = platform::multiprocessors_of(kName, platform::current_device(kName));
    for (params.row_vectors = kLongestRow; params.row_vectors > kShortestRow; params.row_vectors /= 2) {
        const int64_t blocks = int64_t{p.batch} * p.kv_heads * ceil_div(params.pages, params.chunk());
        if (blocks >= enough && staged_bytes<T, kHeads, Bound>(p, params.row_vectors) <= kMostSharedBytes) {
            return;
        }
    }
}

template <class T, int kHeads, class Bound>
void launch_page_scores(const KvcHybridAttentionParams& p, const Scratch& scratch, Stream& stream) {
    PageScoresParams<Bound> params;
    params.prepared = scratch.prepared;
    params.bounds = static_cast<const Bound*>(p.bounds);
    params.cache_lengths = p.cache_lengths;
    params.scores = scratch.scores;
    params.units = scratch.units;
    params.limits = limits_of(p);
    params.kv_heads = p.kv_heads;
    params.group = group_of(p);
    params.head_size = p.head_size;
    params.page_size = p.page_size;
    params.pages = pages_of(p);
    params.top_r = p.top_r;
    choose_row_vectors<T, kHeads, Bound>(p, params);
    const dim3 grid = grid_of(ceil_div(params.pages, params.chunk()), p.kv_heads, p.batch);
    const int bytes = staged_bytes<T, kHeads, Bound>(p, params.row_vectors);
    launch<page_scores<T, kHeads, Bound>>("page_scores", grid, dim3(kScoreThreads), bytes, stream, params);
}

void launch_select_tokens(const KvcHybridAttentionParams& p, const Scratch& scratch, Stream& stream) {
    SelectTokensParams params;
    params.scores = scratch.scores;
    params.units = scratch.units;
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
    const dim3 grid = grid_of(p.kv_heads, p.batch);
    const auto launch_with = [&]<class Keys>(TypeTag<Keys>, size_t dynamic_shared_bytes) {
        launch<select_tokens<Keys>>("select_tokens", grid, dim3(kTokenThreads), dynamic_shared_bytes, stream, params);
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
    static Scratch lay_out(const KvcHybridAttentionParams& p, Workspace& workspace) {
        const bool sparse = any_sparse(p);
        const int32_t scored_pages = sparse ? pages_of(p) : 0;
        const int32_t units = units_of(scored_pages);
        const int32_t listed_pages = scored_pages > KeysInShared::kMostPages ? scored_pages : 0;
        Scratch scratch;
        scratch.prepared = workspace.take<uint4>({p.batch, p.kv_heads, sparse ? prepared_vectors(p) : 0});
        scratch.scores = workspace.take<float>({p.batch, p.heads, units, kUnitPages});
        scratch.units = workspace.take<ScoreStatistics>({p.batch, p.heads, units});
        scratch.keys = workspace.take<uint32_t>({p.batch, p.kv_heads, listed_pages});
        scratch.indices = workspace.take<int32_t>({p.batch, p.kv_heads, sparse ? list_stride(p.top_k) : 0});
        scratch.attention = take_attention_scratch(p, workspace);
        return scratch;
    }

    template <class T>
    static void run(const KvcHybridAttentionParams& p, const Scratch& scratch, Stream& stream) {
        step(p, separate_token<T>(p), scratch, stream);
    }

    // Queues every launch before the attention.
    template <class T, int kHeads, class Bound>
    static void select(const KvcHybridAttentionParams& p, const AppendParams<T>& append, const Scratch& scratch,
                       Stream& stream) {
        if constexpr (sizeof(T) == 2) {
            if (p.cache_format == 0 &&
                launch_score_and_select<T, kHeads, Bound>(p, append, pages_of(p), scratch.indices, stream)) {
                return;
            }
        }
        launch_prepare_step<T>(p, append, scratch, stream);
        if (any_sparse(p)) {
            launch_page_scores<T, kHeads, Bound>(p, scratch, stream);
        }
        launch_select_tokens(p, scratch, stream);
    }

    template <class T>
    static void step(const KvcHybridAttentionParams& p, const NewToken<T>& token, const Scratch& scratch,
                     Stream& stream) {
        const AppendParams<T> append = append_params<T>(p, token, scratch.attention.arrivals);
        if constexpr (sizeof(T) == 2) {
            if (launch_cluster_step<T>(p, append, pages_of(p), stream)) {
                return;
            }
        }
        dispatch_scored_heads<T>(group_of(p), [&](auto heads) {
            dispatch_bounds<T>(p, [&](auto bounds) {
                select<T, decltype(heads)::value, typename decltype(bounds)::Type>(p, append, scratch, stream);
            });
        });
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

extern "C" KvcStatus kvc_rotated_hybrid_attention_workspace(const KvcRotatedHybridAttentionParams* params,
                                                            uint64_t* bytes, KvcMessage* message) {
    return kvc::query_workspace<kvc::Rotated<kvc::HybridAttention>>(params, bytes, message);
}

extern "C" KvcStatus kvc_rotated_hybrid_attention(const KvcRotatedHybridAttentionParams* params, void* workspace,
                                                  uint64_t workspace_bytes, void* stream, KvcMessage* message) {
    return kvc::call<kvc::Rotated<kvc::HybridAttention>>(params, workspace, workspace_bytes, stream, message);
}

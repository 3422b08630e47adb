// KvcHybridAttention as a plugin: one decode step of one layer on a paged, compressed cache (kvc/attention.h).
#include "kvc/attention.h"
#include "kvc/limits.h"

#include <algorithm>

#include "tensorrt/plugin.h"

namespace kvc::tensorrt {
namespace {

using enum Dim;
using enum Element;

constexpr FieldSpec kFields[] = {
    {"page_size", 1, INT32_MAX},    {"top_r", 1, KVC_LARGEST_HEAD_SIZE}, {"top_k", 1, KVC_MOST_TOKENS},
    {"token_budget", 0, INT32_MAX}, {"dense_until", 0, INT32_MAX},
};

constexpr TensorSpec kInputs[] = {
    {"query", kCache, {kBatch, kHeads, kHeadSize}},
    {"k_new", kCache, {kBatch, kKvHeads, kHeadSize}},
    {"v_new", kCache, {kBatch, kKvHeads, kHeadSize}},
    {"k_cache", kCache, {kBatch, kKvHeads, kCapacity, kHeadSize}},
    {"v_cache", kCache, {kBatch, kKvHeads, kCapacity, kHeadSize}},
    {"bounds", kCache, {kBatch, kKvHeads, kBoundRows, kPages}},
    {"cache_lengths", kInt64, {kBatch}},
};

// The number after a shape is the input whose buffer the output is.
constexpr TensorSpec kOutputs[] = {
    {"output", kCache, {kBatch, kHeads, kHeadSize}},
    {"k_cache_out", kCache, {kBatch, kKvHeads, kCapacity, kHeadSize}, 3},
    {"v_cache_out", kCache, {kBatch, kKvHeads, kCapacity, kHeadSize}, 4},
    {"bounds_out", kCache, {kBatch, kKvHeads, kBoundRows, kPages}, 5},
    {"selected", kInt32, {kBatch, kKvHeads, kSelected}},
};

void check(const Fields&) {
    // Every limit that is left depends on sizes, which the C ABI judges.
}

void derive(const Fields& fields, Sizes& sizes) {
    const int64_t page_size = fields.get("page_size");
    const int64_t selected = std::max({fields.get("top_k"), fields.get("token_budget"), fields.get("dense_until")});
    sizes.fix(kSelected, selected, "fields top_k, token_budget, dense_until");
    if (sizes.known(kHeadSize)) sizes.fix(kBoundRows, int64_t{2} * sizes.get(kHeadSize), "bounds");
    if (sizes.known(kCapacity)) {
        sizes.fix(kPages, (sizes.get(kCapacity) + page_size - 1) / page_size, "field page_size");
    }
}

KvcHybridAttentionParams params_of(const Call& call) {
    const Fields& fields = call.fields;
    const Sizes& sizes = call.sizes;
    KvcHybridAttentionParams params{};
    params.struct_bytes = sizeof params;
    params.dtype = call.dtype;
    params.batch = sizes.get(kBatch);
    params.heads = sizes.get(kHeads);
    params.kv_heads = sizes.get(kKvHeads);
    params.head_size = sizes.get(kHeadSize);
    params.page_size = fields.get("page_size");
    params.top_r = fields.get("top_r");
    params.capacity = sizes.get(kCapacity);
    params.top_k = fields.get("top_k");
    params.token_budget = fields.get("token_budget");
    params.dense_until = fields.get("dense_until");
    params.selected_width = sizes.get(kSelected);
    return params;
}

KvcStatus workspace(const Call& call, uint64_t* bytes, KvcMessage* message) {
    const KvcHybridAttentionParams params = params_of(call);
    return kvc_hybrid_attention_workspace(&params, bytes, message);
}

KvcStatus launch(const Call& call, const Buffers& buffers, KvcMessage* message) {
    KvcHybridAttentionParams params = params_of(call);
    params.query = buffers.inputs[0];
    params.k_new = buffers.inputs[1];
    params.v_new = buffers.inputs[2];
    params.cache_lengths = static_cast<const int64_t*>(buffers.inputs[6]);
    params.output = buffers.outputs[0];
    params.k_cache = buffers.outputs[1];
    params.v_cache = buffers.outputs[2];
    params.bounds = buffers.outputs[3];
    params.selected = static_cast<int32_t*>(buffers.outputs[4]);
    return kvc_hybrid_attention(&params, buffers.workspace, buffers.workspace_bytes, buffers.stream, message);
}

}  // namespace

const Operator kHybridAttention{"KvcHybridAttention", kFields, kInputs, kOutputs, check, derive, workspace, launch};

}  // namespace kvc::tensorrt

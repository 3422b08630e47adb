// Generated from the operators' schemas (kvc_trt/operators) by `python -m plugins_cuda.generate`; edit those.
// The operators as tables, and how a call of each becomes a call of the C ABI.
#include <algorithm>

#include "kvc/kvc.h"
#include "tensorrt/plugin.h"

namespace kvc::tensorrt {
namespace {

using enum Dim;
using enum Element;

// ---- KvcCompact: Keep the part of a prompt's cache that its last queries look at.

namespace compact {

constexpr FieldSpec kFields[] = {
    {.name = "prompt_budget", .minimum = 1, .maximum = 1048576, .at_most = "capacity"},
    {.name = "capacity", .minimum = 1, .maximum = 1048576},
    {.name = "pool_kernel", .minimum = 1, .maximum = 4095, .odd = true},
    {.name = "page_size", .minimum = 1, .maximum = INT32_MAX},
};

constexpr TensorSpec kInputs[] = {
    {"q_window", kCache, {kBatch, kHeads, kWindow, kHeadSize}},
    {"k", kCache, {kBatch, kKvHeads, kPromptLength, kHeadSize}},
    {"v", kCache, {kBatch, kKvHeads, kPromptLength, kHeadSize}},
    {"prompt_lengths", kInt64, {kBatch}},
};

// The number after a shape is the input whose buffer the output is.
constexpr TensorSpec kOutputs[] = {
    {"k_cache", kCache, {kBatch, kKvHeads, kCapacity, kHeadSize}},
    {"v_cache", kCache, {kBatch, kKvHeads, kCapacity, kHeadSize}},
    {"bounds", kCache, {kBatch, kKvHeads, kTwiceHeadSize, kPages}},
    {"cache_lengths", kInt64, {kBatch}},
    {"indices", kInt32, {kBatch, kKvHeads, kCapacity}},
};

void derive(const Fields& fields, Sizes& sizes) {
    const int64_t capacity = fields.get("capacity");
    const int64_t page_size = fields.get("page_size");
    sizes.fix(kCapacity, capacity, "field capacity");
    if (sizes.known(kCapacity)) {
        const int64_t C = sizes.get(kCapacity);
        sizes.fix(kPages, (C + page_size - 1) / page_size, "field page_size");
    }
    if (sizes.known(kHeadSize)) {
        const int64_t D = sizes.get(kHeadSize);
        sizes.fix(kTwiceHeadSize, 2 * D, "bounds");
    }
}

KvcCompactParams params_of(const Call& call) {
    KvcCompactParams params{};
    params.struct_bytes = sizeof params;
    params.dtype = call.dtype;
    params.batch = call.sizes.get(kBatch);
    params.heads = call.sizes.get(kHeads);
    params.kv_heads = call.sizes.get(kKvHeads);
    params.head_size = call.sizes.get(kHeadSize);
    params.window = call.sizes.get(kWindow);
    params.pool_kernel = call.fields.get("pool_kernel");
    params.page_size = call.fields.get("page_size");
    params.prompt_length = call.sizes.get(kPromptLength);
    params.prompt_budget = call.fields.get("prompt_budget");
    params.capacity = call.fields.get("capacity");
    params.kv_stride_batch = call.sizes.product({kHeadSize, kPromptLength, kKvHeads});
    params.kv_stride_head = call.sizes.product({kHeadSize, kPromptLength});
    params.kv_stride_token = call.sizes.product({kHeadSize});
    return params;
}

KvcStatus workspace(const Call& call, uint64_t* bytes, KvcMessage* message) {
    const KvcCompactParams params = params_of(call);
    return kvc_compact_workspace(&params, bytes, message);
}

KvcStatus launch(const Call& call, const Buffers& buffers, KvcMessage* message) {
    KvcCompactParams params = params_of(call);
    params.q_window = buffers.inputs[0];
    params.k = buffers.inputs[1];
    params.v = buffers.inputs[2];
    params.prompt_lengths = static_cast<const int64_t*>(buffers.inputs[3]);
    params.k_cache = buffers.outputs[0];
    params.v_cache = buffers.outputs[1];
    params.bounds = buffers.outputs[2];
    params.cache_lengths = static_cast<int64_t*>(buffers.outputs[3]);
    params.indices = static_cast<int32_t*>(buffers.outputs[4]);
    return kvc_compact(&params, buffers.workspace, buffers.workspace_bytes, buffers.stream, message);
}

}  // namespace compact

// ---- KvcDenseAttention: Append one token, attend to every entry.

namespace dense_attention {

constexpr FieldSpec kFields[] = {
    {.name = "dense_until", .minimum = 0, .maximum = INT32_MAX},
};

constexpr TensorSpec kInputs[] = {
    {"query", kCache, {kBatch, kHeads, kHeadSize}},
    {"k_new", kCache, {kBatch, kKvHeads, kHeadSize}},
    {"v_new", kCache, {kBatch, kKvHeads, kHeadSize}},
    {"k_cache", kCache, {kBatch, kKvHeads, kCapacity, kHeadSize}},
    {"v_cache", kCache, {kBatch, kKvHeads, kCapacity, kHeadSize}},
    {"cache_lengths", kInt64, {kBatch}},
};

// The number after a shape is the input whose buffer the output is.
constexpr TensorSpec kOutputs[] = {
    {"output", kCache, {kBatch, kHeads, kHeadSize}},
    {"k_cache_out", kCache, {kBatch, kKvHeads, kCapacity, kHeadSize}, 3},
    {"v_cache_out", kCache, {kBatch, kKvHeads, kCapacity, kHeadSize}, 4},
};

void derive(const Fields&, Sizes&) {}

KvcDenseAttentionParams params_of(const Call& call) {
    KvcDenseAttentionParams params{};
    params.struct_bytes = sizeof params;
    params.dtype = call.dtype;
    params.batch = call.sizes.get(kBatch);
    params.heads = call.sizes.get(kHeads);
    params.kv_heads = call.sizes.get(kKvHeads);
    params.head_size = call.sizes.get(kHeadSize);
    params.capacity = call.sizes.get(kCapacity);
    return params;
}

KvcStatus workspace(const Call& call, uint64_t* bytes, KvcMessage* message) {
    const KvcDenseAttentionParams params = params_of(call);
    return kvc_dense_attention_workspace(&params, bytes, message);
}

KvcStatus launch(const Call& call, const Buffers& buffers, KvcMessage* message) {
    KvcDenseAttentionParams params = params_of(call);
    params.query = buffers.inputs[0];
    params.k_new = buffers.inputs[1];
    params.v_new = buffers.inputs[2];
    params.k_cache = buffers.outputs[1];
    params.v_cache = buffers.outputs[2];
    params.cache_lengths = static_cast<const int64_t*>(buffers.inputs[5]);
    params.output = buffers.outputs[0];
    return kvc_dense_attention(&params, buffers.workspace, buffers.workspace_bytes, buffers.stream, message);
}

}  // namespace dense_attention

// ---- KvcHybridAttention: Append one token, select the pages that matter, attend to their tokens.

namespace hybrid_attention {

constexpr FieldSpec kFields[] = {
    {.name = "page_size", .minimum = 1, .maximum = INT32_MAX},
    {.name = "top_r", .minimum = 1, .maximum = 256},
    {.name = "top_k", .minimum = 1, .maximum = 1048576},
    {.name = "token_budget", .minimum = 0, .maximum = INT32_MAX},
    {.name = "dense_until", .minimum = 0, .maximum = INT32_MAX},
};

constexpr TensorSpec kInputs[] = {
    {"query", kCache, {kBatch, kHeads, kHeadSize}},
    {"k_new", kCache, {kBatch, kKvHeads, kHeadSize}},
    {"v_new", kCache, {kBatch, kKvHeads, kHeadSize}},
    {"k_cache", kCache, {kBatch, kKvHeads, kCapacity, kHeadSize}},
    {"v_cache", kCache, {kBatch, kKvHeads, kCapacity, kHeadSize}},
    {"bounds", kCache, {kBatch, kKvHeads, kTwiceHeadSize, kPages}},
    {"cache_lengths", kInt64, {kBatch}},
};

// The number after a shape is the input whose buffer the output is.
constexpr TensorSpec kOutputs[] = {
    {"output", kCache, {kBatch, kHeads, kHeadSize}},
    {"k_cache_out", kCache, {kBatch, kKvHeads, kCapacity, kHeadSize}, 3},
    {"v_cache_out", kCache, {kBatch, kKvHeads, kCapacity, kHeadSize}, 4},
    {"bounds_out", kCache, {kBatch, kKvHeads, kTwiceHeadSize, kPages}, 5},
    {"selected", kInt32, {kBatch, kKvHeads, kSelectedWidth}},
};

void derive(const Fields& fields, Sizes& sizes) {
    const int64_t top_k = fields.get("top_k");
    const int64_t token_budget = fields.get("token_budget");
    const int64_t dense_until = fields.get("dense_until");
    const int64_t page_size = fields.get("page_size");
    sizes.fix(kSelectedWidth, std::max({top_k, token_budget, dense_until}), "fields top_k, token_budget, dense_until");
    if (sizes.known(kCapacity)) {
        const int64_t C = sizes.get(kCapacity);
        sizes.fix(kPages, (C + page_size - 1) / page_size, "field page_size");
    }
    if (sizes.known(kHeadSize)) {
        const int64_t D = sizes.get(kHeadSize);
        sizes.fix(kTwiceHeadSize, 2 * D, "bounds");
    }
}

KvcHybridAttentionParams params_of(const Call& call) {
    KvcHybridAttentionParams params{};
    params.struct_bytes = sizeof params;
    params.dtype = call.dtype;
    params.batch = call.sizes.get(kBatch);
    params.heads = call.sizes.get(kHeads);
    params.kv_heads = call.sizes.get(kKvHeads);
    params.head_size = call.sizes.get(kHeadSize);
    params.page_size = call.fields.get("page_size");
    params.top_r = call.fields.get("top_r");
    params.capacity = call.sizes.get(kCapacity);
    params.top_k = call.fields.get("top_k");
    params.token_budget = call.fields.get("token_budget");
    params.dense_until = call.fields.get("dense_until");
    params.selected_width = call.sizes.get(kSelectedWidth);
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
    params.k_cache = buffers.outputs[1];
    params.v_cache = buffers.outputs[2];
    params.bounds = buffers.outputs[3];
    params.cache_lengths = static_cast<const int64_t*>(buffers.inputs[6]);
    params.output = buffers.outputs[0];
    params.selected = static_cast<int32_t*>(buffers.outputs[4]);
    return kvc_hybrid_attention(&params, buffers.workspace, buffers.workspace_bytes, buffers.stream, message);
}

}  // namespace hybrid_attention

constexpr Operator kAll[] = {
    {"KvcCompact", compact::kFields, compact::kInputs, compact::kOutputs, compact::derive, compact::workspace,
     compact::launch},
    {"KvcDenseAttention", dense_attention::kFields, dense_attention::kInputs, dense_attention::kOutputs,
     dense_attention::derive, dense_attention::workspace, dense_attention::launch},
    {"KvcHybridAttention", hybrid_attention::kFields, hybrid_attention::kInputs, hybrid_attention::kOutputs,
     hybrid_attention::derive, hybrid_attention::workspace, hybrid_attention::launch}};

}  // namespace

constinit const std::span<const Operator> kOperators = kAll;

}  // namespace kvc::tensorrt

// Generated from the operators' schemas (kvc_trt/operators) by `python -m plugins_cuda.generate`; edit those.
// The operators as tables, and how a call of each becomes a call of the C ABI.
#include <algorithm>

#include "kvc/kvc.h"
#include "tensorrt/plugin.h"

namespace kvc::tensorrt {
namespace {

using enum Dim;
using enum Element;

// ---- KvcAppendBlock: Store a turn's keys and values behind the entries of a cache.

namespace append_block {

constexpr std::span<const FieldSpec> kFields;

constexpr TensorSpec kInputs[] = {
    {"k_new", kCache, {kBatch, kKvHeads, kBlock, kHeadSize}},
    {"v_new", kCache, {kBatch, kKvHeads, kBlock, kHeadSize}},
    {"k_cache", kCache, {kBatch, kKvHeads, kCapacity, kHeadSize}},
    {"v_cache", kCache, {kBatch, kKvHeads, kCapacity, kHeadSize}},
    {"cache_lengths", kInt64, {kBatch}},
    {"lengths", kInt64, {kBatch}},
};

// The number after a shape is the input whose buffer the output is.
constexpr TensorSpec kOutputs[] = {
    {"k_cache_out", kCache, {kBatch, kKvHeads, kCapacity, kHeadSize}, 2},
    {"v_cache_out", kCache, {kBatch, kKvHeads, kCapacity, kHeadSize}, 3},
};

void derive(const Fields&, Sizes&) {}

KvcAppendBlockParams params_of(const Call& call) {
    KvcAppendBlockParams params{};
    params.struct_bytes = sizeof params;
    params.dtype = call.dtype;
    params.batch = call.sizes.get(kBatch);
    params.kv_heads = call.sizes.get(kKvHeads);
    params.head_size = call.sizes.get(kHeadSize);
    params.capacity = call.sizes.get(kCapacity);
    params.block = call.sizes.get(kBlock);
    return params;
}

KvcStatus workspace(const Call& call, uint64_t* bytes, KvcMessage* message) {
    const KvcAppendBlockParams params = params_of(call);
    return kvc_append_block_workspace(&params, bytes, message);
}

KvcStatus launch(const Call& call, const Buffers& buffers, KvcMessage* message) {
    KvcAppendBlockParams params = params_of(call);
    params.k_new = buffers.inputs[0];
    params.v_new = buffers.inputs[1];
    params.k_cache = buffers.outputs[0];
    params.v_cache = buffers.outputs[1];
    params.cache_lengths = static_cast<const int64_t*>(buffers.inputs[4]);
    params.lengths = static_cast<const int64_t*>(buffers.inputs[5]);
    return kvc_append_block(&params, buffers.workspace, buffers.workspace_bytes, buffers.stream, message);
}

}  // namespace append_block

// ---- KvcRaiseBounds: Let the bounds of the pages cover a turn's keys.

namespace raise_bounds {

constexpr FieldSpec kFields[] = {
    {.name = "page_size", .minimum = 1, .maximum = INT32_MAX},
};

constexpr TensorSpec kInputs[] = {
    {"k_new", kCache, {kBatch, kKvHeads, kBlock, kHeadSize}},
    {"bounds", kCache, {kBatch, kKvHeads, kTwiceHeadSize, kPages}},
    {"cache_lengths", kInt64, {kBatch}},
    {"lengths", kInt64, {kBatch}},
};

// The number after a shape is the input whose buffer the output is.
constexpr TensorSpec kOutputs[] = {
    {"bounds_out", kCache, {kBatch, kKvHeads, kTwiceHeadSize, kPages}, 1},
};

void derive(const Fields&, Sizes& sizes) {
    if (sizes.known(kHeadSize)) {
        const int64_t D = sizes.get(kHeadSize);
        sizes.fix(kTwiceHeadSize, 2 * D, "bounds");
    }
}

KvcRaiseBoundsParams params_of(const Call& call) {
    KvcRaiseBoundsParams params{};
    params.struct_bytes = sizeof params;
    params.dtype = call.dtype;
    params.batch = call.sizes.get(kBatch);
    params.kv_heads = call.sizes.get(kKvHeads);
    params.head_size = call.sizes.get(kHeadSize);
    params.page_size = call.fields.get("page_size");
    params.block = call.sizes.get(kBlock);
    params.pages = call.sizes.get(kPages);
    return params;
}

KvcStatus workspace(const Call& call, uint64_t* bytes, KvcMessage* message) {
    const KvcRaiseBoundsParams params = params_of(call);
    return kvc_raise_bounds_workspace(&params, bytes, message);
}

KvcStatus launch(const Call& call, const Buffers& buffers, KvcMessage* message) {
    KvcRaiseBoundsParams params = params_of(call);
    params.k_new = buffers.inputs[0];
    params.bounds = buffers.outputs[0];
    params.cache_lengths = static_cast<const int64_t*>(buffers.inputs[2]);
    params.lengths = static_cast<const int64_t*>(buffers.inputs[3]);
    return kvc_raise_bounds(&params, buffers.workspace, buffers.workspace_bytes, buffers.stream, message);
}

}  // namespace raise_bounds

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

// ---- KvcCompactTurn: Keep the part of stored and new tokens that the last queries of a turn look at.

namespace compact_turn {

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
    {"window_lengths", kInt64, {kBatch}},
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

KvcCompactTurnParams params_of(const Call& call) {
    KvcCompactTurnParams params{};
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
    return params;
}

KvcStatus workspace(const Call& call, uint64_t* bytes, KvcMessage* message) {
    const KvcCompactTurnParams params = params_of(call);
    return kvc_compact_turn_workspace(&params, bytes, message);
}

KvcStatus launch(const Call& call, const Buffers& buffers, KvcMessage* message) {
    KvcCompactTurnParams params = params_of(call);
    params.q_window = buffers.inputs[0];
    params.k = buffers.inputs[1];
    params.v = buffers.inputs[2];
    params.prompt_lengths = static_cast<const int64_t*>(buffers.inputs[3]);
    params.window_lengths = static_cast<const int64_t*>(buffers.inputs[4]);
    params.k_cache = buffers.outputs[0];
    params.v_cache = buffers.outputs[1];
    params.bounds = buffers.outputs[2];
    params.cache_lengths = static_cast<int64_t*>(buffers.outputs[3]);
    params.indices = static_cast<int32_t*>(buffers.outputs[4]);
    return kvc_compact_turn(&params, buffers.workspace, buffers.workspace_bytes, buffers.stream, message);
}

}  // namespace compact_turn

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

// ---- KvcJoinBlock: Stored and new tokens of a turn in one table.

namespace join_block {

constexpr std::span<const FieldSpec> kFields;

constexpr TensorSpec kInputs[] = {
    {"k_new", kCache, {kBatch, kKvHeads, kBlock, kHeadSize}},
    {"v_new", kCache, {kBatch, kKvHeads, kBlock, kHeadSize}},
    {"k_cache", kCache, {kBatch, kKvHeads, kCapacity, kHeadSize}},
    {"v_cache", kCache, {kBatch, kKvHeads, kCapacity, kHeadSize}},
    {"cache_lengths", kInt64, {kBatch}},
    {"lengths", kInt64, {kBatch}},
};

// The number after a shape is the input whose buffer the output is.
constexpr TensorSpec kOutputs[] = {
    {"k", kCache, {kBatch, kKvHeads, kCapacityAndBlock, kHeadSize}},
    {"v", kCache, {kBatch, kKvHeads, kCapacityAndBlock, kHeadSize}},
    {"joined_lengths", kInt64, {kBatch}},
};

void derive(const Fields&, Sizes& sizes) {
    if (sizes.known(kCapacity) && sizes.known(kBlock)) {
        const int64_t C = sizes.get(kCapacity);
        const int64_t M = sizes.get(kBlock);
        sizes.fix(kCapacityAndBlock, C + M, "k");
    }
}

KvcJoinBlockParams params_of(const Call& call) {
    KvcJoinBlockParams params{};
    params.struct_bytes = sizeof params;
    params.dtype = call.dtype;
    params.batch = call.sizes.get(kBatch);
    params.kv_heads = call.sizes.get(kKvHeads);
    params.head_size = call.sizes.get(kHeadSize);
    params.capacity = call.sizes.get(kCapacity);
    params.block = call.sizes.get(kBlock);
    return params;
}

KvcStatus workspace(const Call& call, uint64_t* bytes, KvcMessage* message) {
    const KvcJoinBlockParams params = params_of(call);
    return kvc_join_block_workspace(&params, bytes, message);
}

KvcStatus launch(const Call& call, const Buffers& buffers, KvcMessage* message) {
    KvcJoinBlockParams params = params_of(call);
    params.k_new = buffers.inputs[0];
    params.v_new = buffers.inputs[1];
    params.k_cache = buffers.inputs[2];
    params.v_cache = buffers.inputs[3];
    params.cache_lengths = static_cast<const int64_t*>(buffers.inputs[4]);
    params.lengths = static_cast<const int64_t*>(buffers.inputs[5]);
    params.k = buffers.outputs[0];
    params.v = buffers.outputs[1];
    params.joined_lengths = static_cast<int64_t*>(buffers.outputs[2]);
    return kvc_join_block(&params, buffers.workspace, buffers.workspace_bytes, buffers.stream, message);
}

}  // namespace join_block

// ---- KvcReplaceCache: Overwrite a cache and the positions of its slots.

namespace replace_cache {

constexpr std::span<const FieldSpec> kFields;

constexpr TensorSpec kInputs[] = {
    {"k_cache", kCache, {kBatch, kKvHeads, kCapacity, kHeadSize}},
    {"v_cache", kCache, {kBatch, kKvHeads, kCapacity, kHeadSize}},
    {"slot_positions", kInt32, {kBatch, kKvHeads, kCapacity}},
    {"k_kept", kCache, {kBatch, kKvHeads, kCapacity, kHeadSize}},
    {"v_kept", kCache, {kBatch, kKvHeads, kCapacity, kHeadSize}},
    {"positions_kept", kInt32, {kBatch, kKvHeads, kCapacity}},
};

// The number after a shape is the input whose buffer the output is.
constexpr TensorSpec kOutputs[] = {
    {"k_cache_out", kCache, {kBatch, kKvHeads, kCapacity, kHeadSize}, 0},
    {"v_cache_out", kCache, {kBatch, kKvHeads, kCapacity, kHeadSize}, 1},
    {"slot_positions_out", kInt32, {kBatch, kKvHeads, kCapacity}, 2},
};

void derive(const Fields&, Sizes&) {}

KvcReplaceCacheParams params_of(const Call& call) {
    KvcReplaceCacheParams params{};
    params.struct_bytes = sizeof params;
    params.dtype = call.dtype;
    params.batch = call.sizes.get(kBatch);
    params.kv_heads = call.sizes.get(kKvHeads);
    params.head_size = call.sizes.get(kHeadSize);
    params.capacity = call.sizes.get(kCapacity);
    return params;
}

KvcStatus workspace(const Call& call, uint64_t* bytes, KvcMessage* message) {
    const KvcReplaceCacheParams params = params_of(call);
    return kvc_replace_cache_workspace(&params, bytes, message);
}

KvcStatus launch(const Call& call, const Buffers& buffers, KvcMessage* message) {
    KvcReplaceCacheParams params = params_of(call);
    params.k_cache = buffers.outputs[0];
    params.v_cache = buffers.outputs[1];
    params.slot_positions = static_cast<int32_t*>(buffers.outputs[2]);
    params.k_kept = buffers.inputs[3];
    params.v_kept = buffers.inputs[4];
    params.positions_kept = static_cast<const int32_t*>(buffers.inputs[5]);
    return kvc_replace_cache(&params, buffers.workspace, buffers.workspace_bytes, buffers.stream, message);
}

}  // namespace replace_cache

// ---- KvcReplaceBounds: Overwrite the bounds of a cache's pages.

namespace replace_bounds {

constexpr std::span<const FieldSpec> kFields;

constexpr TensorSpec kInputs[] = {
    {"bounds", kCache, {kBatch, kKvHeads, kTwiceHeadSize, kPages}},
    {"bounds_kept", kCache, {kBatch, kKvHeads, kTwiceHeadSize, kPages}},
};

// The number after a shape is the input whose buffer the output is.
constexpr TensorSpec kOutputs[] = {
    {"bounds_out", kCache, {kBatch, kKvHeads, kTwiceHeadSize, kPages}, 0},
};

void derive(const Fields&, Sizes&) {}

KvcReplaceBoundsParams params_of(const Call& call) {
    KvcReplaceBoundsParams params{};
    params.struct_bytes = sizeof params;
    params.dtype = call.dtype;
    params.batch = call.sizes.get(kBatch);
    params.kv_heads = call.sizes.get(kKvHeads);
    params.channels = call.sizes.get(kTwiceHeadSize);
    params.pages = call.sizes.get(kPages);
    return params;
}

KvcStatus workspace(const Call& call, uint64_t* bytes, KvcMessage* message) {
    const KvcReplaceBoundsParams params = params_of(call);
    return kvc_replace_bounds_workspace(&params, bytes, message);
}

KvcStatus launch(const Call& call, const Buffers& buffers, KvcMessage* message) {
    KvcReplaceBoundsParams params = params_of(call);
    params.bounds = buffers.outputs[0];
    params.bounds_kept = buffers.inputs[1];
    return kvc_replace_bounds(&params, buffers.workspace, buffers.workspace_bytes, buffers.stream, message);
}

}  // namespace replace_bounds

constexpr Operator kAll[] = {
    {"KvcAppendBlock", append_block::kFields, append_block::kInputs, append_block::kOutputs, append_block::derive,
     append_block::workspace, append_block::launch},
    {"KvcRaiseBounds", raise_bounds::kFields, raise_bounds::kInputs, raise_bounds::kOutputs, raise_bounds::derive,
     raise_bounds::workspace, raise_bounds::launch},
    {"KvcCompact", compact::kFields, compact::kInputs, compact::kOutputs, compact::derive, compact::workspace,
     compact::launch},
    {"KvcCompactTurn", compact_turn::kFields, compact_turn::kInputs, compact_turn::kOutputs, compact_turn::derive,
     compact_turn::workspace, compact_turn::launch},
    {"KvcDenseAttention", dense_attention::kFields, dense_attention::kInputs, dense_attention::kOutputs,
     dense_attention::derive, dense_attention::workspace, dense_attention::launch},
    {"KvcHybridAttention", hybrid_attention::kFields, hybrid_attention::kInputs, hybrid_attention::kOutputs,
     hybrid_attention::derive, hybrid_attention::workspace, hybrid_attention::launch},
    {"KvcJoinBlock", join_block::kFields, join_block::kInputs, join_block::kOutputs, join_block::derive,
     join_block::workspace, join_block::launch},
    {"KvcReplaceCache", replace_cache::kFields, replace_cache::kInputs, replace_cache::kOutputs, replace_cache::derive,
     replace_cache::workspace, replace_cache::launch},
    {"KvcReplaceBounds", replace_bounds::kFields, replace_bounds::kInputs, replace_bounds::kOutputs,
     replace_bounds::derive, replace_bounds::workspace, replace_bounds::launch}};

}  // namespace

constinit const std::span<const Operator> kOperators = kAll;

}  // namespace kvc::tensorrt

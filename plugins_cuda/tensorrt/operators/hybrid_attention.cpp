// Generated from the operators' schemas (kvc_trt/operators) by `python -m plugins_cuda.generate`; edit those.
// KvcHybridAttention: Append one token, select the pages that matter, attend to their tokens.
// The operator's tables, and the conversion of its calls into calls of the C ABI.
#include <algorithm>

#include "kernels/stored_pages.h"
#include "kvc/kvc.h"
#include "tensorrt/operators.h"

namespace kvc::tensorrt {
namespace {

using enum Dim;
using enum Element;

constexpr FieldSpec kFields[] = {
    {.name = "page_size", .minimum = 1, .maximum = INT32_MAX},
    {.name = "top_r", .minimum = 1, .maximum = 256},
    {.name = "top_k", .minimum = 1, .maximum = 1048576},
    {.name = "token_budget", .minimum = 0, .maximum = INT32_MAX},
    {.name = "dense_until", .minimum = 0, .maximum = INT32_MAX},
    {.name = "fp8_bounds", .minimum = 0, .maximum = 1},
    {.name = "recent", .minimum = 0, .maximum = 1048576, .at_most = "top_k"},
    {.name = "cache_format", .minimum = 0, .maximum = 4, .optional = true},
};

constexpr TensorSpec kInputs[] = {
    {"query", kCache, {kBatch, kHeads, kHeadSize}},
    {"k_new", kCache, {kBatch, kKvHeads, kHeadSize}},
    {"v_new", kCache, {kBatch, kKvHeads, kHeadSize}},
    {"k_cache", kKeys, {kBatch, kKvHeads, kCapacity, kHeadSize}},
    {"k_scale", kKeyScales, {kBatch, kKvHeads, kCapacity, kGroups}},
    {"k_minimum", kKeyMinima, {kBatch, kKvHeads, kCapacity, kGroups}},
    {"v_cache", kValues, {kBatch, kKvHeads, kCapacity, kHeadSize}},
    {"v_scale", kValueScales, {kBatch, kKvHeads, kCapacity, kGroups}},
    {"v_minimum", kValueMinima, {kBatch, kKvHeads, kCapacity, kGroups}},
    {"bounds", kBound, {kBatch, kKvHeads, kTwiceHeadSize, kPages}},
    {"cache_lengths", kInt64, {kBatch}},
};

// The number after a shape is the input whose buffer the output shares.
constexpr TensorSpec kOutputs[] = {
    {"output", kCache, {kBatch, kHeads, kHeadSize}},
    {"k_cache_out", kKeys, {kBatch, kKvHeads, kCapacity, kHeadSize}, 3},
    {"k_scale_out", kKeyScales, {kBatch, kKvHeads, kCapacity, kGroups}, 4},
    {"k_minimum_out", kKeyMinima, {kBatch, kKvHeads, kCapacity, kGroups}, 5},
    {"v_cache_out", kValues, {kBatch, kKvHeads, kCapacity, kHeadSize}, 6},
    {"v_scale_out", kValueScales, {kBatch, kKvHeads, kCapacity, kGroups}, 7},
    {"v_minimum_out", kValueMinima, {kBatch, kKvHeads, kCapacity, kGroups}, 8},
    {"bounds_out", kBound, {kBatch, kKvHeads, kTwiceHeadSize, kPages}, 9},
    {"selected", kInt32, {kBatch, kKvHeads, kSelectedWidth}},
};

void derive(const Fields& fields, Sizes& sizes) {
    const int64_t top_k = fields.get("top_k");
    const int64_t token_budget = fields.get("token_budget");
    const int64_t dense_until = fields.get("dense_until");
    const int64_t page_size = fields.get("page_size");
    const int64_t fp8_bounds = fields.get("fp8_bounds");
    sizes.fix(kSelectedWidth, std::max({top_k, token_budget, dense_until}), "fields top_k, token_budget, dense_until");
    if (sizes.known(kCapacity) && sizes.known(kBytesPerElement)) {
        const int64_t C = sizes.get(kCapacity);
        const int64_t element_bytes = sizes.get(kBytesPerElement);
        sizes.fix(kPages, stored_pages(C, page_size, element_bytes, fp8_bounds), "fields page_size, fp8_bounds");
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
    params.fp8_bounds = call.fields.get("fp8_bounds");
    params.cache_format = call.fields.get("cache_format");
    params.recent = call.fields.get("recent");
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
    params.k_scale = buffers.outputs[2];
    params.k_minimum = buffers.outputs[3];
    params.v_cache = buffers.outputs[4];
    params.v_scale = buffers.outputs[5];
    params.v_minimum = buffers.outputs[6];
    params.bounds = buffers.outputs[7];
    params.cache_lengths = static_cast<const int64_t*>(buffers.inputs[10]);
    params.output = buffers.outputs[0];
    params.selected = static_cast<int32_t*>(buffers.outputs[8]);
    return kvc_hybrid_attention(&params, buffers.workspace, buffers.workspace_bytes, buffers.stream, message);
}

}  // namespace

constinit const Operator kHybridAttention = {
    "KvcHybridAttention", kFields, kInputs, kOutputs, derive, workspace, launch};

}  // namespace kvc::tensorrt

// Generated from the operators' schemas (kvc_trt/operators) by `python -m plugins_cuda.generate`; edit those.
// KvcCompactTurn: Keep the part of stored and new tokens that the last queries of a turn look at.
// The operator's tables, and the conversion of its calls into calls of the C ABI.

#include "kernels/stored_pages.h"
#include "kvc/kvc.h"
#include "tensorrt/operators.h"

namespace kvc::tensorrt {
namespace {

using enum Dim;
using enum Element;

constexpr FieldSpec kFields[] = {
    {.name = "prompt_budget", .minimum = 1, .maximum = 1048576, .at_most = "capacity"},
    {.name = "capacity", .minimum = 1, .maximum = 1048576},
    {.name = "pool_kernel", .minimum = 1, .maximum = 4095, .odd = true},
    {.name = "page_size", .minimum = 1, .maximum = INT32_MAX},
    {.name = "fp8_bounds", .minimum = 0, .maximum = 1},
    {.name = "cache_format", .minimum = 0, .maximum = 4, .optional = true},
    {.name = "by_length", .minimum = 0, .maximum = 1, .optional = true},
};

constexpr TensorSpec kInputs[] = {
    {"q_window", kCache, {kBatch, kHeads, kWindow, kHeadSize}},
    {"k", kKeys, {kBatch, kKvHeads, kPromptLength, kHeadSize}},
    {"joined_k_scale", kKeyScales, {kBatch, kKvHeads, kPromptLength, kGroups}},
    {"joined_k_minimum", kKeyMinima, {kBatch, kKvHeads, kPromptLength, kGroups}},
    {"v", kValues, {kBatch, kKvHeads, kPromptLength, kHeadSize}},
    {"joined_v_scale", kValueScales, {kBatch, kKvHeads, kPromptLength, kGroups}},
    {"joined_v_minimum", kValueMinima, {kBatch, kKvHeads, kPromptLength, kGroups}},
    {"prompt_lengths", kInt64, {kBatch}},
    {"window_lengths", kInt64, {kBatch}},
    {"prompt_budgets", kInt64, {kBatch}},
    {"pool_kernels", kInt64, {kBatch}},
};

// The number after a shape is the input whose buffer the output shares.
constexpr TensorSpec kOutputs[] = {
    {"k_cache", kKeys, {kBatch, kKvHeads, kCapacity, kHeadSize}},
    {"k_scale", kKeyScales, {kBatch, kKvHeads, kCapacity, kGroups}},
    {"k_minimum", kKeyMinima, {kBatch, kKvHeads, kCapacity, kGroups}},
    {"v_cache", kValues, {kBatch, kKvHeads, kCapacity, kHeadSize}},
    {"v_scale", kValueScales, {kBatch, kKvHeads, kCapacity, kGroups}},
    {"v_minimum", kValueMinima, {kBatch, kKvHeads, kCapacity, kGroups}},
    {"bounds", kBound, {kBatch, kKvHeads, kTwiceHeadSize, kPages}},
    {"cache_lengths", kInt64, {kBatch}},
    {"indices", kInt32, {kBatch, kKvHeads, kCapacity}},
};

void derive(const Fields& fields, Sizes& sizes) {
    const int64_t capacity = fields.get("capacity");
    const int64_t page_size = fields.get("page_size");
    const int64_t fp8_bounds = fields.get("fp8_bounds");
    sizes.fix(kCapacity, capacity, "field capacity");
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
    params.fp8_bounds = call.fields.get("fp8_bounds");
    params.by_length = call.fields.get("by_length");
    params.cache_format = call.fields.get("cache_format");
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
    params.joined_k_scale = buffers.inputs[2];
    params.joined_k_minimum = buffers.inputs[3];
    params.v = buffers.inputs[4];
    params.joined_v_scale = buffers.inputs[5];
    params.joined_v_minimum = buffers.inputs[6];
    params.prompt_lengths = static_cast<const int64_t*>(buffers.inputs[7]);
    params.window_lengths = static_cast<const int64_t*>(buffers.inputs[8]);
    params.prompt_budgets = static_cast<const int64_t*>(buffers.inputs[9]);
    params.pool_kernels = static_cast<const int64_t*>(buffers.inputs[10]);
    params.k_cache = buffers.outputs[0];
    params.k_scale = buffers.outputs[1];
    params.k_minimum = buffers.outputs[2];
    params.v_cache = buffers.outputs[3];
    params.v_scale = buffers.outputs[4];
    params.v_minimum = buffers.outputs[5];
    params.bounds = buffers.outputs[6];
    params.cache_lengths = static_cast<int64_t*>(buffers.outputs[7]);
    params.indices = static_cast<int32_t*>(buffers.outputs[8]);
    return kvc_compact_turn(&params, buffers.workspace, buffers.workspace_bytes, buffers.stream, message);
}

}  // namespace

constinit const Operator kCompactTurn = {"KvcCompactTurn", kFields, kInputs, kOutputs, derive, workspace, launch, 2};

}  // namespace kvc::tensorrt

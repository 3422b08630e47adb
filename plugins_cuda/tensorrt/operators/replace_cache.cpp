// Generated from the operators' schemas (kvc_trt/operators) by `python -m plugins_cuda.generate`; edit those.
// KvcReplaceCache: Overwrite a cache and the positions of its slots.
// The operator's tables, and the conversion of its calls into calls of the C ABI.

#include "kvc/kvc.h"
#include "tensorrt/operators.h"

namespace kvc::tensorrt {
namespace {

using enum Dim;
using enum Element;

constexpr FieldSpec kFields[] = {
    {.name = "cache_format", .minimum = 0, .maximum = 4, .optional = true},
};

constexpr TensorSpec kInputs[] = {
    {"k_cache", kKeys, {kBatch, kKvHeads, kCapacity, kHeadSize}},
    {"k_scale", kKeyScales, {kBatch, kKvHeads, kCapacity, kGroups}},
    {"k_minimum", kKeyMinima, {kBatch, kKvHeads, kCapacity, kGroups}},
    {"v_cache", kValues, {kBatch, kKvHeads, kCapacity, kHeadSize}},
    {"v_scale", kValueScales, {kBatch, kKvHeads, kCapacity, kGroups}},
    {"v_minimum", kValueMinima, {kBatch, kKvHeads, kCapacity, kGroups}},
    {"slot_positions", kInt32, {kBatch, kKvHeads, kCapacity}},
    {"k_kept", kKeys, {kBatch, kKvHeads, kCapacity, kHeadSize}},
    {"k_kept_scale", kKeyScales, {kBatch, kKvHeads, kCapacity, kGroups}},
    {"k_kept_minimum", kKeyMinima, {kBatch, kKvHeads, kCapacity, kGroups}},
    {"v_kept", kValues, {kBatch, kKvHeads, kCapacity, kHeadSize}},
    {"v_kept_scale", kValueScales, {kBatch, kKvHeads, kCapacity, kGroups}},
    {"v_kept_minimum", kValueMinima, {kBatch, kKvHeads, kCapacity, kGroups}},
    {"positions_kept", kInt32, {kBatch, kKvHeads, kCapacity}},
};

// The number after a shape is the input whose buffer the output shares.
constexpr TensorSpec kOutputs[] = {
    {"k_cache_out", kKeys, {kBatch, kKvHeads, kCapacity, kHeadSize}, 0},
    {"k_scale_out", kKeyScales, {kBatch, kKvHeads, kCapacity, kGroups}, 1},
    {"k_minimum_out", kKeyMinima, {kBatch, kKvHeads, kCapacity, kGroups}, 2},
    {"v_cache_out", kValues, {kBatch, kKvHeads, kCapacity, kHeadSize}, 3},
    {"v_scale_out", kValueScales, {kBatch, kKvHeads, kCapacity, kGroups}, 4},
    {"v_minimum_out", kValueMinima, {kBatch, kKvHeads, kCapacity, kGroups}, 5},
    {"slot_positions_out", kInt32, {kBatch, kKvHeads, kCapacity}, 6},
};

void derive(const Fields&, Sizes&) {}

KvcReplaceCacheParams params_of(const Call& call) {
    KvcReplaceCacheParams params{};
    params.struct_bytes = sizeof params;
    params.dtype = call.dtype;
    params.batch = call.sizes.get(kBatch);
    params.kv_heads = call.sizes.get(kKvHeads);
    params.head_size = call.sizes.get(kHeadSize);
    params.cache_format = call.fields.get("cache_format");
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
    params.k_scale = buffers.outputs[1];
    params.k_minimum = buffers.outputs[2];
    params.v_cache = buffers.outputs[3];
    params.v_scale = buffers.outputs[4];
    params.v_minimum = buffers.outputs[5];
    params.slot_positions = static_cast<int32_t*>(buffers.outputs[6]);
    params.k_kept = buffers.inputs[7];
    params.k_kept_scale = buffers.inputs[8];
    params.k_kept_minimum = buffers.inputs[9];
    params.v_kept = buffers.inputs[10];
    params.v_kept_scale = buffers.inputs[11];
    params.v_kept_minimum = buffers.inputs[12];
    params.positions_kept = static_cast<const int32_t*>(buffers.inputs[13]);
    return kvc_replace_cache(&params, buffers.workspace, buffers.workspace_bytes, buffers.stream, message);
}

}  // namespace

constinit const Operator kReplaceCache = {"KvcReplaceCache", kFields, kInputs, kOutputs, derive, workspace, launch};

}  // namespace kvc::tensorrt

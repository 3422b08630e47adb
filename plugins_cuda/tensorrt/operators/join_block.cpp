// Generated from the operators' schemas (kvc_trt/operators) by `python -m plugins_cuda.generate`; edit those.
// KvcJoinBlock: Stored and new tokens of a turn in one table.
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
    {"k_new", kCache, {kBatch, kKvHeads, kBlock, kHeadSize}},
    {"v_new", kCache, {kBatch, kKvHeads, kBlock, kHeadSize}},
    {"k_cache", kKeys, {kBatch, kKvHeads, kCapacity, kHeadSize}},
    {"k_scale", kKeyScales, {kBatch, kKvHeads, kCapacity, kGroups}},
    {"k_minimum", kKeyMinima, {kBatch, kKvHeads, kCapacity, kGroups}},
    {"v_cache", kValues, {kBatch, kKvHeads, kCapacity, kHeadSize}},
    {"v_scale", kValueScales, {kBatch, kKvHeads, kCapacity, kGroups}},
    {"v_minimum", kValueMinima, {kBatch, kKvHeads, kCapacity, kGroups}},
    {"cache_lengths", kInt64, {kBatch}},
    {"lengths", kInt64, {kBatch}},
};

// The number after a shape is the input whose buffer the output shares.
constexpr TensorSpec kOutputs[] = {
    {"k", kKeys, {kBatch, kKvHeads, kCapacityAndBlock, kHeadSize}},
    {"joined_k_scale", kKeyScales, {kBatch, kKvHeads, kCapacityAndBlock, kGroups}},
    {"joined_k_minimum", kKeyMinima, {kBatch, kKvHeads, kCapacityAndBlock, kGroups}},
    {"v", kValues, {kBatch, kKvHeads, kCapacityAndBlock, kHeadSize}},
    {"joined_v_scale", kValueScales, {kBatch, kKvHeads, kCapacityAndBlock, kGroups}},
    {"joined_v_minimum", kValueMinima, {kBatch, kKvHeads, kCapacityAndBlock, kGroups}},
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
    params.cache_format = call.fields.get("cache_format");
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
    params.k_scale = buffers.inputs[3];
    params.k_minimum = buffers.inputs[4];
    params.v_cache = buffers.inputs[5];
    params.v_scale = buffers.inputs[6];
    params.v_minimum = buffers.inputs[7];
    params.cache_lengths = static_cast<const int64_t*>(buffers.inputs[8]);
    params.lengths = static_cast<const int64_t*>(buffers.inputs[9]);
    params.k = buffers.outputs[0];
    params.joined_k_scale = buffers.outputs[1];
    params.joined_k_minimum = buffers.outputs[2];
    params.v = buffers.outputs[3];
    params.joined_v_scale = buffers.outputs[4];
    params.joined_v_minimum = buffers.outputs[5];
    params.joined_lengths = static_cast<int64_t*>(buffers.outputs[6]);
    return kvc_join_block(&params, buffers.workspace, buffers.workspace_bytes, buffers.stream, message);
}

}  // namespace

constinit const Operator kJoinBlock = {"KvcJoinBlock", kFields, kInputs, kOutputs, derive, workspace, launch};

}  // namespace kvc::tensorrt

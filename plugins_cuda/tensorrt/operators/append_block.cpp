// Generated from the operators' schemas (kvc_trt/operators) by `python -m plugins_cuda.generate`; edit those.
// KvcAppendBlock: Store a turn's keys and values behind the entries of a cache.
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
    {"k_cache_out", kKeys, {kBatch, kKvHeads, kCapacity, kHeadSize}, 2},
    {"k_scale_out", kKeyScales, {kBatch, kKvHeads, kCapacity, kGroups}, 3},
    {"k_minimum_out", kKeyMinima, {kBatch, kKvHeads, kCapacity, kGroups}, 4},
    {"v_cache_out", kValues, {kBatch, kKvHeads, kCapacity, kHeadSize}, 5},
    {"v_scale_out", kValueScales, {kBatch, kKvHeads, kCapacity, kGroups}, 6},
    {"v_minimum_out", kValueMinima, {kBatch, kKvHeads, kCapacity, kGroups}, 7},
};

void derive(const Fields&, Sizes&) {}

KvcAppendBlockParams params_of(const Call& call) {
    KvcAppendBlockParams params{};
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
    const KvcAppendBlockParams params = params_of(call);
    return kvc_append_block_workspace(&params, bytes, message);
}

KvcStatus launch(const Call& call, const Buffers& buffers, KvcMessage* message) {
    KvcAppendBlockParams params = params_of(call);
    params.k_new = buffers.inputs[0];
    params.v_new = buffers.inputs[1];
    params.k_cache = buffers.outputs[0];
    params.k_scale = buffers.outputs[1];
    params.k_minimum = buffers.outputs[2];
    params.v_cache = buffers.outputs[3];
    params.v_scale = buffers.outputs[4];
    params.v_minimum = buffers.outputs[5];
    params.cache_lengths = static_cast<const int64_t*>(buffers.inputs[8]);
    params.lengths = static_cast<const int64_t*>(buffers.inputs[9]);
    return kvc_append_block(&params, buffers.workspace, buffers.workspace_bytes, buffers.stream, message);
}

}  // namespace

constinit const Operator kAppendBlock = {"KvcAppendBlock", kFields, kInputs, kOutputs, derive, workspace, launch};

}  // namespace kvc::tensorrt

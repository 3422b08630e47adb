// Generated from the operators' schemas (kvc_trt/operators) by `python -m plugins_cuda.generate`; edit those.
// KvcReplaceCache: Overwrite a cache and the positions of its slots.
// The operator's tables, and the conversion of its calls into calls of the C ABI.

#include "kvc/kvc.h"
#include "tensorrt/operators.h"

namespace kvc::tensorrt {
namespace {

using enum Dim;
using enum Element;

constexpr std::span<const FieldSpec> kFields;

constexpr TensorSpec kInputs[] = {
    {"k_cache", kCache, {kBatch, kKvHeads, kCapacity, kHeadSize}},
    {"v_cache", kCache, {kBatch, kKvHeads, kCapacity, kHeadSize}},
    {"slot_positions", kInt32, {kBatch, kKvHeads, kCapacity}},
    {"k_kept", kCache, {kBatch, kKvHeads, kCapacity, kHeadSize}},
    {"v_kept", kCache, {kBatch, kKvHeads, kCapacity, kHeadSize}},
    {"positions_kept", kInt32, {kBatch, kKvHeads, kCapacity}},
};

// The number after a shape is the input whose buffer the output shares.
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

}  // namespace

constinit const Operator kReplaceCache = {"KvcReplaceCache", kFields, kInputs, kOutputs, derive, workspace, launch};

}  // namespace kvc::tensorrt

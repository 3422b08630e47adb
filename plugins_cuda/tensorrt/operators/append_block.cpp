// Generated from the operators' schemas (kvc_trt/operators) by `python -m plugins_cuda.generate`; edit those.
// KvcAppendBlock: Store a turn's keys and values behind the entries of a cache.
// The operator's tables, and the conversion of its calls into calls of the C ABI.

#include "kvc/kvc.h"
#include "tensorrt/operators.h"

namespace kvc::tensorrt {
namespace {

using enum Dim;
using enum Element;

constexpr std::span<const FieldSpec> kFields;

constexpr TensorSpec kInputs[] = {
    {"k_new", kCache, {kBatch, kKvHeads, kBlock, kHeadSize}},
    {"v_new", kCache, {kBatch, kKvHeads, kBlock, kHeadSize}},
    {"k_cache", kCache, {kBatch, kKvHeads, kCapacity, kHeadSize}},
    {"v_cache", kCache, {kBatch, kKvHeads, kCapacity, kHeadSize}},
    {"cache_lengths", kInt64, {kBatch}},
    {"lengths", kInt64, {kBatch}},
};

// The number after a shape is the input whose buffer the output shares.
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

}  // namespace

constinit const Operator kAppendBlock = {"KvcAppendBlock", kFields, kInputs, kOutputs, derive, workspace, launch};

}  // namespace kvc::tensorrt

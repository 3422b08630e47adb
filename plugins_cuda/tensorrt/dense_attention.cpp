// KvcDenseAttention as a plugin: one decode step of one layer that reads its whole cache (kvc/attention.h).
#include "kvc/attention.h"
#include "tensorrt/plugin.h"

namespace kvc::tensorrt {
namespace {

using enum Dim;
using enum Element;

// dense_until chooses between two ways to read the cache in the ONNX body; the kernel has one that serves both.
constexpr FieldSpec kFields[] = {
    {"dense_until", 0, INT32_MAX},
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

void check(const Fields&) {}

void derive(const Fields&, Sizes&) {}

KvcDenseAttentionParams params_of(const Call& call) {
    const Sizes& sizes = call.sizes;
    KvcDenseAttentionParams params{};
    params.struct_bytes = sizeof params;
    params.dtype = call.dtype;
    params.batch = sizes.get(kBatch);
    params.heads = sizes.get(kHeads);
    params.kv_heads = sizes.get(kKvHeads);
    params.head_size = sizes.get(kHeadSize);
    params.capacity = sizes.get(kCapacity);
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
    params.cache_lengths = static_cast<const int64_t*>(buffers.inputs[5]);
    params.output = buffers.outputs[0];
    params.k_cache = buffers.outputs[1];
    params.v_cache = buffers.outputs[2];
    return kvc_dense_attention(&params, buffers.workspace, buffers.workspace_bytes, buffers.stream, message);
}

}  // namespace

const Operator kDenseAttention{"KvcDenseAttention", kFields, kInputs, kOutputs, check, derive, workspace, launch};

}  // namespace kvc::tensorrt

// KvcCompact as a plugin: keeps the part of a prompt's cache that its last queries look at (kvc/compact.h).
#include "kvc/compact.h"
#include "kvc/limits.h"

#include "tensorrt/plugin.h"
#include "tensorrt/report.h"

namespace kvc::tensorrt {
namespace {

using enum Dim;
using enum Element;

constexpr FieldSpec kFields[] = {
    {"prompt_budget", 1, KVC_MOST_TOKENS},
    {"capacity", 1, KVC_MOST_TOKENS},
    {"pool_kernel", 1, KVC_LARGEST_POOL_KERNEL},
    {"page_size", 1, INT32_MAX},
};

constexpr TensorSpec kInputs[] = {
    {"q_window", kCache, {kBatch, kHeads, kWindow, kHeadSize}},
    {"k", kCache, {kBatch, kKvHeads, kPrompt, kHeadSize}},
    {"v", kCache, {kBatch, kKvHeads, kPrompt, kHeadSize}},
    {"prompt_lengths", kInt64, {kBatch}},
};

constexpr TensorSpec kOutputs[] = {
    {"k_cache", kCache, {kBatch, kKvHeads, kCapacity, kHeadSize}},
    {"v_cache", kCache, {kBatch, kKvHeads, kCapacity, kHeadSize}},
    {"bounds", kCache, {kBatch, kKvHeads, kBoundRows, kPages}},
    {"cache_lengths", kInt64, {kBatch}},
    {"indices", kInt32, {kBatch, kKvHeads, kCapacity}},
};

void check(const Fields& fields) {
    if (fields.get("pool_kernel") % 2 == 0) {
        refuse("field pool_kernel: expected an odd number, found %d", fields.get("pool_kernel"));
    }
    if (fields.get("prompt_budget") > fields.get("capacity")) {
        refuse("field prompt_budget: expected at most the capacity of %d, found %d", fields.get("capacity"),
               fields.get("prompt_budget"));
    }
}

void derive(const Fields& fields, Sizes& sizes) {
    const int64_t page_size = fields.get("page_size");
    sizes.fix(kCapacity, fields.get("capacity"), "field capacity");
    sizes.fix(kPages, (sizes.get(kCapacity) + page_size - 1) / page_size, "field page_size");
    if (sizes.known(kHeadSize)) sizes.fix(kBoundRows, int64_t{2} * sizes.get(kHeadSize), "bounds");
}

KvcCompactParams params_of(const Call& call) {
    const Fields& fields = call.fields;
    const Sizes& sizes = call.sizes;
    KvcCompactParams params{};
    params.struct_bytes = sizeof params;
    params.dtype = call.dtype;
    params.batch = sizes.get(kBatch);
    params.heads = sizes.get(kHeads);
    params.kv_heads = sizes.get(kKvHeads);
    params.head_size = sizes.get(kHeadSize);
    params.window = sizes.get(kWindow);
    params.pool_kernel = fields.get("pool_kernel");
    params.page_size = fields.get("page_size");
    params.prompt_length = sizes.get(kPrompt);
    params.prompt_budget = fields.get("prompt_budget");
    params.capacity = sizes.get(kCapacity);
    // Unsigned: sizes for which a product does not fit are refused by the C ABI, not by an overflow here.
    const uint64_t head_elements = uint64_t(params.head_size) * uint64_t(params.prompt_length);
    params.kv_stride_token = params.head_size;
    params.kv_stride_head = static_cast<int64_t>(head_elements);
    params.kv_stride_batch = static_cast<int64_t>(head_elements * uint64_t(params.kv_heads));
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

}  // namespace

const Operator kCompact{"KvcCompact", kFields, kInputs, kOutputs, check, derive, workspace, launch};

}  // namespace kvc::tensorrt

// Generated from the operators' schemas (kvc_trt/operators) by `python -m plugins_cuda.generate`; edit those.
// KvcRaiseBounds: Let the bounds of the pages cover a turn's keys.
// The operator's tables, and the conversion of its calls into calls of the C ABI.

#include "kvc/kvc.h"
#include "tensorrt/operators.h"

namespace kvc::tensorrt {
namespace {

using enum Dim;
using enum Element;

constexpr FieldSpec kFields[] = {
    {.name = "page_size", .minimum = 1, .maximum = INT32_MAX},
    {.name = "fp8_bounds", .minimum = 0, .maximum = 1},
    {.name = "cache_format", .minimum = 0, .maximum = 4, .optional = true},
};

constexpr TensorSpec kInputs[] = {
    {"k_new", kCache, {kBatch, kKvHeads, kBlock, kHeadSize}},
    {"bounds", kBound, {kBatch, kKvHeads, kTwiceHeadSize, kPages}},
    {"cache_lengths", kInt64, {kBatch}},
    {"lengths", kInt64, {kBatch}},
};

// The number after a shape is the input whose buffer the output shares.
constexpr TensorSpec kOutputs[] = {
    {"bounds_out", kBound, {kBatch, kKvHeads, kTwiceHeadSize, kPages}, 1},
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
    params.fp8_bounds = call.fields.get("fp8_bounds");
    params.cache_format = call.fields.get("cache_format");
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

}  // namespace

constinit const Operator kRaiseBounds = {"KvcRaiseBounds", kFields, kInputs, kOutputs, derive, workspace, launch};

}  // namespace kvc::tensorrt

// Generated from the operators' schemas (kvc_trt/operators) by `python -m plugins_cuda.generate`; edit those.
// KvcReplaceBounds: Overwrite the bounds of a cache's pages.
// The operator's tables, and the conversion of its calls into calls of the C ABI.

#include "kvc/kvc.h"
#include "tensorrt/operators.h"

namespace kvc::tensorrt {
namespace {

using enum Dim;
using enum Element;

constexpr FieldSpec kFields[] = {
    {.name = "fp8_bounds", .minimum = 0, .maximum = 1},
};

constexpr TensorSpec kInputs[] = {
    {"bounds", kBound, {kBatch, kKvHeads, kTwiceHeadSize, kPages}},
    {"bounds_kept", kBound, {kBatch, kKvHeads, kTwiceHeadSize, kPages}},
};

// The number after a shape is the input whose buffer the output shares.
constexpr TensorSpec kOutputs[] = {
    {"bounds_out", kBound, {kBatch, kKvHeads, kTwiceHeadSize, kPages}, 0},
};

void derive(const Fields&, Sizes&) {}

KvcReplaceBoundsParams params_of(const Call& call) {
    KvcReplaceBoundsParams params{};
    params.struct_bytes = sizeof params;
    params.dtype = call.dtype;
    params.batch = call.sizes.get(kBatch);
    params.kv_heads = call.sizes.get(kKvHeads);
    params.channels = call.sizes.get(kTwiceHeadSize);
    params.fp8_bounds = call.fields.get("fp8_bounds");
    params.pages = call.sizes.get(kPages);
    return params;
}

KvcStatus workspace(const Call& call, uint64_t* bytes, KvcMessage* message) {
    const KvcReplaceBoundsParams params = params_of(call);
    return kvc_replace_bounds_workspace(&params, bytes, message);
}

KvcStatus launch(const Call& call, const Buffers& buffers, KvcMessage* message) {
    KvcReplaceBoundsParams params = params_of(call);
    params.bounds = buffers.outputs[0];
    params.bounds_kept = buffers.inputs[1];
    return kvc_replace_bounds(&params, buffers.workspace, buffers.workspace_bytes, buffers.stream, message);
}

}  // namespace

constinit const Operator kReplaceBounds = {"KvcReplaceBounds", kFields, kInputs, kOutputs, derive, workspace, launch};

}  // namespace kvc::tensorrt

#include "tensorrt/plugin.h"

#include "tensorrt/report.h"

namespace kvc::tensorrt {

using nvinfer1::DataType;
using nvinfer1::DimsExprs;
using nvinfer1::DynamicPluginTensorDesc;
using nvinfer1::IExprBuilder;
using nvinfer1::IPluginCapability;
using nvinfer1::IPluginV3;
using nvinfer1::PluginCapabilityType;
using nvinfer1::PluginFieldCollection;
using nvinfer1::PluginFieldType;
using nvinfer1::PluginTensorDesc;
using nvinfer1::TensorFormat;
using nvinfer1::TensorRTPhase;

namespace {

constexpr int32_t kDone = 0;
constexpr int32_t kFailed = -1;

/// The answer of getWorkspaceSize in place of an error, which it cannot return: more than any GPU has, so that TensorRT
/// makes no engine whose workspace would be too small.
constexpr size_t kImpossibleWorkspace = size_t{1} << 62;

}  // namespace

Plugin::Plugin(const Operator& op, const Fields& fields) : operator_{op}, fields_{fields}, signature_{op, fields} {}

IPluginCapability* Plugin::getCapabilityInterface(PluginCapabilityType type) noexcept {
    switch (type) {
        case PluginCapabilityType::kCORE: return static_cast<nvinfer1::IPluginV3OneCore*>(this);
        case PluginCapabilityType::kBUILD: return static_cast<nvinfer1::IPluginV3OneBuildV2*>(this);
        case PluginCapabilityType::kRUNTIME: return static_cast<nvinfer1::IPluginV3OneRuntime*>(this);
    }
    return nullptr;
}

IPluginV3* Plugin::clone() noexcept {
    return guarded<IPluginV3*>(operator_.name, nullptr, [&] {
        auto* made = new Plugin(operator_, fields_);
        made->cache_type_ = cache_type_;
        return made;
    });
}

int32_t Plugin::getOutputDataTypes(DataType* output_types, int32_t outputs, const DataType* input_types,
                                   int32_t inputs) const noexcept {
    return guarded(operator_.name, kFailed, [&] {
        check_counts(inputs, outputs);
        const Types types = types_of(input_types[0]);
        dtype_of(types.cache);
        for (size_t i = 0; i < given_inputs().size(); ++i) {
            const DataType expected = type_of(given_inputs()[i], types);
            if (input_types[i] == expected) continue;
            refuse("%s: expected DataType %d, found %d", given_inputs()[i].name, static_cast<int>(expected),
                   static_cast<int>(input_types[i]));
        }
        for (size_t i = 0; i < given_outputs().size(); ++i) {
            output_types[i] = type_of(given_outputs()[i], types);
        }
        cache_type_ = types.cache;
        return kDone;
    });
}

int32_t Plugin::getOutputShapes(const DimsExprs* input_shapes, int32_t inputs, const DimsExprs*, int32_t shape_inputs,
                                DimsExprs* output_shapes, int32_t outputs, IExprBuilder& builder) noexcept {
    return guarded(operator_.name, kFailed, [&] {
        check_counts(inputs, outputs);
        if (shape_inputs != 0) refuse("expected no shape inputs, found %d", static_cast<int>(shape_inputs));
        SymbolExprs exprs{};
        Sizes sizes;
        if (cache_type_) sizes.fix(Dim::kBytesPerElement, element_bytes_of(*cache_type_), "type of the cache");
        for (size_t i = 0; i < given_inputs().size(); ++i) bind(given_inputs()[i], input_shapes[i], exprs, sizes);
        derive(sizes);
        for (size_t i = 0; i < given_outputs().size(); ++i) {
            output_shapes[i] = shape_of(given_outputs()[i], exprs, sizes, builder);
        }
        return kDone;
    });
}

bool Plugin::supportsFormatCombination(int32_t position, const DynamicPluginTensorDesc* tensors, int32_t inputs,
                                       int32_t outputs) noexcept {
    if (inputs != static_cast<int32_t>(given_inputs().size()) || outputs != getNbOutputs()) return false;
    if (position < 0 || position >= inputs + outputs) return false;
    const TensorSpec& spec = position < inputs ? given_inputs()[position] : given_outputs()[position - inputs];
    const Types types = types_of(tensors[0].desc.type);
    const PluginTensorDesc& desc = tensors[position].desc;
    return desc.format == TensorFormat::kLINEAR && is_cache_type(types.cache) && desc.type == type_of(spec, types);
}

int32_t Plugin::getAliasedInput(int32_t output) noexcept {
    return output >= 0 && output < getNbOutputs() ? given_outputs()[output].alias : kNotAliased;
}

int32_t Plugin::configurePlugin(const DynamicPluginTensorDesc* in, int32_t inputs, const DynamicPluginTensorDesc*,
                                int32_t outputs) noexcept {
    return guarded(operator_.name, kFailed, [&] {
        check_counts(inputs, outputs);
        workspace_bytes(call_at(in, &DynamicPluginTensorDesc::min));
        workspace_bytes(call_at(in, &DynamicPluginTensorDesc::max));
        return kDone;
    });
}

size_t Plugin::getWorkspaceSize(const DynamicPluginTensorDesc* in, int32_t inputs, const DynamicPluginTensorDesc*,
                                int32_t outputs) const noexcept {
    return guarded(operator_.name, kImpossibleWorkspace, [&]() -> size_t {
        check_counts(inputs, outputs);
        return workspace_bytes(call_at(in, &DynamicPluginTensorDesc::max));
    });
}

int32_t Plugin::onShapeChange(const PluginTensorDesc* in, int32_t inputs, const PluginTensorDesc* out,
                              int32_t outputs) noexcept {
    return guarded(operator_.name, kFailed, [&] {
        check_counts(inputs, outputs);
        workspace_bytes(call_with(in, out));
        return kDone;
    });
}

int32_t Plugin::enqueue(const PluginTensorDesc* in, const PluginTensorDesc* out, const void* const* inputs,
                        void* const* outputs, void* workspace, cudaStream_t stream) noexcept {
    return guarded(operator_.name, kFailed, [&] {
        const Call call = call_with(in, out);
        check_aliases(inputs, outputs);
        const Buffers buffers{signature_.inputs.in_table(inputs), signature_.outputs.in_table(outputs), workspace,
                              workspace_bytes(call), stream};
        KvcMessage message{};
        if (operator_.launch(call, buffers, &message) != KVC_OK) refuse("%s", message.text);
        return kDone;
    });
}

void Plugin::check_counts(int32_t inputs, int32_t outputs) const {
    const int expected_inputs = static_cast<int>(given_inputs().size());
    if (inputs != expected_inputs || outputs != getNbOutputs()) {
        refuse("expected %d inputs and %d outputs, found %d and %d", expected_inputs, static_cast<int>(getNbOutputs()),
               static_cast<int>(inputs), static_cast<int>(outputs));
    }
}

Types Plugin::types_of(DataType first) const {
    // TensorRT's 8-bit floating-point type is E4M3. INT8 carries the codes of E5M2 unchanged, and those of caches in a
    // format: a strongly typed network has no scales to apply, and no layer but these plugins computes with them. Plans
    // are built this way; none was run. TensorRT does not pass the cache's type to an operator of codes or of bounds in
    // 8 bits alone, which does not need it.
    const bool fp8_bounds = fields_.is_set("fp8_bounds");
    const Element told = given_inputs()[0].element;
    const bool tells_the_cache = told == Element::kCache || (told == Element::kBound && !fp8_bounds);
    const DataType cache = tells_the_cache ? first : DataType::kFLOAT;
    return {.cache = cache, .bounds = fp8_bounds ? DataType::kINT8 : cache};
}

Call Plugin::empty_call(const Types& types) const {
    Call call{fields_, {}, dtype_of(types.cache)};
    call.sizes.fix(Dim::kBytesPerElement, element_bytes_of(types.cache), "type of the cache");
    return call;
}

Call Plugin::call_at(const DynamicPluginTensorDesc* in, ProfileEnd end) const {
    const Types types = types_of(in[0].desc.type);
    Call call = empty_call(types);
    for (size_t i = 0; i < given_inputs().size(); ++i) {
        check_type(given_inputs()[i], in[i].desc, types);
        bind(given_inputs()[i], in[i].*end, call.sizes);
    }
    derive(call.sizes);
    return call;
}

Call Plugin::call_with(const PluginTensorDesc* in, const PluginTensorDesc* out) const {
    const Types types = types_of(in[0].type);
    Call call = empty_call(types);
    for (size_t i = 0; i < given_inputs().size(); ++i) {
        check_type(given_inputs()[i], in[i], types);
        bind(given_inputs()[i], in[i].dims, call.sizes);
    }
    derive(call.sizes);
    for (size_t i = 0; i < given_outputs().size(); ++i) {
        check_type(given_outputs()[i], out[i], types);
        bind(given_outputs()[i], out[i].dims, call.sizes);
    }
    return call;
}

void Plugin::derive(Sizes& sizes) const {
    signature_.derive_head_size(sizes);
    operator_.derive(fields_, sizes);
    signature_.derive_widths(sizes);
}

uint64_t Plugin::workspace_bytes(const Call& call) const {
    uint64_t bytes = 0;
    KvcMessage message{};
    if (operator_.workspace(call, &bytes, &message) != KVC_OK) refuse("%s", message.text);
    return bytes;
}

void Plugin::check_aliases(const void* const* inputs, void* const* outputs) const {
    for (size_t i = 0; i < given_outputs().size(); ++i) {
        const int32_t alias = given_outputs()[i].alias;
        if (alias == kNotAliased || outputs[i] == inputs[alias]) continue;
        refuse("%s: expected the buffer of %s (engines are built with kALIASED_PLUGIN_IO_10_03), found another one",
               given_outputs()[i].name, given_inputs()[alias].name);
    }
}

Creator::Creator(const Operator& op) : operator_{op} {
    for (size_t i = 0; i < op.fields.size(); ++i) fields_[i] = {op.fields[i].name, nullptr, PluginFieldType::kINT32, 1};
    names_ = {static_cast<int32_t>(op.fields.size()), fields_.data()};
}

IPluginV3* Creator::createPlugin(const char*, const PluginFieldCollection* fields, TensorRTPhase) noexcept {
    return guarded<IPluginV3*>(operator_.name, nullptr, [&] {
        if (kvc_abi_version() != KVC_ABI_VERSION) {
            refuse("expected kernels of ABI %d, found %d: build both from one source", KVC_ABI_VERSION,
                   static_cast<int>(kvc_abi_version()));
        }
        return new Plugin(operator_, Fields(operator_.fields, fields));
    });
}

}  // namespace kvc::tensorrt

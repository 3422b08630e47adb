// TensorRT's questions to a plugin before it runs, asked by Python through ctypes, for comparison with the twin's.
#include <algorithm>

#include "fake_builder.h"
#include "library.h"

namespace {

struct RawField {
    const char* name;
    int32_t type;
    int32_t length;
    const void* data;
};

/// A tensor at both ends of a profile; only `min` counts in a step.
struct RawTensor {
    int32_t type;
    int32_t format;
    int32_t rank;
    int64_t min[8];
    int64_t max[8];
};

Dims dims_of(int32_t rank, const int64_t (&sizes)[8]) {
    Dims dims{};
    dims.nbDims = rank;
    std::copy_n(sizes, std::clamp(rank, 0, 8), dims.d);
    return dims;
}

PluginTensorDesc step_of(const RawTensor& raw) {
    return {dims_of(raw.rank, raw.min), static_cast<DataType>(raw.type), static_cast<TensorFormat>(raw.format), 1.0F};
}

DynamicPluginTensorDesc range_of(const RawTensor& raw) {
    const Dims low = dims_of(raw.rank, raw.min), high = dims_of(raw.rank, raw.max);
    Dims open = low;
    for (int32_t axis = 0; axis < raw.rank; ++axis) open.d[axis] = low.d[axis] == high.d[axis] ? low.d[axis] : -1;
    PluginTensorDesc desc = step_of(raw);
    desc.dims = open;
    return {desc, low, high, open};  // TensorRT asks while the optimum is unknown
}

template <class Desc>
std::vector<Desc> all(const RawTensor* raw, int32_t count, Desc (*make)(const RawTensor&)) {
    std::vector<Desc> described;
    for (int32_t i = 0; i < count; ++i) described.push_back(make(raw[i]));
    return described;
}

}  // namespace

#define QUESTION extern "C" __attribute__((visibility("default")))

QUESTION Library* kvc_test_open(const char* path) { return new Library(path); }

QUESTION const char* kvc_test_reason(Library* library) {
    return library->symbol<const char* (*)()>("kvc_plugin_last_error")();
}

/// Null where the creator makes no plugin.
QUESTION Made* kvc_test_make(Library* library, const char* name, const RawField* raw, int32_t count) {
    std::vector<PluginField> fields;
    for (int32_t i = 0; i < count; ++i) {
        fields.emplace_back(raw[i].name, raw[i].data, static_cast<PluginFieldType>(raw[i].type), raw[i].length);
    }
    auto made = std::make_unique<Made>(make(library->creator(name), fields));
    return *made ? made.release() : nullptr;
}

QUESTION void kvc_test_drop(Made* made) { delete made; }

QUESTION int32_t kvc_test_serialised(Made* made, char* text, size_t bytes) {
    const PluginFieldCollection* fields = made->runtime()->getFieldsToSerialize();
    std::string all;
    for (int32_t i = 0; i < fields->nbFields; ++i) {
        const PluginField& field = fields->fields[i];
        if (field.type != PluginFieldType::kINT32 || field.length != 1) return -1;
        all += std::string(field.name) + "=" + std::to_string(*static_cast<const int32_t*>(field.data)) + " ";
    }
    return std::snprintf(text, bytes, "%s", all.c_str());
}

QUESTION int32_t kvc_test_output_types(Made* made, const int32_t* types, int32_t inputs, int32_t* found,
                                       int32_t outputs) {
    std::vector<DataType> in, out(static_cast<size_t>(outputs));
    for (int32_t i = 0; i < inputs; ++i) in.push_back(static_cast<DataType>(types[i]));
    const int32_t status = made->build()->getOutputDataTypes(out.data(), outputs, in.data(), inputs);
    std::transform(out.begin(), out.end(), found, [](DataType type) { return static_cast<int32_t>(type); });
    return status;
}

/// Shapes as text: "B 4 16"; those of the outputs one a line.
QUESTION int32_t kvc_test_output_shapes(Made* made, const char* const* shapes, int32_t inputs, int32_t outputs,
                                        char* text, size_t bytes) {
    fake::Builder builder;
    std::vector<nvinfer1::DimsExprs> in, out(static_cast<size_t>(outputs));
    for (int32_t i = 0; i < inputs; ++i) in.push_back(builder.shape(shapes[i]));
    const int32_t status = made->build()->getOutputShapes(in.data(), inputs, nullptr, 0, out.data(), outputs, builder);
    if (status != 0) return status;
    std::string all;
    for (const nvinfer1::DimsExprs& shape : out) all += fake::Builder::text(shape) + "\n";
    std::snprintf(text, bytes, "%s", all.c_str());
    return 0;
}

QUESTION int32_t kvc_test_aliased(Made* made, int32_t output) { return made->build()->getAliasedInput(output); }

QUESTION int32_t kvc_test_supports(Made* made, int32_t position, const RawTensor* raw, int32_t inputs,
                                   int32_t outputs) {
    const auto tensors = all(raw, inputs + outputs, range_of);
    return made->build()->supportsFormatCombination(position, tensors.data(), inputs, outputs);
}

QUESTION int32_t kvc_test_configure(Made* made, const RawTensor* raw, int32_t inputs, int32_t outputs) {
    const auto tensors = all(raw, inputs + outputs, range_of);
    return made->build()->configurePlugin(tensors.data(), inputs, tensors.data() + inputs, outputs);
}

QUESTION uint64_t kvc_test_workspace(Made* made, const RawTensor* raw, int32_t inputs, int32_t outputs) {
    const auto tensors = all(raw, inputs + outputs, range_of);
    return made->build()->getWorkspaceSize(tensors.data(), inputs, tensors.data() + inputs, outputs);
}

QUESTION int32_t kvc_test_change(Made* made, const RawTensor* raw, int32_t inputs, int32_t outputs) {
    const auto tensors = all(raw, inputs + outputs, step_of);
    return made->runtime()->onShapeChange(tensors.data(), inputs, tensors.data() + inputs, outputs);
}

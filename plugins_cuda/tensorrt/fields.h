// The attributes of a plugin: a table per operator lists them, and values from outside are checked against it.
//
// An engine file and a network are hostile input. Every attribute of these operators is an INT in ONNX; TensorRT passes
// it as one kINT32. Each attribute must be there exactly once, an optional one at most once, and nothing else.
#pragma once

#include <NvInferRuntime.h>

#include <array>
#include <cstdint>
#include <span>

#include "tensorrt/dimensions.h"

namespace kvc::tensorrt {

/// One attribute: its name on the ONNX node, and the values that can be served (both ends included).
struct FieldSpec {
    const char* name;
    int32_t minimum;
    int32_t maximum;
    bool optional = false;  ///< a node without it means 0
    bool odd = false;
    const char* at_most = nullptr;  ///< another attribute that it may not exceed
};

class Fields {
public:
    /// Throws Refusal with the field, the expected and the found value.
    Fields(std::span<const FieldSpec> specs, const nvinfer1::PluginFieldCollection* collection);

    int32_t get(const char* name) const;
    /// True if the operator has this attribute and it is not 0.
    bool is_set(const char* name) const;

    /// The same fields as a collection that points into this object.
    const nvinfer1::PluginFieldCollection* serialise() noexcept;

private:
    /// Throws Refusal for an even value where an odd one is needed, and for one above the attribute that limits it.
    void check_together() const;

    std::span<const FieldSpec> specs_;
    std::array<int32_t, kMaxFields> values_{};
    std::array<nvinfer1::PluginField, kMaxFields> serialised_{};
    nvinfer1::PluginFieldCollection collection_{};
};

}  // namespace kvc::tensorrt

// The part that all operators share: an IPluginV3 and its creator, driven by the tables of an Operator.
//
// Stateless beyond the attributes and the type of the cache: output shapes depend on that type, and TensorRT passes it
// only with the types. All else follows from the tensor descriptions that TensorRT passes with a call, so clones,
// contexts and profiles cannot disagree. Nothing is allocated between deserialisation and the last step.
#pragma once

#include <NvInferRuntime.h>

#include <array>
#include <optional>
#include <span>

#include "kvc/types.h"
#include "tensorrt/fields.h"
#include "tensorrt/shapes.h"
#include "tensorrt/signature.h"

namespace kvc::tensorrt {

/// One call: everything that the C ABI needs besides addresses.
struct Call {
    const Fields& fields;
    Sizes sizes;
    KvcDtype dtype;
};

/// Addresses of one call, in the order of the operator's tables; null for tensors that the call does not have.
struct Buffers {
    std::array<const void*, kMaxTensors> inputs;
    std::array<void*, kMaxTensors> outputs;
    void* workspace;
    uint64_t workspace_bytes;
    void* stream;
};

/// The properties in which plugins differ.
struct Operator {
    const char* name;
    std::span<const FieldSpec> fields;
    std::span<const TensorSpec> inputs;   ///< in all formats
    std::span<const TensorSpec> outputs;  ///< an alias is the place of an input in that table
    /// Adds the sizes that follow from attributes and from other sizes, where these are known.
    void (*derive)(const Fields& fields, Sizes& sizes);
    KvcStatus (*workspace)(const Call& call, uint64_t* bytes, KvcMessage* message);
    KvcStatus (*launch)(const Call& call, const Buffers& buffers, KvcMessage* message);
    size_t by_length = 0;  ///< the last inputs, which only nodes have whose attribute of this name is 1
};

class Plugin final : public nvinfer1::IPluginV3,
                     public nvinfer1::IPluginV3OneCore,
                     public nvinfer1::IPluginV3OneBuildV2,
                     public nvinfer1::IPluginV3OneRuntime {
public:
    Plugin(const Operator& op, const Fields& fields);

    nvinfer1::IPluginCapability* getCapabilityInterface(nvinfer1::PluginCapabilityType type) noexcept override;
    nvinfer1::IPluginV3* clone() noexcept override;

    const char* getPluginName() const noexcept override { return operator_.name; }
    const char* getPluginVersion() const noexcept override { return kVersion; }
    const char* getPluginNamespace() const noexcept override { return kNamespace; }

    int32_t getNbOutputs() const noexcept override { return static_cast<int32_t>(given_outputs().size()); }
    int32_t getOutputDataTypes(nvinfer1::DataType* output_types, int32_t outputs, const nvinfer1::DataType* input_types,
                               int32_t inputs) const noexcept override;
    int32_t getOutputShapes(const nvinfer1::DimsExprs* input_shapes, int32_t inputs, const nvinfer1::DimsExprs*,
                            int32_t shape_inputs, nvinfer1::DimsExprs* output_shapes, int32_t outputs,
                            nvinfer1::IExprBuilder& builder) noexcept override;
    bool supportsFormatCombination(int32_t position, const nvinfer1::DynamicPluginTensorDesc* tensors, int32_t inputs,
                                   int32_t outputs) noexcept override;
    int32_t getAliasedInput(int32_t output) noexcept override;
    int32_t configurePlugin(const nvinfer1::DynamicPluginTensorDesc* in, int32_t inputs,
                            const nvinfer1::DynamicPluginTensorDesc* out, int32_t outputs) noexcept override;
    size_t getWorkspaceSize(const nvinfer1::DynamicPluginTensorDesc* in, int32_t inputs,
                            const nvinfer1::DynamicPluginTensorDesc* out, int32_t outputs) const noexcept override;

    int32_t onShapeChange(const nvinfer1::PluginTensorDesc* in, int32_t inputs, const nvinfer1::PluginTensorDesc* out,
                          int32_t outputs) noexcept override;
    int32_t enqueue(const nvinfer1::PluginTensorDesc* in, const nvinfer1::PluginTensorDesc* out,
                    const void* const* inputs, void* const* outputs, void* workspace,
                    cudaStream_t stream) noexcept override;
    nvinfer1::IPluginV3* attachToContext(nvinfer1::IPluginResourceContext*) noexcept override { return clone(); }
    const nvinfer1::PluginFieldCollection* getFieldsToSerialize() noexcept override { return fields_.serialise(); }

private:
    using ProfileEnd = nvinfer1::Dims nvinfer1::DynamicPluginTensorDesc::*;

    std::span<const TensorSpec> given_inputs() const { return signature_.inputs.specs(); }
    std::span<const TensorSpec> given_outputs() const { return signature_.outputs.specs(); }
    void check_counts(int32_t inputs, int32_t outputs) const;
    /// The open types of a call, given that of its first input.
    Types types_of(nvinfer1::DataType first) const;
    /// A call whose only known size is the size of the cache's elements.
    Call empty_call(const Types& types) const;
    /// The call at one end of an optimisation profile; throws Refusal where shapes do not fit together.
    Call call_at(const nvinfer1::DynamicPluginTensorDesc* in, ProfileEnd end) const;
    /// The call with the concrete shapes of its inputs and outputs.
    Call call_with(const nvinfer1::PluginTensorDesc* in, const nvinfer1::PluginTensorDesc* out) const;
    /// Scratch memory of a call; throws Refusal with the C ABI's reason where it refuses the sizes.
    uint64_t workspace_bytes(const Call& call) const;
    void check_aliases(const void* const* inputs, void* const* outputs) const;

    /// Adds the sizes that follow from the attributes, and from the sizes that are known so far.
    void derive(Sizes& sizes) const;

    const Operator& operator_;
    Fields fields_;
    Signature signature_;
    mutable std::optional<nvinfer1::DataType> cache_type_;  ///< of the network that the plugin is part of
};

class Creator final : public nvinfer1::IPluginCreatorV3One {
public:
    explicit Creator(const Operator& op);

    nvinfer1::IPluginV3* createPlugin(const char* name, const nvinfer1::PluginFieldCollection* fields,
                                      nvinfer1::TensorRTPhase phase) noexcept override;
    const nvinfer1::PluginFieldCollection* getFieldNames() noexcept override { return &names_; }
    const char* getPluginName() const noexcept override { return operator_.name; }
    const char* getPluginVersion() const noexcept override { return kVersion; }
    const char* getPluginNamespace() const noexcept override { return kNamespace; }

private:
    const Operator& operator_;
    std::array<nvinfer1::PluginField, kMaxFields> fields_{};
    nvinfer1::PluginFieldCollection names_{};
};

}  // namespace kvc::tensorrt

// One step of a plugin on the caller's memory, as TensorRT would run it: created for an engine, serialised, created again
// at run time, attached to a context, told its shapes, enqueued. Called from Python through ctypes.
#include <algorithm>

#include "library.h"

extern "C" {

struct Argument {
    int32_t type;
    int32_t rank;
    int64_t dims[8];
    void* data;
};

/// The error before enqueue, or damage to the workspace's guard bytes after it.
enum Outcome : int32_t { kNotCreated = 101, kNotConfigured, kShapesRefused, kWorkspaceOverrun };

__attribute__((visibility("default"))) int32_t kvc_test_enqueue(const char* path, const char* name,
                                                                const char* const* fields, const int32_t* values,
                                                                int32_t field_count, const Argument* inputs,
                                                                int32_t input_count, const Argument* outputs,
                                                                int32_t output_count);
}

namespace {

constexpr size_t kGuardBytes = 4096;
constexpr char kGuard = 0x5a;

PluginTensorDesc describe(const Argument& argument) {
    Dims dims{};
    dims.nbDims = argument.rank;
    std::copy_n(argument.dims, argument.rank, dims.d);
    return {dims, static_cast<DataType>(argument.type), TensorFormat::kLINEAR, 1.0F};
}

struct Step {
    std::vector<PluginTensorDesc> in, out;
    std::vector<DynamicPluginTensorDesc> profile_in, profile_out;
    std::vector<const void*> input_data;
    std::vector<void*> output_data;

    Step(const Argument* inputs, int32_t input_count, const Argument* outputs, int32_t output_count) {
        for (int32_t i = 0; i < input_count; ++i) {
            in.push_back(describe(inputs[i]));
            profile_in.push_back({in.back(), in.back().dims, in.back().dims, in.back().dims});
            input_data.push_back(inputs[i].data);
        }
        for (int32_t i = 0; i < output_count; ++i) {
            out.push_back(describe(outputs[i]));
            profile_out.push_back({out.back(), out.back().dims, out.back().dims, out.back().dims});
            output_data.push_back(outputs[i].data);
        }
    }
};

int32_t run(IPluginV3OneRuntime* runtime, Step& step, size_t workspace_bytes) {
    const int32_t inputs = static_cast<int32_t>(step.in.size()), outputs = static_cast<int32_t>(step.out.size());
    if (runtime->onShapeChange(step.in.data(), inputs, step.out.data(), outputs) != 0) return kShapesRefused;
    void* workspace = nullptr;
    if (posix_memalign(&workspace, 256, workspace_bytes + kGuardBytes) != 0) return kWorkspaceOverrun;
    std::memset(workspace, kGuard, workspace_bytes + kGuardBytes);
    const int32_t status = runtime->enqueue(step.in.data(), step.out.data(), step.input_data.data(),
                                            step.output_data.data(), workspace, nullptr);
    const char* guard = static_cast<const char*>(workspace) + workspace_bytes;
    const bool intact = std::all_of(guard, guard + kGuardBytes, [](char byte) { return byte == kGuard; });
    std::free(workspace);
    return intact ? status : static_cast<int32_t>(kWorkspaceOverrun);
}

}  // namespace

int32_t kvc_test_enqueue(const char* path, const char* name, const char* const* fields, const int32_t* values,
                         int32_t field_count, const Argument* inputs, int32_t input_count, const Argument* outputs,
                         int32_t output_count) {
    const Library library(path);
    IPluginCreatorV3One* creator = library.creator(name);
    Values named;
    for (int32_t i = 0; i < field_count; ++i) named.push_back({fields[i], values[i]});
    const Made built = make(creator, named);
    if (!built) return kNotCreated;
    Step step(inputs, input_count, outputs, output_count);
    if (built.build()->configurePlugin(step.profile_in.data(), input_count, step.profile_out.data(), output_count) !=
        0) {
        return kNotConfigured;
    }
    const size_t workspace_bytes =
        built.build()->getWorkspaceSize(step.profile_in.data(), input_count, step.profile_out.data(), output_count);
    const PluginFieldCollection* serialised = built.runtime()->getFieldsToSerialize();
    const Made loaded(creator->createPlugin(name, serialised, TensorRTPhase::kRUNTIME));
    if (!loaded) return kNotCreated;
    const Made attached(loaded.runtime()->attachToContext(nullptr));
    return run(attached.runtime(), step, workspace_bytes);
}

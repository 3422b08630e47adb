// Sizes: optimisation profiles, workspace, the shapes and the memory of one step.
#include "check.h"
#include "operators.h"

/// The answer of configurePlugin for a profile of these inputs.
static int32_t configure(const Made& made, const Example& example, Range batch, Range prompt) {
    const auto in = profile(example.inputs, batch, prompt), out = profile(example.outputs, batch, prompt);
    return made.build()->configurePlugin(in.data(), static_cast<int32_t>(in.size()), out.data(),
                                         static_cast<int32_t>(out.size()));
}

static size_t workspace(const Made& made, const Example& example, Range batch, Range prompt) {
    const auto in = profile(example.inputs, batch, prompt), out = profile(example.outputs, batch, prompt);
    return made.build()->getWorkspaceSize(in.data(), static_cast<int32_t>(in.size()), out.data(),
                                          static_cast<int32_t>(out.size()));
}

TEST(profiles_are_configured) {
    for (const Example& example : examples_of_all_types()) {
        const Made made = make(library, example);
        CHECK_EQUAL(configure(made, example, {1, 32}, {8, 4096}), 0);
        CHECK_EQUAL(configure(made, example, {1, 1}, {1, 1}), 0);
    }
}

TEST(a_profile_with_an_empty_batch_is_refused) {
    for (const Example& example : examples()) {
        const Made made = make(library, example);
        CHECK(configure(made, example, {0, 4}, {8, 4096}) != 0);
        CHECK_REASON("kvc plugin: ", example.name, "batch");
    }
}

TEST(sizes_that_the_kernels_refuse_are_refused_at_configuration) {
    struct Case {
        size_t op, tensor;
        const char *field, *shape, *reason;
        int32_t value;
    };
    for (const Case& wrong :
         {Case{1, 0, "top_r", "B 4 16", "top_r", 17}, Case{1, 0, "top_k", "B 4 16", "top_k", 59},
          Case{1, 0, "top_k", "B 3 16", "heads", 16}, Case{2, 0, "dense_until", "B 34 16", "heads", 1},
          Case{0, 0, "prompt_budget", "B 4 51 16", "window", 50}}) {
        Example example = examples()[wrong.op];
        for (NamedValue& value : example.values) {
            if (value.name == std::string(wrong.field)) value.value = wrong.value;
        }
        example.inputs[wrong.tensor].shape = wrong.shape;
        const Made made = make(library, example);
        CHECK(made);
        CHECK(configure(made, example, {1, 4}, {64, 128}) != 0);
        CHECK_REASON("kvc plugin: ", example.name, wrong.reason);
        CHECK(workspace(made, example, {1, 4}, {64, 128}) >= size_t{1} << 60);
    }
}

TEST(a_profile_of_a_wrong_type_is_refused) {
    const Example example = examples()[1];
    const Made made = make(library, example);
    auto in = profile(example.inputs, {1, 4}, {1, 1}), out = profile(example.outputs, {1, 4}, {1, 1});
    in[3].desc.type = DataType::kFLOAT;
    CHECK(made.build()->configurePlugin(in.data(), 7, out.data(), 5) != 0);
    CHECK_REASON("k_cache: expected DataType 1 in linear format, found DataType 0 in format 0");
    CHECK(made.build()->configurePlugin(in.data(), 6, out.data(), 5) != 0);
    CHECK_REASON("expected 7 inputs and 5 outputs, found 6 and 5");
}

TEST(workspace_is_declared_for_the_largest_sizes) {
    for (const Example& example : examples_of_all_types()) {
        const Made made = make(library, example);
        const size_t largest = workspace(made, example, {1, 32}, {1, 4096});
        CHECK(largest < size_t{1} << 40);
        CHECK_EQUAL(largest, workspace(made, example, {32, 32}, {4096, 4096}));
        CHECK_EQUAL(largest > 0, example.scratch);
        for (const int64_t batch : {1, 2, 31, 32}) {
            for (const int64_t prompt : {1, 49, 50, 51, 64, 1000, 4095}) {
                CHECK(workspace(made, example, {1, batch}, {1, prompt}) <= largest);
            }
        }
    }
}

TEST(shapes_of_a_step_are_checked) {
    for (const Example& example : examples()) {
        const Made made = make(library, example);
        const auto ask = [&](const std::vector<PluginTensorDesc>& in, const std::vector<PluginTensorDesc>& out) {
            return made.runtime()->onShapeChange(in.data(), static_cast<int32_t>(in.size()), out.data(),
                                                 static_cast<int32_t>(out.size()));
        };
        const auto in = descriptions(example.inputs, 3, 100), out = descriptions(example.outputs, 3, 100);
        CHECK_EQUAL(ask(in, out), 0);
        for (size_t tensor = 0; tensor < in.size() + out.size(); ++tensor) {
            auto wrong_in = in, wrong_out = out;
            PluginTensorDesc& wrong = tensor < in.size() ? wrong_in[tensor] : wrong_out[tensor - in.size()];
            const PluginTensorDesc right = wrong;
            const Tensor& described = tensor < in.size() ? example.inputs[tensor] : example.outputs[tensor - in.size()];
            for (int32_t axis = 0; axis < right.dims.nbDims; ++axis) {
                for (const int64_t size : {int64_t{-1}, int64_t{1029}, int64_t{1} << 40, INT64_MIN, INT64_MAX}) {
                    if (size == 1029 && is_free(example, described, axis)) continue;
                    wrong.dims.d[axis] = size;
                    CHECK(ask(wrong_in, wrong_out) != 0);
                    wrong = right;
                }
            }
            for (const int32_t rank : {-1, 0, right.dims.nbDims - 1, right.dims.nbDims + 1, INT32_MAX}) {
                wrong.dims.nbDims = rank;
                CHECK(ask(wrong_in, wrong_out) != 0);
                wrong = right;
            }
            wrong.format = TensorFormat::kCHW32;
            CHECK(ask(wrong_in, wrong_out) != 0);
        }
    }
}

/// Calls enqueue with these buffers; everything else is right.
static int32_t enqueue(const Made& made, const Example& example, const std::vector<const void*>& inputs,
                       const std::vector<void*>& outputs) {
    const auto in = descriptions(example.inputs, 3, 100), out = descriptions(example.outputs, 3, 100);
    std::vector<char> scratch(1 << 20);
    return made.runtime()->enqueue(in.data(), out.data(), inputs.data(), outputs.data(), scratch.data(), nullptr);
}

TEST(a_step_without_its_buffers_fails_with_the_reason) {
    for (const Example& example : examples()) {
        const Made made = make(library, example);
        CHECK(enqueue(made, example, std::vector<const void*>(example.inputs.size()),
                      std::vector<void*>(example.outputs.size())) != 0);
        CHECK_REASON("kvc plugin: ", example.name, "null");
    }
}

TEST(a_cache_that_was_copied_is_refused) {
    for (const Example& example : examples()) {
        const Made made = make(library, example);
        for (size_t output = 0; output < example.aliases.size(); ++output) {
            if (example.aliases[output] < 0) continue;
            std::vector<const void*> inputs(example.inputs.size());
            std::vector<void*> outputs(example.outputs.size());
            outputs[output] = &outputs;
            CHECK(enqueue(made, example, inputs, outputs) != 0);
            CHECK_REASON("_out: expected the buffer of ", "kALIASED_PLUGIN_IO_10_03");
        }
    }
}

/// Real addresses on a machine whose driver is absent: an error with a reason, not a crash.
TEST(without_a_driver_a_step_fails_with_the_reason) {
    if (library.executor() != "cuda" || dlopen("libcuda.so.1", RTLD_LAZY) != nullptr) std::exit(kSkipped);
    for (const Example& example : examples()) {
        const Made made = make(library, example);
        std::vector<std::vector<char>> memory(16, std::vector<char>(1 << 20));
        std::vector<const void*> inputs;
        std::vector<void*> outputs;
        for (size_t i = 0; i < example.inputs.size(); ++i) inputs.push_back(memory[i].data());
        for (size_t i = 0; i < example.outputs.size(); ++i) {
            const int32_t alias = example.aliases[i];
            outputs.push_back(memory[alias >= 0 ? static_cast<size_t>(alias) : 8 + i].data());
        }
        CHECK(enqueue(made, example, inputs, outputs) != 0);
        CHECK_REASON("kvc plugin: ", example.name);
    }
}

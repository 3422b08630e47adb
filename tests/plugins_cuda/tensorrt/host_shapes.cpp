// The plugins' identity, and the shapes, types, formats and aliases that they declare while a network is built.
#include <algorithm>

#include "check.h"
#include "fake_builder.h"
#include "operators.h"

TEST(creators_say_who_they_are) {
    CHECK_EQUAL(library.creators.size(), examples().size());
    for (const Example& example : examples()) {
        IPluginCreatorV3One* creator = library.creator(example.name);
        CHECK(creator != nullptr);
        CHECK_EQUAL(std::string(creator->getPluginVersion()), "1");
        CHECK_EQUAL(std::string(creator->getPluginNamespace()), "kvc");
        CHECK_EQUAL(std::string(creator->getInterfaceInfo().kind), "PLUGIN CREATOR_V3ONE");
        const PluginFieldCollection* names = creator->getFieldNames();
        CHECK_EQUAL(static_cast<size_t>(names->nbFields), example.values.size());
        for (int32_t i = 0; i < names->nbFields; ++i) {
            CHECK_EQUAL(std::string(names->fields[i].name), example.values[i].name);
            CHECK(names->fields[i].type == PluginFieldType::kINT32);
            CHECK_EQUAL(names->fields[i].length, 1);
            CHECK(names->fields[i].data == nullptr);
        }
    }
}

TEST(plugins_have_the_three_interfaces) {
    for (const Example& example : examples()) {
        const Made made = make(library, example);
        CHECK(made);
        CHECK_EQUAL(std::string(made.core()->getPluginName()), example.name);
        CHECK_EQUAL(std::string(made.core()->getPluginVersion()), "1");
        CHECK_EQUAL(std::string(made.core()->getPluginNamespace()), "kvc");
        CHECK_EQUAL(std::string(made.build()->getInterfaceInfo().kind), "PLUGIN_V3ONE_BUILD");
        CHECK_EQUAL(made.build()->getInterfaceInfo().major, 2);  // with aliases
        CHECK_EQUAL(std::string(made.runtime()->getInterfaceInfo().kind), "PLUGIN_V3ONE_RUNTIME");
        CHECK(made.plugin->getCapabilityInterface(static_cast<PluginCapabilityType>(9)) == nullptr);
        CHECK_EQUAL(static_cast<size_t>(made.build()->getNbOutputs()), example.outputs.size());
    }
}

/// A plugin that knows its types, as TensorRT tells them before it asks for shapes.
static Made make_typed(const Library& library, const Example& example) {
    Made made = make(library, example);
    std::vector<DataType> in, out(example.outputs.size());
    for (const Tensor& tensor : example.inputs) in.push_back(tensor.type);
    CHECK_EQUAL(made.build()->getOutputDataTypes(out.data(), static_cast<int32_t>(out.size()), in.data(),
                                                 static_cast<int32_t>(in.size())),
                0);
    return made;
}

/// Shapes of the outputs as text, or "refused".
static std::string shapes_of(const Made& made, const std::vector<std::string>& inputs) {
    fake::Builder builder;
    std::vector<nvinfer1::DimsExprs> in, out(static_cast<size_t>(made.build()->getNbOutputs()));
    for (const std::string& shape : inputs) in.push_back(builder.shape(shape));
    const int32_t status = made.build()->getOutputShapes(in.data(), static_cast<int32_t>(in.size()), nullptr, 0,
                                                         out.data(), static_cast<int32_t>(out.size()), builder);
    if (status != 0) return "refused";
    std::string text;
    for (const nvinfer1::DimsExprs& shape : out) text += (text.empty() ? "" : ", ") + fake::Builder::text(shape);
    return text;
}

TEST(output_shapes_follow_from_symbolic_inputs) {
    for (const Example& example : examples_of_all_types()) {
        std::vector<std::string> inputs;
        for (const Tensor& tensor : example.inputs) inputs.push_back(tensor.shape);
        std::string expected;
        for (const Tensor& tensor : example.outputs) expected += (expected.empty() ? "" : ", ") + tensor.shape;
        const Made made = make_typed(library, example);
        CHECK_EQUAL(shapes_of(made, inputs), expected);
        CHECK_EQUAL(shapes_of(Made(made.plugin->clone()), inputs), expected);
    }
}

TEST(pages_are_not_known_before_the_types) {
    CHECK_EQUAL(shapes_of(make(library, examples()[0]), {"B 4 8 16", "B 2 S 16", "B 2 S 16", "B"}), "refused");
    CHECK_REASON("kvc plugin: KvcCompact: ", "bounds: its pages is not known");
}

TEST(a_head_size_that_is_not_known_yet_stays_symbolic) {
    const Made made = make_typed(library, examples()[0]);
    CHECK_EQUAL(shapes_of(made, {"B H W D", "B G S D", "B G S D", "B"}), "B G 58 D, B G 58 D, B G (D*2) 16, B, B G 58");
}

TEST(pages_are_rounded_up) {
    const int32_t cases[][5] = {{1, 1, 1, 8, 16},
                                {1, 7, 1, 8, 16},
                                {58, 1, 58, 64, 64},
                                {65, 1, 65, 72, 80},
                                {48, 3, 16, 16, 16},
                                {57, 3, 19, 24, 32},
                                {58, 3, 20, 24, 32},
                                {59, 3, 20, 24, 32},
                                {1048576, 2147483647, 1, 8, 16},
                                {1048576, 1048575, 2, 8, 16}};
    for (const auto& [capacity, page_size, in_fp32, in_16_bit, in_fp8] : cases) {
        for (Example example : examples_of_all_types()) {
            if (example.name != std::string("KvcCompact") || example.outputs.size() != 5) continue;
            const bool fp8 = example.outputs[2].type == DataType::kINT8;
            example.values = {{"prompt_budget", 1},
                              {"capacity", capacity},
                              {"pool_kernel", 1},
                              {"page_size", page_size},
                              {"fp8_bounds", fp8 ? 1 : 0}};
            const int32_t stored = fp8 ? in_fp8 : example.inputs[0].type == DataType::kFLOAT ? in_fp32 : in_16_bit;
            const std::string slots = std::to_string(capacity), pages = std::to_string(stored);
            CHECK_EQUAL(shapes_of(make_typed(library, example), {"B 4 8 16", "B 2 S 16", "B 2 S 16", "B"}),
                        "B 2 " + slots + " 16, B 2 " + slots + " 16, B 2 32 " + pages + ", B, B 2 " + slots);
        }
    }
}

TEST(codes_of_4_bits_tell_the_head_size) {
    const Made replace = make(library.creator("KvcReplaceCache"), Values{{"cache_format", 3}});
    const std::vector<std::string> right{"B 2 58 32", "B 2 58 2", "B 2 58 2", "B 2 58 32",
                                         "B 2 58 2",  "B 2 58 2", "B 2 58"};
    std::vector<std::string> inputs = right;
    inputs.insert(inputs.end(), right.begin(), right.end());
    CHECK_EQUAL(shapes_of(replace, inputs), "B 2 58 32, B 2 58 2, B 2 58 2, B 2 58 32, B 2 58 2, B 2 58 2, B 2 58");
    for (const size_t number : {1, 2, 4, 5, 8, 9, 11, 12}) inputs[number] = "B 2 58 3";
    CHECK_EQUAL(shapes_of(replace, inputs), "refused");
    CHECK_REASON("kvc plugin: KvcReplaceCache: ", "k_scale: expected groups = 3, found 2");
}

TEST(selected_is_as_wide_as_the_longest_list) {
    IPluginCreatorV3One* creator = library.creator("KvcHybridAttention");
    const int32_t cases[][4] = {
        {40, 32, 24, 40}, {16, 32, 24, 32}, {16, 32, 100, 100}, {1, 0, 0, 1}, {9, 2147483647, 0, 2147483647}};
    for (const auto& [top_k, token_budget, dense_until, width] : cases) {
        const Made made = make(creator, Values{{"page_size", 4},
                                               {"top_r", 6},
                                               {"top_k", top_k},
                                               {"token_budget", token_budget},
                                               {"dense_until", dense_until},
                                               {"fp8_bounds", 0}});
        CHECK_EQUAL(shapes_of(made, {"B 4 16", "B 2 16", "B 2 16", "B 2 58 16", "B 2 58 16", "B 2 32 15", "B"}),
                    "B 4 16, B 2 58 16, B 2 58 16, B 2 32 15, B 2 " + std::to_string(width));
    }
}

TEST(shapes_that_contradict_each_other_are_refused) {
    const Made hybrid = make_typed(library, examples()[1]);
    const std::vector<std::string> good{"B 4 16", "B 2 16", "B 2 16", "B 2 58 16", "B 2 58 16", "B 2 32 16", "B"};
    struct Case {
        size_t input;
        const char* shape;
        const char* reason;
    };
    for (const Case& wrong : {Case{1, "B 2 2 16", "k_new: expected 3 dimensions, found 4"},
                              Case{2, "B 3 16", "v_new: expected kv heads = 2, found 3"},
                              Case{3, "B 2 58 24", "k_cache: expected head size = 16, found 24"},
                              Case{5, "B 2 16 16", "bounds: expected 2 x head size = 16, found 32"},
                              Case{5, "B 2 32 15", "fields page_size, fp8_bounds: expected pages = 15, found 16"},
                              Case{6, "B 1", "cache_lengths: expected 1 dimensions, found 2"},
                              Case{4, "B 2 9999999999 16", "v_cache: expected capacity in 0..2147483647"}}) {
        std::vector<std::string> inputs = good;
        inputs[wrong.input] = wrong.shape;
        CHECK_EQUAL(shapes_of(hybrid, inputs), "refused");
        CHECK_REASON("kvc plugin: KvcHybridAttention: ", wrong.reason);
    }
    std::vector<std::string> too_few = good;
    too_few.pop_back();
    CHECK_EQUAL(shapes_of(hybrid, too_few), "refused");
    CHECK_REASON("expected 7 inputs and 5 outputs, found 6 and 5");
}

TEST(output_types_follow_the_cache) {
    for (const Example& example : examples_of_all_types()) {
        const Made made = make(library, example);
        std::vector<DataType> in, out(example.outputs.size());
        for (const Tensor& tensor : example.inputs) in.push_back(tensor.type);
        const auto ask = [&] {
            return made.build()->getOutputDataTypes(out.data(), static_cast<int32_t>(out.size()), in.data(),
                                                    static_cast<int32_t>(in.size()));
        };
        CHECK_EQUAL(ask(), 0);
        for (size_t i = 0; i < out.size(); ++i) CHECK(out[i] == example.outputs[i].type);
        const auto lengths = std::ranges::find(in, DataType::kINT64);
        if (lengths != in.end()) {
            *lengths = DataType::kINT32;
            CHECK(ask() != 0);
            CHECK_REASON("_lengths: expected DataType 8, found 3");
            *lengths = DataType::kINT64;
        }
        // Codes and bounds in fp8 do not tell the type of the cache.
        const bool tells_the_cache = in[0] != DataType::kINT8;
        in[0] = DataType::kFP8;
        CHECK(ask() != 0);
        CHECK_REASON(tells_the_cache ? "expected float32, float16 or bfloat16" : "expected DataType 2, found 6");
    }
}

TEST(bounds_have_the_type_that_the_attribute_says) {
    for (const bool fp8 : {false, true}) {
        for (const Example& example : examples(DataType::kHALF, fp8)) {
            const Made made = make(library, example);
            std::vector<DataType> in, out(example.outputs.size());
            for (const Tensor& tensor : example.inputs) in.push_back(tensor.type);
            for (size_t i = 0; i < in.size(); ++i) {
                if (!example.inputs[i].shape.starts_with("B 2 32 ")) continue;
                const DataType right = in[i];
                in[i] = fp8 ? DataType::kHALF : DataType::kINT8;
                CHECK(made.build()->getOutputDataTypes(out.data(), static_cast<int32_t>(out.size()), in.data(),
                                                       static_cast<int32_t>(in.size())) != 0);
                CHECK_REASON("kvc plugin: ", example.name, fp8 ? "expected DataType 2, found 1" : "found");
                in[i] = right;
            }
        }
    }
}

TEST(formats_are_linear_and_types_agree) {
    for (const Example& example : examples_of_all_types()) {
        const Made made = make(library, example);
        std::vector<Tensor> tensors = example.inputs;
        tensors.insert(tensors.end(), example.outputs.begin(), example.outputs.end());
        std::vector<DynamicPluginTensorDesc> all = profile(tensors, {1, 4}, {1, 100});
        const int32_t inputs = static_cast<int32_t>(example.inputs.size());
        const int32_t outputs = static_cast<int32_t>(example.outputs.size());
        for (int32_t position = 0; position < inputs + outputs; ++position) {
            const DataType right = all[position].desc.type;
            for (int32_t other = 0; other <= static_cast<int32_t>(DataType::kFP4); ++other) {
                for (int32_t format = 0; format <= static_cast<int32_t>(TensorFormat::kHWC16); ++format) {
                    all[position].desc.type = static_cast<DataType>(other);
                    all[position].desc.format = static_cast<TensorFormat>(format);
                    const bool floating = std::ranges::count(kCacheTypes, all[position].desc.type) != 0;
                    const bool open = position == 0 && right != DataType::kINT8;
                    const bool typed = open ? floating : all[position].desc.type == right;
                    CHECK_EQUAL(made.build()->supportsFormatCombination(position, all.data(), inputs, outputs),
                                typed && format == static_cast<int32_t>(TensorFormat::kLINEAR));
                }
            }
            all[position].desc.type = right;
            all[position].desc.format = TensorFormat::kLINEAR;
        }
        for (const int32_t outside : {-1, inputs + outputs, 1 << 30}) {
            CHECK(!made.build()->supportsFormatCombination(outside, all.data(), inputs, outputs));
        }
        CHECK(!made.build()->supportsFormatCombination(0, all.data(), inputs - 1, outputs));
    }
}

TEST(caches_and_bounds_are_updated_in_place) {
    for (const Example& example : examples()) {
        const Made made = make(library, example);
        for (size_t i = 0; i < example.aliases.size(); ++i) {
            CHECK_EQUAL(made.build()->getAliasedInput(static_cast<int32_t>(i)), example.aliases[i]);
        }
        for (const int32_t outside : {-1, static_cast<int32_t>(example.aliases.size()), 1 << 30}) {
            CHECK_EQUAL(made.build()->getAliasedInput(outside), -1);
        }
    }
}

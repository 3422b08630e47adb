// Every method of the plugins that needs no GPU, called as TensorRT calls it: host_test LIBRARY TEST.
#include <algorithm>
#include <functional>
#include <random>
#include <thread>

#include "check.h"
#include "fake_builder.h"
#include "operators.h"

constexpr int kSkipped = 77;

TEST(creators_say_who_they_are) {
    CHECK_EQUAL(library.creators.size(), 3U);
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
    for (const Example& example : examples()) {
        std::vector<std::string> inputs;
        for (const Tensor& tensor : example.inputs) inputs.push_back(tensor.shape);
        std::string expected;
        for (const Tensor& tensor : example.outputs) expected += (expected.empty() ? "" : ", ") + tensor.shape;
        CHECK_EQUAL(shapes_of(make(library, example), inputs), expected);
    }
}

TEST(a_head_size_that_is_not_known_yet_stays_symbolic) {
    const Made made = make(library, examples()[0]);
    CHECK_EQUAL(shapes_of(made, {"B H W D", "B G S D", "B G S D", "B"}), "B G 58 D, B G 58 D, B G (D*2) 15, B, B G 58");
}

TEST(pages_are_rounded_up) {
    IPluginCreatorV3One* creator = library.creator("KvcCompact");
    const int32_t cases[][3] = {{1, 1, 1},
                                {1, 7, 1},
                                {58, 1, 58},
                                {57, 3, 19},
                                {58, 3, 20},
                                {59, 3, 20},
                                {1048576, 2147483647, 1},
                                {1048576, 1048575, 2}};
    for (const auto& [capacity, page_size, pages] : cases) {
        const Made made =
            make(creator,
                 Values{{"prompt_budget", 1}, {"capacity", capacity}, {"pool_kernel", 1}, {"page_size", page_size}});
        const std::string slots = std::to_string(capacity);
        CHECK_EQUAL(
            shapes_of(made, {"B 4 8 16", "B 2 S 16", "B 2 S 16", "B"}),
            "B 2 " + slots + " 16, B 2 " + slots + " 16, B 2 32 " + std::to_string(pages) + ", B, B 2 " + slots);
    }
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
                                               {"dense_until", dense_until}});
        CHECK_EQUAL(shapes_of(made, {"B 4 16", "B 2 16", "B 2 16", "B 2 58 16", "B 2 58 16", "B 2 32 15", "B"}),
                    "B 4 16, B 2 58 16, B 2 58 16, B 2 32 15, B 2 " + std::to_string(width));
    }
}

TEST(shapes_that_contradict_each_other_are_refused) {
    const Made hybrid = make(library, examples()[1]);
    const std::vector<std::string> good{"B 4 16", "B 2 16", "B 2 16", "B 2 58 16", "B 2 58 16", "B 2 32 15", "B"};
    struct Case {
        size_t input;
        const char* shape;
        const char* reason;
    };
    for (const Case& wrong : {Case{1, "B 2 2 16", "k_new: expected 3 dimensions, found 4"},
                              Case{2, "B 3 16", "v_new: expected kv heads = 2, found 3"},
                              Case{3, "B 2 58 24", "k_cache: expected head size = 16, found 24"},
                              Case{5, "B 2 16 15", "bounds: expected 2 x head size = 16, found 32"},
                              Case{5, "B 2 32 14", "field page_size: expected pages = 14, found 15"},
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
    for (const DataType type : kCacheTypes) {
        for (const Example& example : examples(type)) {
            const Made made = make(library, example);
            std::vector<DataType> in, out(example.outputs.size());
            for (const Tensor& tensor : example.inputs) in.push_back(tensor.type);
            const auto ask = [&] {
                return made.build()->getOutputDataTypes(out.data(), static_cast<int32_t>(out.size()), in.data(),
                                                        static_cast<int32_t>(in.size()));
            };
            CHECK_EQUAL(ask(), 0);
            for (size_t i = 0; i < out.size(); ++i) CHECK(out[i] == example.outputs[i].type);
            in.back() = DataType::kINT32;
            CHECK(ask() != 0);
            CHECK_REASON("_lengths: expected DataType 8, found 3");
            in.back() = DataType::kINT64;
            in[0] = DataType::kFP8;
            CHECK(ask() != 0);
            CHECK_REASON("expected float32, float16 or bfloat16");
        }
    }
}

TEST(formats_are_linear_and_types_agree) {
    for (const DataType type : kCacheTypes) {
        for (const Example& example : examples(type)) {
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
                        const bool typed = position == 0 ? floating : all[position].desc.type == right;
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

TEST(fields_survive_a_round_trip) {
    for (const Example& example : examples()) {
        Made made = make(library, example);
        for (int round = 0; round < 3; ++round) {
            // A clone must not point into the plugin that it came from.
            Made clone(round == 1 ? made.plugin->clone() : made.runtime()->attachToContext(nullptr));
            made.plugin.reset();
            const PluginFieldCollection* fields = clone.runtime()->getFieldsToSerialize();
            CHECK_EQUAL(static_cast<size_t>(fields->nbFields), example.values.size());
            for (size_t i = 0; i < example.values.size(); ++i) {
                CHECK_EQUAL(std::string(fields->fields[i].name), example.values[i].name);
                CHECK(fields->fields[i].type == PluginFieldType::kINT32);
                CHECK_EQUAL(fields->fields[i].length, 1);
                CHECK_EQUAL(*static_cast<const int32_t*>(fields->fields[i].data), example.values[i].value);
            }
            IPluginCreatorV3One* creator = library.creator(example.name);
            made = Made(creator->createPlugin("layer", fields, TensorRTPhase::kRUNTIME));
            CHECK(made);
        }
    }
}

/// What hostile or broken input is refused with; `change` spoils a good list of fields.
static void check_refused(const Library& library, const Example& example, const std::string& reason,
                          const std::function<void(std::vector<PluginField>&)>& change) {
    std::vector<PluginField> fields = fields_of(example.values);
    change(fields);
    for (const TensorRTPhase phase : {TensorRTPhase::kBUILD, TensorRTPhase::kRUNTIME}) {
        CHECK(!make(library.creator(example.name), fields, phase));
        CHECK_REASON("kvc plugin: ", example.name, reason);
    }
}

TEST(a_field_of_another_type_or_length_is_refused) {
    for (const Example& example : examples()) {
        for (size_t i = 0; i < example.values.size(); ++i) {
            const std::string where = std::string("field ") + example.values[i].name + ": expected one INT32";
            for (int32_t type = -1; type <= static_cast<int32_t>(PluginFieldType::kFP4) + 1; ++type) {
                if (type == static_cast<int32_t>(PluginFieldType::kINT32)) continue;
                check_refused(library, example, where + " (type 5, length 1), found type " + std::to_string(type),
                              [&](auto& fields) { fields[i].type = static_cast<PluginFieldType>(type); });
            }
            for (const int32_t length : {0, 2, -1, INT32_MIN, INT32_MAX}) {
                check_refused(library, example,
                              where + " (type 5, length 1), found type 5, length " + std::to_string(length),
                              [&](auto& fields) { fields[i].length = length; });
            }
        }
    }
}

TEST(a_missing_doubled_unknown_or_empty_field_is_refused) {
    static const int32_t seven = 7;
    for (const Example& example : examples()) {
        for (size_t i = 0; i < example.values.size(); ++i) {
            const std::string field = std::string("field ") + example.values[i].name;
            check_refused(library, example, field + ": missing",
                          [&](auto& fields) { fields.erase(fields.begin() + static_cast<long>(i)); });
            check_refused(library, example, field + ": has no data", [&](auto& fields) { fields[i].data = nullptr; });
            check_refused(library, example, "a field has no name", [&](auto& fields) { fields[i].name = nullptr; });
            check_refused(library, example, "field page-size: unknown",
                          [&](auto& fields) { fields[i].name = "page-size"; });
            check_refused(library, example, "number of fields: expected " + std::to_string(example.values.size()),
                          [&](auto& fields) { fields.push_back(fields[i]); });
            if (example.values.size() == 1) continue;
            const size_t next = (i + 1) % example.values.size();
            check_refused(library, example, ": given twice", [&](auto& fields) { fields[i] = fields[next]; });
        }
        check_refused(library, example, "number of fields: expected",
                      [&](auto& fields) { fields.emplace_back("another", &seven, PluginFieldType::kINT32, 1); });
    }
}

TEST(a_value_out_of_range_is_refused) {
    struct Limit {
        const char* name;
        int64_t minimum, maximum;
    };
    const std::vector<std::vector<Limit>> limits{
        {{"prompt_budget", 1, 1048576},
         {"capacity", 1, 1048576},
         {"pool_kernel", 1, 4095},
         {"page_size", 1, INT32_MAX}},
        {{"page_size", 1, INT32_MAX},
         {"top_r", 1, 256},
         {"top_k", 1, 1048576},
         {"token_budget", 0, INT32_MAX},
         {"dense_until", 0, INT32_MAX}},
        {{"dense_until", 0, INT32_MAX}},
    };
    const std::vector<Example> all = examples();
    for (size_t op = 0; op < all.size(); ++op) {
        for (size_t i = 0; i < all[op].values.size(); ++i) {
            const Limit& limit = limits[op][i];
            CHECK_EQUAL(std::string(limit.name), all[op].values[i].name);
            const std::string expected = std::string("field ") + limit.name + ": expected " +
                                         std::to_string(limit.minimum) + ".." + std::to_string(limit.maximum);
            for (const int64_t wrong : {limit.minimum - 1, limit.maximum + 1, int64_t{INT32_MIN}}) {
                if (wrong > INT32_MAX) continue;
                const int32_t value = static_cast<int32_t>(wrong);
                check_refused(library, all[op], expected + ", found " + std::to_string(wrong),
                              [&](auto& fields) { fields[i].data = &value; });
            }
            for (const int64_t right : {limit.minimum, limit.maximum}) {
                Example extreme = all[op];
                extreme.values[i].value = static_cast<int32_t>(right);
                if (limit.name == std::string("prompt_budget")) extreme.values[1].value = 1048576;
                if (limit.name == std::string("capacity")) extreme.values[0].value = 1;
                CHECK(make(library, extreme));
            }
        }
    }
}

TEST(values_that_do_not_fit_together_are_refused) {
    const Example compact = examples()[0];
    const int32_t even = 8, more_than_capacity = 59;
    check_refused(library, compact, "field pool_kernel: expected an odd number, found 8",
                  [&](auto& fields) { fields[2].data = &even; });
    check_refused(library, compact, "field prompt_budget: expected at most the capacity of 58, found 59",
                  [&](auto& fields) { fields[0].data = &more_than_capacity; });
}

TEST(a_collection_that_lies_is_refused) {
    for (const Example& example : examples()) {
        IPluginCreatorV3One* creator = library.creator(example.name);
        const std::vector<PluginField> fields = fields_of(example.values);
        CHECK(creator->createPlugin(nullptr, nullptr, TensorRTPhase::kBUILD) == nullptr);
        CHECK_REASON("no fields");
        for (const int32_t count : {-1, INT32_MIN, INT32_MAX, static_cast<int32_t>(fields.size()) + 1}) {
            for (const PluginField* list : {fields.data(), static_cast<const PluginField*>(nullptr)}) {
                const PluginFieldCollection collection{count, list};
                CHECK(creator->createPlugin(nullptr, &collection, TensorRTPhase::kRUNTIME) == nullptr);
                CHECK_REASON("number of fields: expected", "found " + std::to_string(count));
            }
        }
        const PluginFieldCollection null_list{static_cast<int32_t>(fields.size()), nullptr};
        CHECK(creator->createPlugin("", &null_list, TensorRTPhase::kBUILD) == nullptr);
        CHECK_REASON("the list of fields is null");
        const PluginFieldCollection empty{0, nullptr};
        CHECK(creator->createPlugin("", &empty, TensorRTPhase::kBUILD) == nullptr);
        CHECK_REASON(": missing");
    }
}

TEST(a_hostile_name_stays_one_short_line) {
    const std::string hostile = "two\nlines\x1b[31m" + std::string(100000, 'x');
    check_refused(library, examples()[2], "field two?lines?[31m",
                  [&](auto& fields) { fields[0].name = hostile.c_str(); });
    CHECK(library.last_error().size() < 200);
}

TEST(misaligned_values_are_read) {
    const Example example = examples()[1];
    std::vector<char> bytes(example.values.size() * 8 + 1);
    std::vector<PluginField> fields = fields_of(example.values);
    for (size_t i = 0; i < fields.size(); ++i) {
        std::memcpy(bytes.data() + i * 8 + 1, fields[i].data, sizeof(int32_t));
        fields[i].data = bytes.data() + i * 8 + 1;
    }
    CHECK(make(library.creator(example.name), fields));
}

/// Random lists of right and wrong fields: the creator and a model of what is right must agree on every one.
TEST(random_fields_are_accepted_exactly_if_right) {
    std::mt19937 random(20260);
    const auto pick = [&](size_t count) { return std::uniform_int_distribution<size_t>(0, count - 1)(random); };
    const int32_t values[] = {1, 3, 7, 16, 0, -1, INT32_MAX, INT32_MIN};
    const std::vector<Example> all = examples();
    size_t accepted = 0;
    std::freopen("/dev/null", "w", stderr);  // hundreds of thousands of expected reasons
    for (int round = 0; round < 100000; ++round) {
        const Example& example = all[pick(all.size())];
        std::vector<PluginField> fields = fields_of(example.values);
        std::ranges::shuffle(fields, random);
        bool right = true;
        for (size_t changes = pick(3); changes > 0; --changes) {
            PluginField& field = fields[pick(fields.size())];
            switch (pick(5)) {
                case 0: field.type = static_cast<PluginFieldType>(pick(14)); break;
                case 1: field.length = static_cast<int32_t>(pick(3)); break;
                case 2: field.data = nullptr; break;
                case 3: field.name = all[pick(all.size())].values[0].name; break;
                default: field.data = &values[pick(3)];  // 1, 3 or 7: right wherever they stand
            }
        }
        for (const NamedValue& value : example.values) {
            right &= std::ranges::count_if(fields, [&](const PluginField& field) {
                         return field.type == PluginFieldType::kINT32 && field.length == 1 && field.data != nullptr &&
                                std::strcmp(field.name, value.name) == 0;
                     }) == 1;
        }
        const auto value_of = [&](const char* name) {
            for (const PluginField& field : fields) {
                if (std::strcmp(field.name, name) == 0) return *static_cast<const int32_t*>(field.data);
            }
            return 0;
        };
        if (right && example.name == std::string("KvcCompact")) {
            right = value_of("prompt_budget") <= value_of("capacity");
        }
        const bool made = static_cast<bool>(make(library.creator(example.name), fields));
        if (made != right) ++Suite::failures;
        accepted += made;
    }
    CHECK(accepted > 10000);
    CHECK(accepted < 90000);
}

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
    for (const DataType type : kCacheTypes) {
        for (const Example& example : examples(type)) {
            const Made made = make(library, example);
            CHECK_EQUAL(configure(made, example, {1, 32}, {8, 4096}), 0);
            CHECK_EQUAL(configure(made, example, {1, 1}, {1, 1}), 0);
        }
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
    for (const DataType type : kCacheTypes) {
        for (const Example& example : examples(type)) {
            const Made made = make(library, example);
            const size_t largest = workspace(made, example, {1, 32}, {1, 4096});
            CHECK(largest < size_t{1} << 40);
            CHECK_EQUAL(largest, workspace(made, example, {32, 32}, {4096, 4096}));
            CHECK(largest > 0);
            for (const int64_t batch : {1, 2, 31, 32}) {
                for (const int64_t prompt : {1, 49, 50, 51, 64, 1000, 4095}) {
                    CHECK(workspace(made, example, {1, batch}, {1, prompt}) <= largest);
                }
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
            for (int32_t axis = 0; axis < right.dims.nbDims; ++axis) {
                for (const int64_t size : {int64_t{-1}, int64_t{1029}, int64_t{1} << 40, INT64_MIN, INT64_MAX}) {
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

/// enqueue with these buffers, everything else being right.
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

TEST(every_thread_has_its_own_reason) {
    make(library.creator("KvcDenseAttention"), Values{{"dense_until", -5}});
    std::string before = "not asked", after;
    std::thread([&] {
        before = library.last_error();
        make(library.creator("KvcDenseAttention"), Values{{"dense_until", -6}});
        after = library.last_error();
    }).join();
    CHECK_EQUAL(before, "");
    CHECK(after.ends_with("found -6"));
    CHECK_REASON("found -5");
}

int main(int count, char** arguments) {
    if (count != 3 || !Suite::tests().contains(arguments[2])) {
        std::fprintf(stderr, "usage: host_test LIBRARY TEST\n");
        return 2;
    }
    Suite::tests()[arguments[2]](Library(arguments[1]));
    return Suite::failures == 0 ? 0 : 1;
}

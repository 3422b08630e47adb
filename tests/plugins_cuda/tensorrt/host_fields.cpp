// Attributes: accepted and refused fields of a creator, its reasons, and the fields that come back from an engine file.
#include <algorithm>
#include <functional>
#include <random>
#include <thread>

#include "check.h"
#include "operators.h"

TEST(fields_survive_a_round_trip) {
    for (const Example& example : examples_of_all_types()) {
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

/// True for an attribute that only some nodes have.
static bool is_optional(const NamedValue& value) {
    return std::strcmp(value.name, "by_length") == 0 || std::strcmp(value.name, "cache_format") == 0;
}

static bool needs_no_field(const Example& example) { return std::ranges::all_of(example.values, is_optional); }

/// The refusals of hostile or broken input; `change` spoils a good list of fields.
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
            const auto without = [&](auto& fields) { fields.erase(fields.begin() + static_cast<long>(i)); };
            if (is_optional(example.values[i])) {
                std::vector<PluginField> others = fields_of(example.values);
                without(others);
                CHECK(make(library.creator(example.name), others));
            } else {
                check_refused(library, example, field + ": missing", without);
            }
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
    const Limit format{"cache_format", 0, 4}, page{"page_size", 1, INT32_MAX}, bounds{"fp8_bounds", 0, 1};
    const std::vector<Limit> compact{{"prompt_budget", 1, 1048576},
                                     {"capacity", 1, 1048576},
                                     {"pool_kernel", 1, 4095},
                                     page,
                                     bounds,
                                     format,
                                     {"by_length", 0, 1}};
    const std::vector<std::vector<Limit>> limits{compact,
                                                 {page,
                                                  {"top_r", 1, 256},
                                                  {"top_k", 1, 1048576},
                                                  {"token_budget", 0, INT32_MAX},
                                                  {"dense_until", 0, INT32_MAX},
                                                  bounds,
                                                  format},
                                                 {{"dense_until", 0, INT32_MAX}, format},
                                                 compact,
                                                 {format},
                                                 {page, bounds, format},
                                                 {format},
                                                 {format},
                                                 {bounds}};
    const std::vector<Example> all = examples();
    CHECK_EQUAL(all.size(), limits.size());
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
        if (needs_no_field(example)) continue;
        const PluginFieldCollection empty{0, nullptr};
        CHECK(creator->createPlugin("", &empty, TensorRTPhase::kBUILD) == nullptr);
        CHECK_REASON(": missing");
    }
}

TEST(an_operator_of_optional_attributes_needs_no_fields) {
    size_t found = 0;
    for (const Example& example : examples()) {
        if (!needs_no_field(example)) continue;
        const PluginFieldCollection empty{0, nullptr};
        CHECK(Made(library.creator(example.name)->createPlugin("layer", &empty, TensorRTPhase::kRUNTIME)));
        ++found;
    }
    CHECK_EQUAL(found, size_t{3});
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

/// Random lists of right and wrong fields: the creator and a model of the rules must agree on every one.
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
        const auto is_known = [&](const PluginField& field) {
            return std::ranges::any_of(
                example.values, [&](const NamedValue& value) { return std::strcmp(value.name, field.name) == 0; });
        };
        for (size_t changes = pick(3); changes > 0; --changes) {
            PluginField& field = fields[pick(fields.size())];
            switch (pick(5)) {
                case 0: field.type = static_cast<PluginFieldType>(pick(14)); break;
                case 1: field.length = static_cast<int32_t>(pick(3)); break;
                case 2: field.data = nullptr; break;
                case 3: field.name = all[pick(all.size())].values[0].name; break;
                default: field.data = &values[pick(3)];  // 1, 3 or 7: right for every attribute but two
            }
        }
        right &= std::ranges::all_of(fields, is_known);
        for (const NamedValue& value : example.values) {
            const auto named = [&](const PluginField& field) { return std::strcmp(field.name, value.name) == 0; };
            const auto good = [&](const PluginField& field) {
                return named(field) && field.type == PluginFieldType::kINT32 && field.length == 1 &&
                       field.data != nullptr;
            };
            const auto given = std::ranges::count_if(fields, named);
            right &= given == std::ranges::count_if(fields, good) && (given == 1 || (given == 0 && is_optional(value)));
        }
        const auto value_of = [&](const char* name, int32_t absent = 0) {
            for (const PluginField& field : fields) {
                if (std::strcmp(field.name, name) == 0) return *static_cast<const int32_t*>(field.data);
            }
            return absent;
        };
        if (right && std::string(example.name).starts_with("KvcCompact")) {
            right = value_of("prompt_budget") <= value_of("capacity");
        }
        right = right && value_of("fp8_bounds") <= 1 && value_of("by_length") <= 1 && value_of("cache_format") <= 4;
        right = right && value_of("page_size", 1) >= 1;  // it may have changed names with a format of 0
        const bool made = static_cast<bool>(make(library.creator(example.name), fields));
        if (made != right) ++Suite::failures;
        accepted += made;
    }
    CHECK(accepted > 10000);
    CHECK(accepted < 90000);
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

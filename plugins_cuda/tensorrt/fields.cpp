#include "tensorrt/fields.h"

#include <algorithm>
#include <cinttypes>
#include <cstring>

#include "tensorrt/report.h"

namespace kvc::tensorrt {
namespace {

using nvinfer1::PluginField;
using nvinfer1::PluginFieldCollection;
using nvinfer1::PluginFieldType;

size_t index_of(std::span<const FieldSpec> specs, const char* name) {
    for (size_t i = 0; i < specs.size(); ++i) {
        if (std::strcmp(specs[i].name, name) == 0) return i;
    }
    refuse("field %.64s: unknown", name);
}

int32_t value_of(const FieldSpec& spec, const PluginField& field) {
    if (field.type != PluginFieldType::kINT32 || field.length != 1) {
        refuse("field %s: expected one INT32 (type %d, length 1), found type %d, length %d", spec.name,
               static_cast<int>(PluginFieldType::kINT32), static_cast<int>(field.type), field.length);
    }
    if (field.data == nullptr) refuse("field %s: has no data", spec.name);
    int32_t value;
    std::memcpy(&value, field.data, sizeof value);  // an engine file promises no alignment
    if (value < spec.minimum || value > spec.maximum) {
        refuse("field %s: expected %" PRId32 "..%" PRId32 ", found %" PRId32, spec.name, spec.minimum, spec.maximum,
               value);
    }
    return value;
}

void check_collection(std::span<const FieldSpec> specs, const PluginFieldCollection* collection) {
    if (collection == nullptr) refuse("no fields");
    // The count is checked before anything is read: where it cannot be right, the memory may be wrong too.
    if (collection->nbFields < 0 || static_cast<size_t>(collection->nbFields) > specs.size()) {
        refuse("number of fields: expected %zu, found %" PRId32, specs.size(), collection->nbFields);
    }
    if (collection->nbFields > 0 && collection->fields == nullptr) refuse("the list of fields is null");
}

}  // namespace

Fields::Fields(std::span<const FieldSpec> specs, const PluginFieldCollection* collection) : specs_{specs} {
    check_collection(specs, collection);
    std::array<bool, kMaxFields> seen{};
    for (const PluginField& field : std::span(collection->fields, static_cast<size_t>(collection->nbFields))) {
        if (field.name == nullptr) refuse("a field has no name");
        const size_t index = index_of(specs, field.name);
        if (seen[index]) refuse("field %s: given twice", field.name);
        seen[index] = true;
        values_[index] = value_of(specs[index], field);
    }
    for (size_t i = 0; i < specs.size(); ++i) {
        if (!seen[i] && !specs[i].optional) refuse("field %s: missing", specs[i].name);
    }
    check_together();
}

void Fields::check_together() const {
    for (const FieldSpec& spec : specs_) {
        const int32_t value = get(spec.name);
        if (spec.odd && value % 2 == 0) refuse("field %s: expected an odd number, found %" PRId32, spec.name, value);
        if (spec.at_most == nullptr || value <= get(spec.at_most)) continue;
        refuse("field %s: expected at most the %s of %" PRId32 ", found %" PRId32, spec.name, spec.at_most,
               get(spec.at_most), value);
    }
}

int32_t Fields::get(const char* name) const { return values_[index_of(specs_, name)]; }

bool Fields::is_set(const char* name) const {
    const auto has_name = [&](const FieldSpec& spec) { return std::strcmp(spec.name, name) == 0; };
    return std::ranges::any_of(specs_, has_name) && get(name) != 0;
}

const PluginFieldCollection* Fields::serialise() noexcept {
    for (size_t i = 0; i < specs_.size(); ++i) {
        serialised_[i] = PluginField(specs_[i].name, &values_[i], PluginFieldType::kINT32, 1);
    }
    collection_ = {static_cast<int32_t>(specs_.size()), serialised_.data()};
    return &collection_;
}

}  // namespace kvc::tensorrt

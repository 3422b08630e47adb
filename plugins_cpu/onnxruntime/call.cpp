#include "onnxruntime/call.h"

#include <cstring>

namespace kvc {

int64_t Attributes::integer(const char* name, int64_t least) const {
    int64_t value = 0;
    if (ort::Status* status = api_.integer_attribute(info_, name, &value)) {
        const std::string reason = api_.message(status);
        api_.release(status);
        throw Error(reason);
    }
    require(value >= least, "attribute ", name, ": expected at least ", least, ", found ", value);
    return value;
}

float Attributes::real(const char* name) const {
    float value = 0;
    if (ort::Status* status = api_.float_attribute(info_, name, &value)) {
        const std::string reason = api_.message(status);
        api_.release(status);
        throw Error(reason);
    }
    return value;
}

int64_t Attributes::integer_or(const char* name, int64_t absent) const {
    int64_t value = 0;
    ort::Status* const status = api_.integer_attribute(info_, name, &value);
    if (status != nullptr) api_.release(status);
    return status == nullptr ? value : absent;
}

bool Attributes::flag(const char* name) const { return integer_or(name, 0) != 0; }

namespace {

size_t bytes_of(ort::ElementType type) {
    switch (type) {
        case ort::ElementType::kUint8:
        case ort::ElementType::kInt8: return 1;
        case ort::ElementType::kFloat16: return 2;
        case ort::ElementType::kFloat:
        case ort::ElementType::kInt32: return 4;
        case ort::ElementType::kInt64: return 8;
    }
    return 0;
}

/// Parts of a vector in a format: codes, scales and minima.
size_t parts_of(VectorFormat format) {
    return format == VectorFormat::kExact ? 1 : format == VectorFormat::kInt4 ? 3 : 2;
}

/// Keys and values whose parts part(0), part(1), ... follow one another.
template <class Byte, class Part>
Tables<Byte> tables_of(const Schema& schema, int64_t head_size, const Part& part) {
    const auto vectors = [&](VectorFormat format, size_t first) {
        VectorsOf<Byte> made{format, head_size, nullptr, nullptr, nullptr};
        Byte** const places[] = {&made.codes, &made.scales, &made.minima};
        for (size_t index = 0; index < parts_of(format); ++index)
            *places[index] = static_cast<Byte*>(part(first + index));
        return made;
    };
    // In this order: the parts of the values come behind those of the keys.
    const VectorsOf<Byte> keys = vectors(schema.keys, 0);
    return {keys, vectors(schema.values, parts_of(schema.keys))};
}

}  // namespace

void Sizes::fix(Symbol symbol, int64_t size, const char* where) {
    int64_t& known = sizes_[static_cast<size_t>(symbol)];
    require(size >= 0 && (known == kUnknown || known == size), where, ": expected ",
            kSymbolNames[static_cast<size_t>(symbol)], " = ", known, ", found ", size);
    known = size;
}

Call::Call(const ort::Api& api, ort::Context* context, const Schema& schema)
    : api_(api), context_(context), schema_(schema) {
    size_t given = 0;
    check(api_.input_count(context, &given));
    for (size_t index = 0; index < schema.inputs.size(); ++index) {
        const TensorSpec& spec = schema.inputs[index];
        const ort::Value* value = nullptr;
        if (index < given) check(api_.input(context, index, &value));
        if (value == nullptr && spec.optional) continue;
        require(value != nullptr, spec.name, ": missing");
        ort::Shape* shape = nullptr;
        check(api_.shape_of(value, &shape));
        size_t rank = 0;
        std::array<int64_t, kMaxRank> sizes{};
        ort::Status* status = api_.rank(shape, &rank);
        const bool fits = rank == spec.shape.size();
        if (status == nullptr && fits) status = api_.dimensions(shape, sizes.data(), rank);
        api_.release(shape);
        check(status);
        require(fits, spec.name, ": expected ", spec.shape.size(), " dimensions, found ", rank);
        for (size_t axis = 0; axis < rank; ++axis) sizes_.fix(spec.shape[axis], sizes[axis], spec.name);
        void* address = nullptr;
        check(api_.data(value, &address));
        inputs_[index] = address;
    }
    if (schema.keys != VectorFormat::kExact) derive_sizes();
}

/// Fixes the sizes that a format derives from the head size.
void Call::derive_sizes() {
    const int64_t size = sizes_[Symbol::kHeadSize];
    require(size > 0 && size <= kLargestStoredHead, "expected a head size in 1..", kLargestStoredHead, ", found ",
            size);
    require(schema_.values != VectorFormat::kInt4 || size % 2 == 0, "expected an even head size, found ", size);
    fix(Symbol::kHalfHeadSize, size / 2, "head size");
    fix(Symbol::kGroups, groups_of(VectorFormat::kInt4, size), "head size");
    fix(Symbol::kOne, 1, "scales");
}

size_t Call::place_of(std::span<const TensorSpec> tensors, std::string_view name) {
    for (size_t place = 0; place < tensors.size(); ++place) {
        if (name == tensors[place].name) return place;
    }
    throw Error("no tensor " + std::string(name));
}

Tables<const uint8_t> Call::input_tables(std::string_view keys) const {
    const size_t first = place_of(schema_.inputs, keys);
    return tables_of<const uint8_t>(schema_, sizes_[Symbol::kHeadSize],
                                    [&](size_t part) { return inputs_[first + part]; });
}

Tables<uint8_t> Call::output_tables(std::string_view keys) {
    const size_t first = place_of(schema_.outputs, keys);
    return tables_of<uint8_t>(schema_, sizes_[Symbol::kHeadSize],
                              [&](size_t part) { return output_memory(first + part); });
}

Tables<uint8_t> Call::updated_tables(std::string_view keys) {
    const size_t first = place_of(schema_.inputs, keys);
    const size_t output = place_of(schema_.outputs, std::string(keys) + "_out");
    return tables_of<uint8_t>(schema_, sizes_[Symbol::kHeadSize],
                              [&](size_t part) { return updated_memory(first + part, output + part); });
}

void* Call::output_memory(size_t index) {
    size_t count = 0;
    check(api_.output_count(context_, &count));
    if (index >= count) return nullptr;
    const TensorSpec& spec = schema_.outputs[index];
    std::array<int64_t, kMaxRank> sizes{};
    for (size_t axis = 0; axis < spec.shape.size(); ++axis) {
        sizes[axis] = sizes_[spec.shape[axis]];
        require(sizes[axis] >= 0, spec.name, ": the size of dimension ", axis, " is not known");
    }
    ort::Value* value = nullptr;
    check(api_.output(context_, index, sizes.data(), spec.shape.size(), &value));
    if (value == nullptr) return nullptr;
    void* address = nullptr;
    check(api_.data(value, &address));
    return address;
}

void* Call::updated_memory(size_t index, size_t output) {
    void* address = output_memory(output);
    require(address != nullptr, schema_.outputs[output].name, ": missing");
    if (address != inputs_[index]) {
        size_t bytes = bytes_of(schema_.inputs[index].type);
        for (const Symbol symbol : schema_.inputs[index].shape) bytes *= static_cast<size_t>(sizes_[symbol]);
        std::memcpy(address, inputs_[index], bytes);
    }
    return address;
}

void Call::run(void (*function)(void*, size_t), size_t count, void* data) const {
    if (count > 0) check(api_.parallel_for(context_, function, count, 0, data));
}

void Call::check(ort::Status* status) const {
    if (status == nullptr) return;
    const std::string text = api_.message(status);
    api_.release(status);
    throw Error(text);
}

}  // namespace kvc

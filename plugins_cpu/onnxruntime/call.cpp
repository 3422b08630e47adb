#include "onnxruntime/call.h"

#include <cstring>
#include <string>

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

bool Attributes::flag(const char* name) const {
    int64_t value = 0;
    ort::Status* const status = api_.integer_attribute(info_, name, &value);
    if (status != nullptr) api_.release(status);
    return status == nullptr && value != 0;
}

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

void* Call::updated_memory(size_t index, size_t output, size_t element_bytes) {
    void* address = output_memory(output);
    require(address != nullptr, schema_.outputs[output].name, ": missing");
    if (address != inputs_[index]) {
        size_t bytes = element_bytes;
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

// The single checks that validate.cpp combines: numbers in ranges, and tensors at usable addresses.
#pragma once

#include <cstdint>
#include <cstdio>
#include <initializer_list>
#include <iterator>
#include <limits>
#include <string>
#include <type_traits>
#include <vector>

#include "kernels/vector_formats.h"
#include "kvc/limits.h"
#include "kvc/types.h"
#include "src/error.h"
#include "src/sizes.h"

namespace kvc::checks {

inline constexpr int64_t kLargestInt32 = std::numeric_limits<int32_t>::max();
inline constexpr int64_t kLargestInt64 = std::numeric_limits<int64_t>::max();
inline constexpr uint32_t kDataAlignment = 16;  // of one vector access

[[noreturn]] inline void refuse(const std::string& field, const std::string& value, const std::string& expected) {
    throw Error(KVC_INVALID_PARAMETER, field + " is " + value + "; expected " + expected);
}

// ---- Numbers

struct Range {
    const char* field;
    int64_t value;
    int64_t low;
    int64_t high;
    const char* reason = nullptr;  // the rule of the upper end, where another field gives it
};

inline void check_ranges(std::initializer_list<Range> ranges) {
    for (const Range& range : ranges) {
        if (range.value < range.low || range.value > range.high) {
            const std::string why = range.reason == nullptr ? "" : " (" + std::string(range.reason) + ")";
            const std::string allowed = std::to_string(range.low) + ".." + std::to_string(range.high);
            refuse(range.field, std::to_string(range.value), allowed + why);
        }
    }
}

inline void check_multiple(const char* field, int64_t value, int64_t divisor, const char* reason = nullptr) {
    if (value % divisor != 0) {
        const std::string why = reason == nullptr ? "" : " (" + std::string(reason) + ")";
        refuse(field, std::to_string(value), "a multiple of " + std::to_string(divisor) + why);
    }
}

template <class Params>
void check_struct(const Params* params, const char* type) {
    if (params == nullptr) {
        refuse("params", "null", "a " + std::string(type));
    }
    if (params->struct_bytes != sizeof(Params)) {
        const std::string expected = std::to_string(sizeof(Params)) + " (sizeof(" + type + "))";
        refuse("struct_bytes", std::to_string(params->struct_bytes), expected);
    }
}

inline void check_odd(const char* field, int64_t value) {
    if (value % 2 == 0) {
        refuse(field, std::to_string(value), "an odd number");
    }
}

/// Query heads of a KV head and of the whole batch, for sizes that are in range.
template <class Params>
void check_group(const Params& params) {
    check_ranges({{"heads / kv_heads", params.heads / params.kv_heads, 1, KVC_LARGEST_GROUP},
                  {"batch * heads", int64_t{params.batch} * params.heads, 1, kLargestInt32}});
}

// ---- Memory

struct Tensor {
    const char* field;
    const void* data;
    uint64_t bytes;
    uint64_t alignment;
    bool written;
    bool optional;
};

/// Makes the tensors of one call and checks their sizes, so that every tensor in a list has a size that fits.
struct TensorMaker {
    int64_t element_bytes;
    int64_t bound_bytes;
    CacheFormat formats;

    Tensor input(const char* field, const void* data, std::initializer_list<int64_t> shape) const {
        return {field, data, bytes(field, shape, element_bytes), kDataAlignment, false, false};
    }
    Tensor output(const char* field, void* data, std::initializer_list<int64_t> shape) const {
        return {field, data, bytes(field, shape, element_bytes), kDataAlignment, true, false};
    }
    Tensor given_bounds(const char* field, const void* data, std::initializer_list<int64_t> shape) const {
        return {field, data, bytes(field, shape, bound_bytes), kDataAlignment, false, false};
    }
    Tensor stored_bounds(const char* field, void* data, std::initializer_list<int64_t> shape) const {
        return {field, data, bytes(field, shape, bound_bytes), kDataAlignment, true, false};
    }
    template <class Number>
    static Tensor numbers(const char* field, Number* data, std::initializer_list<int64_t> shape) {
        return {field, data, bytes(field, shape, sizeof(Number)), sizeof(Number), !std::is_const_v<Number>, false};
    }
    /// Keys or values, `shape` in channels: elements or, in a format, codes.
    template <class Data>
    Tensor codes(VectorFormat format, const char* field, Data* data, std::initializer_list<int64_t> shape) const {
        return vectors(field, data, shape, code_bytes(format, last_of(shape), element_bytes), kDataAlignment);
    }
    template <class Data>
    static Tensor scales(VectorFormat format, const char* field, Data* data, std::initializer_list<int64_t> shape) {
        return vectors(field, data, shape, scale_bytes(format, last_of(shape)), format == VectorFormat::kFp8 ? 1 : 2);
    }
    template <class Data>
    static Tensor minima(VectorFormat format, const char* field, Data* data, std::initializer_list<int64_t> shape) {
        return vectors(field, data, shape, minimum_bytes(format, last_of(shape)), 2);
    }
    static Tensor optional(Tensor tensor) {
        tensor.optional = true;
        return tensor;
    }
    static uint64_t bytes(const char* field, std::initializer_list<int64_t> shape, int64_t size) {
        return checked_product(field, {static_cast<int64_t>(checked_product(field, shape)), size});
    }

private:
    static int64_t last_of(std::initializer_list<int64_t> shape) { return *std::prev(shape.end()); }

    /// A part of vectors that takes `size` bytes of each; where a format does not have it, its address is not looked at.
    template <class Data>
    static Tensor vectors(const char* field, Data* data, std::initializer_list<int64_t> shape, int64_t size,
                          uint64_t alignment) {
        if (size == 0) {
            return {field, nullptr, 0, 1, false, true};
        }
        const int64_t count = static_cast<int64_t>(checked_product(field, shape)) / last_of(shape);
        return {field, data, checked_product(field, {count, size}), alignment, !std::is_const_v<Data>, false};
    }
};

inline std::string address(const void* data) {
    char text[32];
    std::snprintf(text, sizeof(text), "%p", data);
    return data == nullptr ? "null" : text;
}

inline void check_address(const Tensor& tensor) {
    if (tensor.data == nullptr && !tensor.optional) {
        refuse(tensor.field, "null", "an address");
    }
    if (reinterpret_cast<uintptr_t>(tensor.data) % tensor.alignment != 0) {
        refuse(tensor.field, address(tensor.data), "a multiple of " + std::to_string(tensor.alignment) + " bytes");
    }
}

inline bool overlap(const Tensor& one, const Tensor& other) {
    const auto a = reinterpret_cast<uintptr_t>(one.data);
    const auto b = reinterpret_cast<uintptr_t>(other.data);
    return one.data != nullptr && other.data != nullptr && (a <= b ? b - a < one.bytes : a - b < other.bytes);
}

/// Memory that is written must not be read through another tensor, nor written through one.
inline void check_memory(const std::vector<Tensor>& tensors) {
    for (const Tensor& tensor : tensors) {
        check_address(tensor);
    }
    for (auto one = tensors.begin(); one != tensors.end(); ++one) {
        for (auto other = std::next(one); other != tensors.end(); ++other) {
            if ((one->written || other->written) && overlap(*one, *other)) {
                const Tensor& field = one->written ? *one : *other;
                const Tensor& second = one->written ? *other : *one;
                refuse(field.field, address(field.data), "memory apart from " + std::string(second.field));
            }
        }
    }
}

template <class Params>
TensorMaker maker(const Params& params) {
    const int64_t element_bytes = element_bytes_of(params.dtype);
    TensorMaker make{element_bytes, element_bytes, {}};
    if constexpr (requires { params.fp8_bounds; }) {
        make.bound_bytes = params.fp8_bounds != 0 ? 1 : element_bytes;
    }
    if constexpr (requires { params.cache_format; }) {
        make.formats = formats_of(params.cache_format);
    }
    return make;
}

}  // namespace kvc::checks

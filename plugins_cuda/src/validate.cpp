#include "src/validate.h"

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <limits>
#include <type_traits>
#include <vector>

#include "src/sizes.h"

namespace kvc {
namespace {

constexpr int64_t kLargestInt32 = std::numeric_limits<int32_t>::max();
constexpr int64_t kLargestInt64 = std::numeric_limits<int64_t>::max();
constexpr int64_t kLargestGrid = 65535;  // CUDA's limit for the second and third axis of a grid
constexpr int64_t kMostTokens = int64_t{1} << 20;
constexpr int32_t kLargestGroup = 16;
constexpr uint32_t kDataAlignment = 16;  // of one vector access

[[noreturn]] void refuse(const std::string& field, const std::string& value, const std::string& expected) {
    throw Error(KVC_INVALID_PARAMETER, field + " is " + value + "; expected " + expected);
}

// ---- Numbers

struct Range {
    const char* field;
    int64_t value;
    int64_t low;
    int64_t high;
    const char* reason = nullptr;  // what the upper end is, where it is another field
};

void check_ranges(std::initializer_list<Range> ranges) {
    for (const Range& range : ranges) {
        if (range.value < range.low || range.value > range.high) {
            const std::string why = range.reason == nullptr ? "" : " (" + std::string(range.reason) + ")";
            const std::string allowed = std::to_string(range.low) + ".." + std::to_string(range.high);
            refuse(range.field, std::to_string(range.value), allowed + why);
        }
    }
}

void check_multiple(const char* field, int64_t value, int64_t divisor, const char* reason = nullptr) {
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

/// The fields that all operations share.
template <class Params>
void check_shape(const Params& params) {
    check_ranges({{"dtype", params.dtype, KVC_FLOAT32, KVC_BFLOAT16},
                  {"batch", params.batch, 1, kLargestGrid},
                  {"heads", params.heads, 1, kLargestGrid},
                  {"kv_heads", params.kv_heads, 1, params.heads, "heads"},
                  {"head_size", params.head_size, 16, 256}});
    check_multiple("head_size", params.head_size, 8);
    check_multiple("heads", params.heads, params.kv_heads, "kv_heads");
    check_ranges({{"heads / kv_heads", params.heads / params.kv_heads, 1, kLargestGroup},
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

/// Makes the tensors of one call: the sizes are checked here, so a list of tensors is a list of sizes that fit.
struct TensorMaker {
    int64_t element_bytes;

    Tensor input(const char* field, const void* data, std::initializer_list<int64_t> shape) const {
        return {field, data, bytes(field, shape, element_bytes), kDataAlignment, false, false};
    }
    Tensor output(const char* field, void* data, std::initializer_list<int64_t> shape) const {
        return {field, data, bytes(field, shape, element_bytes), kDataAlignment, true, false};
    }
    template <class Integer>
    static Tensor integers(const char* field, Integer* data, std::initializer_list<int64_t> shape) {
        return {field, data, bytes(field, shape, sizeof(Integer)), sizeof(Integer), !std::is_const_v<Integer>, false};
    }
    static Tensor optional(Tensor tensor) {
        tensor.optional = true;
        return tensor;
    }
    static uint64_t bytes(const char* field, std::initializer_list<int64_t> shape, int64_t size) {
        return checked_product(field, {static_cast<int64_t>(checked_product(field, shape)), size});
    }
};

std::string address(const void* data) {
    char text[32];
    std::snprintf(text, sizeof(text), "%p", data);
    return data == nullptr ? "null" : text;
}

void check_address(const Tensor& tensor) {
    if (tensor.data == nullptr && !tensor.optional) {
        refuse(tensor.field, "null", "an address");
    }
    if (reinterpret_cast<uintptr_t>(tensor.data) % tensor.alignment != 0) {
        refuse(tensor.field, address(tensor.data), "a multiple of " + std::to_string(tensor.alignment) + " bytes");
    }
}

bool overlap(const Tensor& one, const Tensor& other) {
    const auto a = reinterpret_cast<uintptr_t>(one.data);
    const auto b = reinterpret_cast<uintptr_t>(other.data);
    return one.data != nullptr && other.data != nullptr && (a <= b ? b - a < one.bytes : a - b < other.bytes);
}

/// What is written must not be read through another tensor, nor written through one.
void check_memory(const std::vector<Tensor>& tensors) {
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
    return {params.dtype == KVC_FLOAT32 ? 4 : 2};
}

// ---- Compaction

/// Whether k and v lie in memory as a contiguous [B,G,S=C,D]; the stride of an axis of length 1 says nothing.
bool has_cache_layout(const KvcCompactParams& p) {
    const int64_t head_elements = p.prompt_length * p.head_size;
    return p.prompt_length == p.capacity && (p.prompt_length == 1 || p.kv_stride_token == p.head_size) &&
           (p.kv_heads == 1 || p.kv_stride_head == head_elements) &&
           (p.batch == 1 || p.kv_stride_batch == p.kv_heads * head_elements);
}

/// Bytes from the first to the last element of k (or v).
uint64_t strided_bytes(const char* field, const KvcCompactParams& p, int64_t element_bytes) {
    return checked_sum(field, {checked_product(field, {p.batch - 1, p.kv_stride_batch, element_bytes}),
                               checked_product(field, {p.kv_heads - 1, p.kv_stride_head, element_bytes}),
                               checked_product(field, {p.prompt_length - 1, p.kv_stride_token, element_bytes}),
                               checked_product(field, {p.head_size, element_bytes})});
}

void check_strides(const KvcCompactParams& p) {
    check_ranges({{"kv_stride_batch", p.kv_stride_batch, p.head_size, kLargestInt64},
                  {"kv_stride_head", p.kv_stride_head, p.head_size, kLargestInt64},
                  {"kv_stride_token", p.kv_stride_token, p.head_size, kLargestInt64}});
    check_multiple("kv_stride_batch", p.kv_stride_batch, 8);
    check_multiple("kv_stride_head", p.kv_stride_head, 8);
    check_multiple("kv_stride_token", p.kv_stride_token, 8);
}

std::vector<Tensor> tensors_of(const KvcCompactParams& p) {
    const TensorMaker make = maker(p);
    const int64_t pages = ceil_div(p.capacity, int64_t{p.page_size});
    std::vector<Tensor> tensors = {
        make.input("q_window", p.q_window, {p.batch, p.heads, p.window, p.head_size}),
        make.integers("prompt_lengths", p.prompt_lengths, {p.batch}),
        make.output("k_cache", p.k_cache, {p.batch, p.kv_heads, p.capacity, p.head_size}),
        make.output("v_cache", p.v_cache, {p.batch, p.kv_heads, p.capacity, p.head_size}),
        make.optional(make.output("bounds", p.bounds, {p.batch, p.kv_heads, 2, p.head_size, pages})),
        make.integers("cache_lengths", p.cache_lengths, {p.batch}),
        make.integers("indices", p.indices, {p.batch, p.kv_heads, p.capacity})};
    if (!compacts_in_place(p)) {
        tensors.push_back({"k", p.k, strided_bytes("k", p, make.element_bytes), kDataAlignment, false, false});
        tensors.push_back({"v", p.v, strided_bytes("v", p, make.element_bytes), kDataAlignment, false, false});
    }
    return tensors;
}

// ---- Attention

std::vector<Tensor> tensors_of(const KvcDenseAttentionParams& p) {
    const TensorMaker make = maker(p);
    return {make.input("query", p.query, {p.batch, p.heads, p.head_size}),
            make.input("k_new", p.k_new, {p.batch, p.kv_heads, p.head_size}),
            make.input("v_new", p.v_new, {p.batch, p.kv_heads, p.head_size}),
            make.output("k_cache", p.k_cache, {p.batch, p.kv_heads, p.capacity, p.head_size}),
            make.output("v_cache", p.v_cache, {p.batch, p.kv_heads, p.capacity, p.head_size}),
            make.integers("cache_lengths", p.cache_lengths, {p.batch}),
            make.output("output", p.output, {p.batch, p.heads, p.head_size})};
}

std::vector<Tensor> tensors_of(const KvcHybridAttentionParams& p) {
    const TensorMaker make = maker(p);
    const int64_t pages = ceil_div(p.capacity, int64_t{p.page_size});
    return {make.input("query", p.query, {p.batch, p.heads, p.head_size}),
            make.input("k_new", p.k_new, {p.batch, p.kv_heads, p.head_size}),
            make.input("v_new", p.v_new, {p.batch, p.kv_heads, p.head_size}),
            make.output("k_cache", p.k_cache, {p.batch, p.kv_heads, p.capacity, p.head_size}),
            make.output("v_cache", p.v_cache, {p.batch, p.kv_heads, p.capacity, p.head_size}),
            make.output("bounds", p.bounds, {p.batch, p.kv_heads, 2, p.head_size, pages}),
            make.integers("cache_lengths", p.cache_lengths, {p.batch}),
            make.output("output", p.output, {p.batch, p.heads, p.head_size}),
            make.optional(make.integers("selected", p.selected, {p.batch, p.kv_heads, p.selected_width}))};
}

}  // namespace

bool compacts_in_place(const KvcCompactParams& params) {
    return params.k_cache == params.k && params.v_cache == params.v && has_cache_layout(params);
}

void validate_sizes(const KvcCompactParams* params) {
    check_struct(params, "KvcCompactParams");
    const KvcCompactParams& p = *params;
    check_shape(p);
    check_ranges({{"window", p.window, 1, 1024},
                  {"pool_kernel", p.pool_kernel, 1, 4095},
                  {"page_size", p.page_size, 1, kLargestInt32},
                  {"prompt_length", p.prompt_length, 1, kMostTokens},
                  {"capacity", p.capacity, 1, kMostTokens},
                  {"prompt_budget", p.prompt_budget, 1, p.capacity, "capacity"}});
    if (p.pool_kernel % 2 == 0) {
        refuse("pool_kernel", std::to_string(p.pool_kernel), "an odd number");
    }
    if (p.prompt_length > p.prompt_budget) {
        check_ranges({{"window", p.window, 1, std::min<int64_t>(1024, p.prompt_budget), "prompt_budget"}});
    }
    check_strides(p);
    tensors_of(p);
}

void validate_sizes(const KvcHybridAttentionParams* params) {
    check_struct(params, "KvcHybridAttentionParams");
    const KvcHybridAttentionParams& p = *params;
    check_shape(p);
    check_ranges({{"page_size", p.page_size, 1, kLargestInt32},
                  {"top_r", p.top_r, 1, p.head_size, "head_size"},
                  {"capacity", p.capacity, 1, kMostTokens},
                  {"top_k", p.top_k, 1, p.capacity, "capacity"},
                  {"token_budget", p.token_budget, 0, kLargestInt32},
                  {"dense_until", p.dense_until, 0, kLargestInt32}});
    const int64_t width = std::max({p.top_k, p.token_budget, p.dense_until});
    check_ranges({{"selected_width", p.selected_width, width, width, "max(top_k, token_budget, dense_until)"}});
    tensors_of(p);
}

void validate_sizes(const KvcDenseAttentionParams* params) {
    check_struct(params, "KvcDenseAttentionParams");
    check_shape(*params);
    check_ranges({{"reserved", params->reserved, 0, 0}, {"capacity", params->capacity, 1, kMostTokens}});
    tensors_of(*params);
}

void validate(const KvcCompactParams* params) {
    validate_sizes(params);
    const KvcCompactParams& p = *params;
    if (p.k_cache == p.k && p.k != nullptr && !compacts_in_place(p)) {
        refuse("k_cache", address(p.k_cache), "memory apart from k (in place: v_cache is v, and k is contiguous with S = C)");
    }
    check_memory(tensors_of(p));
}

void validate(const KvcHybridAttentionParams* params) {
    validate_sizes(params);
    check_memory(tensors_of(*params));
}

void validate(const KvcDenseAttentionParams* params) {
    validate_sizes(params);
    check_memory(tensors_of(*params));
}

void validate_workspace(const void* workspace, uint64_t bytes, uint64_t needed) {
    if (needed == 0) {
        return;
    }
    check_address({"workspace", workspace, bytes, kDataAlignment, true, false});
    if (bytes < needed) {
        const std::string text = "workspace_bytes is " + std::to_string(bytes) + "; expected at least ";
        throw Error(KVC_WORKSPACE_TOO_SMALL, text + std::to_string(needed));
    }
}

void validate_result(const uint64_t* bytes) {
    if (bytes == nullptr) {
        refuse("bytes", "null", "an address");
    }
}

}  // namespace kvc

// The tables of include/kvc as checks: per struct the ranges of its numbers and the list of its tensors.
#include "src/validate.h"

#include <algorithm>
#include <vector>

#include "src/checks.h"

namespace kvc {
namespace {

using namespace checks;

// ---- Compaction

/// Whether k and v are contiguous tensors [B,G,S=C,D]. The stride of an axis of length 1 does not matter.
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
    check_ranges({{"window", p.window, 1, KVC_LARGEST_WINDOW},
                  {"pool_kernel", p.pool_kernel, 1, KVC_LARGEST_POOL_KERNEL},
                  {"page_size", p.page_size, 1, kLargestInt32},
                  {"prompt_length", p.prompt_length, 1, KVC_MOST_TOKENS},
                  {"capacity", p.capacity, 1, KVC_MOST_TOKENS},
                  {"prompt_budget", p.prompt_budget, 1, p.capacity, "capacity"}});
    if (p.pool_kernel % 2 == 0) {
        refuse("pool_kernel", std::to_string(p.pool_kernel), "an odd number");
    }
    if (p.prompt_length > p.prompt_budget) {
        check_ranges(
            {{"window", p.window, 1, std::min<int64_t>(KVC_LARGEST_WINDOW, p.prompt_budget), "prompt_budget"}});
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
                  {"capacity", p.capacity, 1, KVC_MOST_TOKENS},
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
    check_ranges({{"reserved", params->reserved, 0, 0}, {"capacity", params->capacity, 1, KVC_MOST_TOKENS}});
    tensors_of(*params);
}

void validate(const KvcCompactParams* params) {
    validate_sizes(params);
    const KvcCompactParams& p = *params;
    if (p.k_cache == p.k && p.k != nullptr && !compacts_in_place(p)) {
        refuse("k_cache", address(p.k_cache),
               "memory apart from k (in place: v_cache is v, and k is contiguous with S = C)");
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

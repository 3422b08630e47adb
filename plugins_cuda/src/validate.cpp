// The rules of include/kvc as checks: those of src/parameter_rules.h, and rules that involve several members.
#include "src/validate.h"

#include <vector>

#include "src/parameter_rules.h"

namespace kvc {
namespace {

using namespace checks;
using checks::tensors_of;  // beside the overload for KvcCompactParams

/// True if k and v are contiguous tensors [B,G,S=C,D]. The stride of an axis of length 1 does not matter.
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
    std::vector<Tensor> tensors = contiguous_tensors_of(p);
    if (!compacts_in_place(p)) {
        const int64_t element_bytes = maker(p).element_bytes;
        tensors.push_back({"k", p.k, strided_bytes("k", p, element_bytes), kDataAlignment, false, false});
        tensors.push_back({"v", p.v, strided_bytes("v", p, element_bytes), kDataAlignment, false, false});
    }
    return tensors;
}

/// Rows that have numbers of their own need them.
template <class Params>
void check_rows(const Params& p) {
    if (p.by_length == 0) return;
    for (const Tensor& tensor : {TensorMaker::numbers("prompt_budgets", p.prompt_budgets, {p.batch}),
                                 TensorMaker::numbers("pool_kernels", p.pool_kernels, {p.batch})}) {
        check_address(tensor);
    }
}

/// The sizes of an operation without rules of its own.
template <class Params>
void check_sizes(const Params* params, const char* type) {
    check_struct(params, type);
    check_numbers(*params);
    tensors_of(*params);
}

/// Sizes, then addresses.
template <class Params>
void check_all(const Params* params) {
    validate_sizes(params);
    check_memory(tensors_of(*params));
}

}  // namespace

bool compacts_in_place(const KvcCompactParams& params) {
    return params.cache_format == 0 && params.k_cache == params.k && params.v_cache == params.v &&
           has_cache_layout(params);
}

void validate_sizes(const KvcCompactParams* params) {
    check_struct(params, "KvcCompactParams");
    const KvcCompactParams& p = *params;
    check_numbers(p);
    if (p.prompt_length > p.prompt_budget) {
        check_ranges({{"window", p.window, 1, p.prompt_budget, "prompt_budget"}});
    }
    check_strides(p);
    tensors_of(p);
}

void validate_sizes(const KvcCompactTurnParams* params) {
    check_struct(params, "KvcCompactTurnParams");
    const KvcCompactTurnParams& p = *params;
    check_numbers(p);
    if (p.prompt_length > p.prompt_budget) {
        check_ranges({{"window", p.window, 1, p.prompt_budget, "prompt_budget"}});
    }
    tensors_of(p);
}

void validate_sizes(const KvcHybridAttentionParams* params) { check_sizes(params, "KvcHybridAttentionParams"); }
void validate_sizes(const KvcDenseAttentionParams* params) { check_sizes(params, "KvcDenseAttentionParams"); }
void validate_sizes(const KvcRotatedHybridAttentionParams* params) {
    check_sizes(params, "KvcRotatedHybridAttentionParams");
}
void validate_sizes(const KvcRotatedDenseAttentionParams* params) {
    check_sizes(params, "KvcRotatedDenseAttentionParams");
}
void validate_sizes(const KvcAppendBlockParams* params) { check_sizes(params, "KvcAppendBlockParams"); }
void validate_sizes(const KvcRaiseBoundsParams* params) { check_sizes(params, "KvcRaiseBoundsParams"); }
void validate_sizes(const KvcJoinBlockParams* params) { check_sizes(params, "KvcJoinBlockParams"); }
void validate_sizes(const KvcReplaceCacheParams* params) { check_sizes(params, "KvcReplaceCacheParams"); }
void validate_sizes(const KvcReplaceBoundsParams* params) { check_sizes(params, "KvcReplaceBoundsParams"); }

void validate(const KvcCompactParams* params) {
    validate_sizes(params);
    const KvcCompactParams& p = *params;
    if (p.k_cache == p.k && p.k != nullptr && !compacts_in_place(p)) {
        refuse("k_cache", address(p.k_cache),
               "memory apart from k (in place: v_cache is v, k is contiguous with S = C, no format)");
    }
    check_rows(p);
    check_memory(tensors_of(p));
}

void validate(const KvcCompactTurnParams* params) {
    check_all(params);
    check_rows(*params);
}
void validate(const KvcHybridAttentionParams* params) { check_all(params); }
void validate(const KvcDenseAttentionParams* params) { check_all(params); }
void validate(const KvcRotatedHybridAttentionParams* params) { check_all(params); }
void validate(const KvcRotatedDenseAttentionParams* params) { check_all(params); }
void validate(const KvcAppendBlockParams* params) { check_all(params); }
void validate(const KvcRaiseBoundsParams* params) { check_all(params); }
void validate(const KvcJoinBlockParams* params) { check_all(params); }
void validate(const KvcReplaceCacheParams* params) { check_all(params); }
void validate(const KvcReplaceBoundsParams* params) { check_all(params); }

void validate(const KvcPrefetchParams* params) {
    check_struct(params, "KvcPrefetchParams");
    check_ranges({{"bytes", params->bytes, 16, int64_t{1} << 40}});
    check_multiple("bytes", params->bytes, kDataAlignment);
    check_address({"first", params->first, static_cast<uint64_t>(params->bytes), kDataAlignment, false, false});
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

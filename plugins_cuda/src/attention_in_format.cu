// The attention of caches in a format: a source of its own, since its kernels are many and no operation's alone.
#include "src/attention.h"

namespace kvc {
namespace {

/// Calls `body` with the tag of the formats of a validated cache_format other than 0.
template <class Body>
void dispatch_formats(int32_t cache_format, Body&& body) {
    switch (cache_format) {
        case 1: return body(TypeTag<Int8Formats>{});
        case 2: return body(TypeTag<Fp8Formats>{});
        case 3: return body(TypeTag<Int4Formats>{});
        default: return body(TypeTag<K8V4Formats>{});
    }
}

}  // namespace

template <class T>
void launch_attention_in_format(int32_t cache_format, const dim3& grid, SparseAttentionParams<T> attention,
                                Stream& stream) {
    dispatch_formats(cache_format, [&](auto formats) {
        using Formats = typename decltype(formats)::Type;
        dispatch_head_size(attention.head_size, [&](auto head_size) {
            constexpr int kHeadSize = decltype(head_size)::value;
            attention.stages = stages_for<T, kHeadSize, Formats>(grid);
            const size_t bytes = attention_bytes<T, kHeadSize, Formats>(attention.stages);
            launch<sparse_attention_in_format<T, kHeadSize, Formats>>(
                "sparse_attention_in_format", grid, dim3(kAttentionThreads), bytes, stream, attention);
        });
    });
}

template void launch_attention_in_format(int32_t, const dim3&, SparseAttentionParams<float>, Stream&);
template void launch_attention_in_format(int32_t, const dim3&, SparseAttentionParams<half_t>, Stream&);
template void launch_attention_in_format(int32_t, const dim3&, SparseAttentionParams<bfloat16_t>, Stream&);

}  // namespace kvc

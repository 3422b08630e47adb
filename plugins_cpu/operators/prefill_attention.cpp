// KvcPrefillAttention: exact causal attention over the prompt, in tiles, over all rows, KV heads and blocks of queries.
#include <algorithm>
#include <memory>

#include "kernels/choice.h"
#include "operators/all.h"

namespace kvc {
namespace {

class PrefillAttentionKernel : public Kernel {
public:
    void compute(Call& call) const override {
        const Sizes& sizes = call.sizes();
        const int64_t heads = sizes[Symbol::kHeads], kv_heads = sizes[Symbol::kKvHeads];
        const int64_t length = sizes[Symbol::kPromptLength], size = sizes[Symbol::kHeadSize];
        require(kv_heads > 0 && heads % kv_heads == 0, "q: expected a multiple of ", kv_heads, " heads, found ", heads);
        require(size > 0, "q: expected a head size above 0");
        const int64_t group = heads / kv_heads;
        // A tile of keys is transposed once for all queries of a task: there should be several tiles of them.
        const int64_t rows = kPrefillTile * std::max<int64_t>(1, 4 / group);
        const int64_t blocks = (length + rows - 1) / rows, parts = sizes[Symbol::kBatch] * kv_heads;
        const float* const q = call.input<float>(0);
        const float* const k = call.input<float>(1);
        const float* const v = call.input<float>(2);
        float* const o = call.output<float>(0);
        call.parallel(static_cast<size_t>(parts * blocks), [&](size_t task) {
            // The last blocks are the longest and come first, so that no thread waits for one at the end.
            const int64_t part = static_cast<int64_t>(task) % parts,
                          block = blocks - 1 - static_cast<int64_t>(task) / parts;
            const int64_t first = block * rows, count = std::min(rows, length - first);
            const auto scratch =
                std::make_unique_for_overwrite<float[]>(static_cast<size_t>(prefill_scratch(count, group, size)));
            kernels().prefill({.q = q + part * group * length * size,
                               .k = k + part * length * size,
                               .v = v + part * length * size,
                               .o = o + part * group * length * size,
                               .length = length,
                               .group = group,
                               .head_size = size,
                               .first_row = first,
                               .rows = count,
                               .scratch = scratch.get()});
        });
    }
};

}  // namespace

const Implementation kPrefillAttentionImplementation{
    schemas::kKvcPrefillAttention,
    [](const Attributes&) -> std::unique_ptr<Kernel> { return std::make_unique<PrefillAttentionKernel>(); }};

}  // namespace kvc

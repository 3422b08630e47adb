// KvcExtendAttention: exact attention of a turn's new tokens to everything stored, and causally to each other, in tiles.
#include <memory>

#include "kernels/choice.h"
#include "operators/all.h"
#include "operators/causal_attention.h"

namespace kvc {
namespace {

class ExtendAttentionKernel : public Kernel {
public:
    void compute(Call& call) const override {
        const Sizes& sizes = call.sizes();
        const int64_t batch = sizes[Symbol::kBatch], heads = sizes[Symbol::kHeads], kv_heads = sizes[Symbol::kKvHeads];
        const int64_t entries = sizes[Symbol::kSymbolT], size = sizes[Symbol::kHeadSize];
        require(kv_heads > 0 && heads % kv_heads == 0, "q: expected a multiple of ", kv_heads, " heads, found ", heads);
        require(size > 0, "q: expected a head size above 0");
        const int64_t* const stored = call.input<int64_t>("cache_lengths");
        for (int64_t row = 0; row < batch; ++row) {
            require(stored[row] >= 0 && stored[row] < entries, "cache_lengths: expected 0..", entries - 1, ", found ",
                    stored[row]);
        }
        CausalAttention{.kernels = *kernels().prefill,
                        .q = call.input<float>(0),
                        .tables = call.input_tables("k"),
                        .o = call.output<float>(0),
                        .batch = batch,
                        .kv_heads = kv_heads,
                        .group = heads / kv_heads,
                        .size = size,
                        .length = entries,
                        .queries = sizes[Symbol::kBlock],
                        .before = stored}
            .run(call);
    }
};

}  // namespace

const Implementation kExtendAttentionImplementation{
    schemas::kKvcExtendAttention,
    [](const Attributes&) -> std::unique_ptr<Kernel> { return std::make_unique<ExtendAttentionKernel>(); }};

}  // namespace kvc

// KvcPrefillAttention: exact causal attention over the prompt, in tiles; the queries belong to the last M tokens.
#include <memory>
#include <vector>

#include "kernels/choice.h"
#include "operators/all.h"
#include "operators/causal_attention.h"

namespace kvc {
namespace {

class PrefillAttentionKernel : public Kernel {
public:
    explicit PrefillAttentionKernel(const Attributes& attributes) : bf16_(attributes.flag("bf16")) {}

    void compute(Call& call) const override {
        const Kernels& set = kernels();  // one set per call: each lays out keys in its own way
        const PrefillKernels* const chosen = bf16_ ? set.prefill_bf16 : set.prefill;
        require(chosen != nullptr, "attribute bf16: the instruction set ", set.name, " multiplies no bfloat16");
        const Sizes& sizes = call.sizes();
        const int64_t heads = sizes[Symbol::kHeads], kv_heads = sizes[Symbol::kKvHeads];
        const int64_t length = sizes[Symbol::kPromptLength], size = sizes[Symbol::kHeadSize];
        const int64_t queries = sizes[Symbol::kBlock], before = length - queries;
        // Whole tiles come before the queries, so that slices of a prompt give the same bits as the whole prompt.
        require(before >= 0 && before % kPrefillTile == 0, "q: expected the last queries of ", length,
                " tokens behind a multiple of ", kPrefillTile, ", found ", queries);
        require(kv_heads > 0 && heads % kv_heads == 0, "q: expected a multiple of ", kv_heads, " heads, found ", heads);
        require(size > 0, "q: expected a head size above 0");
        const std::vector<int64_t> places(static_cast<size_t>(sizes[Symbol::kBatch]), before);
        CausalAttention{.kernels = *chosen,
                        .q = call.input<float>(0),
                        .tables = call.input_tables("k"),
                        .o = call.output<float>(0),
                        .batch = sizes[Symbol::kBatch],
                        .kv_heads = kv_heads,
                        .group = heads / kv_heads,
                        .size = size,
                        .length = length,
                        .queries = queries,
                        .before = places.data()}
            .run(call);
    }

private:
    bool bf16_;
};

}  // namespace

const Implementation kPrefillAttentionImplementation{schemas::kKvcPrefillAttention,
                                                     [](const Attributes& attributes) -> std::unique_ptr<Kernel> {
                                                         return std::make_unique<PrefillAttentionKernel>(attributes);
                                                     }};

}  // namespace kvc

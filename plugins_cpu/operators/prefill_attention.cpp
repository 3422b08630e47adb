// KvcPrefillAttention: exact causal attention over the prompt, in tiles, over all rows, KV heads and blocks of queries,
// which are those of the last M tokens.
#include <algorithm>
#include <memory>

#include "kernels/choice.h"
#include "operators/all.h"
#include "operators/scratch.h"

namespace kvc {
namespace {

/// As many KV heads as have so many keys together are laid out and attended to at once.
constexpr int64_t kKeysAtOnce = 1 << 14;

class PrefillAttentionKernel : public Kernel {
public:
    explicit PrefillAttentionKernel(const Attributes& attributes) : bf16_(attributes.flag("bf16")) {}

    void compute(Call& call) const override {
        const Kernels& set = kernels();  // one set throughout: each lays out keys in its own way
        const PrefillKernels* const chosen = bf16_ ? set.prefill_bf16 : set.prefill;
        require(chosen != nullptr, "attribute bf16: the instruction set ", set.name, " multiplies no bfloat16");
        const Sizes& sizes = call.sizes();
        const int64_t heads = sizes[Symbol::kHeads], kv_heads = sizes[Symbol::kKvHeads];
        const int64_t length = sizes[Symbol::kPromptLength], size = sizes[Symbol::kHeadSize];
        const int64_t queries = sizes[Symbol::kBlock], before = length - queries;
        require(before >= 0 && before % kPrefillTile == 0, "q: expected the last queries of ", length,
                " tokens behind a multiple of ", kPrefillTile, ", found ", queries);
        require(kv_heads > 0 && heads % kv_heads == 0, "q: expected a multiple of ", kv_heads, " heads, found ", heads);
        require(size > 0, "q: expected a head size above 0");
        if (queries == 0) return;
        const Prompt prompt{.kernels = *chosen,
                            .q = call.input<float>(0),
                            .k = call.input<float>(1),
                            .v = call.input<float>(2),
                            .o = call.output<float>(0),
                            .length = length,
                            .queries = queries,
                            .group = heads / kv_heads,
                            .size = size};
        const int64_t parts = sizes[Symbol::kBatch] * kv_heads;
        const int64_t at_once = std::min(parts, std::max<int64_t>(1, kKeysAtOnce / length));
        const Scratch layout = aligned(at_once * prompt.layout_bytes());
        for (int64_t first = 0; first < parts; first += at_once) {
            const int64_t count = std::min(at_once, parts - first);
            lay_out(call, prompt, first, count, layout.get());
            attend(call, prompt, first, count, layout.get());
        }
    }

private:
    struct Prompt {
        const PrefillKernels& kernels;
        const float *q, *k, *v;
        float* o;
        int64_t length, queries, group, size;

        int64_t tiles() const { return (length + kPrefillTile - 1) / kPrefillTile; }
        int64_t layout_bytes() const { return tiles() * kernels.bytes_of_tile(size); }
    };

    static void lay_out(const Call& call, const Prompt& prompt, int64_t first, int64_t count, uint8_t* layout) {
        const int64_t head = prompt.length * prompt.size;
        call.parallel(static_cast<size_t>(count * prompt.tiles()), [&](size_t task) {
            const int64_t part = static_cast<int64_t>(task) / prompt.tiles();
            const int64_t tile = static_cast<int64_t>(task) % prompt.tiles();
            prompt.kernels.lay_out(prompt.k + (first + part) * head, prompt.v + (first + part) * head, prompt.length,
                                   prompt.size, tile * kPrefillTile, layout + part * prompt.layout_bytes());
        });
    }

    static void attend(const Call& call, const Prompt& prompt, int64_t first, int64_t count, const uint8_t* layout) {
        // Several tiles of queries share what is read of the keys.
        const int64_t rows = kPrefillTile * std::max<int64_t>(1, 4 / prompt.group);
        const int64_t blocks = (prompt.queries + rows - 1) / rows, head = prompt.queries * prompt.size;
        call.parallel(static_cast<size_t>(count * blocks), [&](size_t task) {
            // The last blocks are the longest and come first, so that no thread waits for one at the end.
            const int64_t part = static_cast<int64_t>(task) % count;
            const int64_t row = (blocks - 1 - static_cast<int64_t>(task) / count) * rows;
            const int64_t here = std::min(rows, prompt.queries - row), start = (first + part) * prompt.group * head;
            const Scratch scratch = aligned(prefill_scratch(here, prompt.group, prompt.size) * int64_t{sizeof(float)});
            prompt.kernels.attend({.q = prompt.q + start,
                                   .layout = layout + part * prompt.layout_bytes(),
                                   .o = prompt.o + start,
                                   .length = prompt.length,
                                   .queries = prompt.queries,
                                   .group = prompt.group,
                                   .head_size = prompt.size,
                                   .first_row = row,
                                   .rows = here,
                                   .scratch = reinterpret_cast<float*>(scratch.get())});
        });
    }

    bool bf16_;
};

}  // namespace

const Implementation kPrefillAttentionImplementation{schemas::kKvcPrefillAttention,
                                                     [](const Attributes& attributes) -> std::unique_ptr<Kernel> {
                                                         return std::make_unique<PrefillAttentionKernel>(attributes);
                                                     }};

}  // namespace kvc

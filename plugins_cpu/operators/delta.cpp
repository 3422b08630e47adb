// KvcDeltaStep and KvcDeltaRule: a linear layer takes in one token of each row, or many, and is read after each.
//
// Both pass tokens through the memory one by one, as the definition says. The memory of a head stays in the nearest
// caches meanwhile, so that a prompt takes less time than by chunks, whose products are many and small.
#include <algorithm>
#include <cmath>
#include <memory>

#include "kernels/choice.h"
#include "operators/all.h"
#include "operators/scratch.h"

namespace kvc {
namespace {

class Delta : public Kernel {
public:
    explicit Delta(bool many) : many_(many) {}

    void compute(Call& call) const override {
        const Kernels& set = kernels();
        const Sizes& sizes = call.sizes();
        const int64_t rows = sizes[Symbol::kBatch], tokens = many_ ? sizes[Symbol::kBlock] : 1;
        const int64_t heads = sizes[Symbol::kSymbolValueHeads], channels = sizes[Symbol::kSymbolChannels];
        const int64_t key_size = sizes[Symbol::kSymbolKeySize], value_size = sizes[Symbol::kSymbolValueSize];
        const int64_t kernel = sizes[Symbol::kSymbolKernel], values = heads * value_size,
                      keys = (channels - values) / 2;
        require(key_size > 0 && value_size > 0 && keys > 0 && channels == 2 * keys + values && keys % key_size == 0,
                "mixed: expected channels of queries, keys and ", values, " values, found ", channels);
        const int64_t key_heads = keys / key_size;
        require(heads % key_heads == 0, "memory: expected a multiple of ", key_heads, " heads, found ", heads);
        require(sizes[Symbol::kSymbolBefore] == kernel - 1, "last_inputs: expected ", kernel - 1, " tokens, found ",
                sizes[Symbol::kSymbolBefore]);
        const int64_t* const lengths = many_ ? call.input<int64_t>("lengths") : nullptr;
        for (int64_t row = 0; many_ && row < rows; ++row) {
            require(lengths[row] >= 0 && lengths[row] <= tokens, "lengths: expected 0..", tokens, ", found ",
                    lengths[row]);
        }
        const auto length = [&](int64_t row) { return many_ ? lengths[row] : int64_t{1}; };
        const float* const mixed = call.input<float>("mixed");
        const float* const before = call.input<float>("last_inputs");
        const float* const rates = call.input<float>("decay_log");
        float* const output = call.output<float>(0);
        float* const memory = call.updated<float>("memory");
        call.parallel(static_cast<size_t>(rows * heads), [&](size_t task) {
            const int64_t row = static_cast<int64_t>(task) / heads, head = static_cast<int64_t>(task) % heads;
            const int64_t key_head = head / (heads / key_heads), first = row * tokens;
            const Scratch scratch = aligned(delta_scratch(kernel, key_size, value_size) * int64_t{sizeof(float)});
            float* const read = output + (first * heads + head) * value_size;
            set.take_tokens({.mixed = mixed + first * channels,
                             .before = before + row * (kernel - 1) * channels,
                             .convolution = call.input<float>("convolution"),
                             .write = call.input<float>("write") + first * heads + head,
                             .decay = call.input<float>("decay") + first * heads + head,
                             .memory = memory + (row * heads + head) * key_size * value_size,
                             .read = read,
                             .tokens = length(row),
                             .channels = channels,
                             .heads = heads,
                             .kernel = kernel,
                             .key_size = key_size,
                             .value_size = value_size,
                             .query = key_head * key_size,
                             .key = keys + key_head * key_size,
                             .value = 2 * keys + head * value_size,
                             .rate = std::exp(rates[head]),
                             .decay_bias = call.input<float>("decay_bias")[head],
                             .scratch = reinterpret_cast<float*>(scratch.get())});
            for (int64_t token = length(row); token < tokens; ++token) {
                std::fill_n(read + token * heads * value_size, value_size, 0.0f);
            }
        });
        keep_last(call.updated<float>("last_inputs"), mixed, rows, tokens, kernel - 1, channels, length);
    }

private:
    /// Overwrites the convolution's inputs of earlier tokens with those of each row's last tokens.
    template <class Length>
    static void keep_last(float* kept, const float* mixed, int64_t rows, int64_t tokens, int64_t places,
                          int64_t channels, const Length& length) {
        for (int64_t row = 0; row < rows; ++row) {
            float* const target = kept + row * places * channels;
            const int64_t fresh = std::min(length(row), places), old = places - fresh;
            std::copy(target + fresh * channels, target + places * channels, target);
            std::copy_n(mixed + (row * tokens + length(row) - fresh) * channels, fresh * channels,
                        target + old * channels);
        }
    }

    bool many_;
};

}  // namespace

const Implementation kDeltaRuleImplementation{
    schemas::kKvcDeltaRule, [](const Attributes&) -> std::unique_ptr<Kernel> { return std::make_unique<Delta>(true); }};
const Implementation kDeltaStepImplementation{schemas::kKvcDeltaStep, [](const Attributes&) -> std::unique_ptr<Kernel> {
                                                  return std::make_unique<Delta>(false);
                                              }};

}  // namespace kvc

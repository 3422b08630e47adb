// KvcQuantisedLinear: the product with a matrix in 4 or 8 bits, read in place from the mapped weight file.
#include <algorithm>
#include <memory>

#include "kernels/choice.h"
#include "operators/all.h"
#include "operators/rounded.h"
#include "operators/scratch.h"

namespace kvc {
namespace {

/// Tokens that are rounded at once: their levels should stay in the last-level cache while all panels pass over them.
/// A wide input is rounded to as many tokens in all.
constexpr int64_t kTokensAtOnce = 1024;
/// Packed bytes of the rows that one task multiplies with at most this many tokens; with more, it takes one panel.
constexpr int64_t kBytesOfTask = 1 << 16, kTokensOfShortTask = 64;

class QuantisedLinear : public Kernel {
public:
    explicit QuantisedLinear(const Attributes& attributes)
        : bits_(static_cast<int>(attributes.integer("bits"))),
          wide_(attributes.flag("wide_input")),
          in_features_(attributes.integer("in_features", 1)),
          out_features_(attributes.integer("out_features", 1)) {
        const int64_t block = attributes.integer("block");
        require(bits_ == 4 || bits_ == 8, "attribute bits: expected 4 or 8, found ", bits_);
        require(block == kQuantisedBlock, "attribute block: expected ", kQuantisedBlock, ", found ", block);
        require(in_features_ % block == 0, "attribute in_features: expected a multiple of ", block, ", found ",
                in_features_);
    }

    void compute(Call& call) const override {
        const Kernels& set = kernels();  // one set per call: each orders rounded tokens in its own way
        call.fix(Symbol::kSymbolIn, in_features_, "attribute in_features");
        call.fix(Symbol::kSymbolOut, out_features_, "attribute out_features");
        call.fix(Symbol::kSymbolBlocks, in_features_ / kQuantisedBlock, "attribute in_features");
        call.fix(Symbol::kSymbolBytes, kQuantisedBlock * bits_ / 8, "attribute bits");
        const int64_t tokens = call.sizes()[Symbol::kSymbolT];
        const QuantisedMatrix matrix{.packed = call.input<uint8_t>(1),
                                     .scales = call.input<uint16_t>(2),
                                     .rows = out_features_,
                                     .blocks = in_features_ / kQuantisedBlock,
                                     .bits = bits_};
        const float* const x = call.input<float>(0);
        float* const y = call.output<float>(0);
        const Order order = order_of(tokens);
        const int64_t at_once = std::min(tokens, wide_ ? kTokensAtOnce / 2 : kTokensAtOnce);
        const Rounded rounded(wide_ ? 2 * at_once : at_once, matrix.blocks);
        for (int64_t first = 0; first < tokens; first += at_once) {
            const int64_t count = std::min(tokens - first, at_once);
            const RoundedParts parts = rounded.wide(0, count, order);
            round(call, set, x + first * in_features_, parts);
            multiply(call, set, matrix, parts, y + first * out_features_);
        }
    }

private:
    void round(const Call& call, const Kernels& set, const float* x, const RoundedParts& parts) const {
        constexpr int64_t at_once = 16;
        const int64_t tokens = parts.levels.tokens;
        call.parallel(static_cast<size_t>((tokens + at_once - 1) / at_once), [&](size_t task) {
            const int64_t first = static_cast<int64_t>(task) * at_once, last = std::min(first + at_once, tokens);
            if (!wide_) return set.round_input(x, bits_, first, last, parts.levels, nullptr);
            round_wide(set, x, bits_, first, last, parts);
        });
    }

    void multiply(const Call& call, const Kernels& set, const QuantisedMatrix& matrix, const RoundedParts& parts,
                  float* y) const {
        const int64_t by_bytes = kBytesOfTask / (matrix.blocks * 4 * bits_) / kWidestPanel * kWidestPanel;
        // At least eight tasks, so that no thread waits long for another's last one.
        const int64_t even = matrix.rows / 8 / kWidestPanel * kWidestPanel;
        const bool is_short = parts.levels.tokens <= kTokensOfShortTask;
        const int64_t rows = is_short ? std::max(std::min(by_bytes, even), kWidestPanel) : kWidestPanel;
        call.parallel(static_cast<size_t>((matrix.rows + rows - 1) / rows), [&](size_t task) {
            const int64_t first = static_cast<int64_t>(task) * rows, last = std::min(first + rows, matrix.rows);
            if (!wide_) return set.multiply(matrix, parts.levels, first, last, y, matrix.rows);
            multiply_wide(set, matrix, parts, first, last, y);
        });
    }

    int bits_;
    bool wide_;
    int64_t in_features_, out_features_;
};

}  // namespace

const Implementation kQuantisedLinearImplementation{schemas::kKvcQuantisedLinear,
                                                    [](const Attributes& attributes) -> std::unique_ptr<Kernel> {
                                                        return std::make_unique<QuantisedLinear>(attributes);
                                                    }};

}  // namespace kvc

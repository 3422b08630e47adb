// KvcExperts, KvcQuantisedExperts, and both with a clamped gate: a router chooses some experts for each token, and only
// their matrices are read.
//
// All pairs of a token and one of its experts are sorted by expert. A batch of pairs passes through gate and up, their
// product and down, each divided among threads over all experts of the batch: a step of one token waits three times,
// however many experts it has.
#include <algorithm>
#include <cmath>
#include <memory>
#include <optional>
#include <vector>

#include "kernels/choice.h"
#include "operators/all.h"
#include "operators/rounded.h"
#include "operators/scratch.h"

namespace kvc {
namespace {

/// Pairs that are computed at once: their activations take memory beside the input.
constexpr int64_t kPairsAtOnce = 1024;
/// With at most this many tokens of an expert on average, rows are read once for all of them instead of panel by panel.
constexpr int64_t kNarrow = 24;
/// Rows of a matrix, and tokens, per task.
constexpr int64_t kRowsOfTask = kLinearPanel, kTokensOfTask = 16;

int64_t parts_of(int64_t count, int64_t size) { return (count + size - 1) / size; }

/// The pairs of one expert in a batch.
struct Piece {
    int64_t expert;
    int64_t first;  ///< row of its first pair in the batch
    int64_t count;
};
using Batch = std::vector<Piece>;

/// A product of a batch's rows with the matrices of one input of the operator.
struct Product {
    size_t input;
    float* y;  ///< [pairs, out]
};

/// What experts with a clamped gate have in addition.
struct Clamping {
    const float* router;  ///< biases [experts]
    const float* gate;    ///< biases [experts, inner]
    const float* up;      ///< likewise
    const float* down;    ///< biases [experts, in]
    float limit;
    float gain;
};

/// The experts of all tokens.
class Routing {
public:
    /// Chooses from logits [tokens, experts]: the largest ones, equal ones the lowest index first.
    Routing(const float* logits, int64_t tokens, int64_t experts, int64_t chosen, bool normalised)
        : tokens_(tokens),
          chosen_(chosen),
          starts_(static_cast<size_t>(experts + 1)),
          experts_(static_cast<size_t>(tokens * chosen)),
          tokens_of_(experts_.size()),
          places_(experts_.size()),
          shares_(experts_.size()) {
        for (int64_t token = 0; token < tokens; ++token) {
            choose(logits + token * experts, experts, normalised, experts_.data() + token * chosen,
                   shares_.data() + token * chosen);
        }
        for (const int64_t expert : experts_) ++starts_[static_cast<size_t>(expert) + 1];
        for (size_t expert = 1; expert < starts_.size(); ++expert) starts_[expert] += starts_[expert - 1];
        std::vector<int64_t> next(starts_);
        for (size_t pair = 0; pair < experts_.size(); ++pair) {
            const int64_t place = next[static_cast<size_t>(experts_[pair])]++;
            tokens_of_[static_cast<size_t>(place)] = static_cast<int64_t>(pair) / chosen;
            places_[pair] = place;
        }
    }

    int64_t pairs() const { return tokens_ * chosen_; }

    /// The token of each pair, by expert.
    const int64_t* tokens() const { return tokens_of_.data(); }

    /// The pieces of pairs first..last-1.
    Batch batch(int64_t first, int64_t last) const {
        Batch pieces;
        for (size_t expert = 0; expert + 1 < starts_.size(); ++expert) {
            const int64_t begin = std::max(first, starts_[expert]), end = std::min(last, starts_[expert + 1]);
            if (begin < end) pieces.push_back({static_cast<int64_t>(expert), begin - first, end - begin});
        }
        return pieces;
    }

    /// Adds to y [tokens, width] what pairs first..last-1 have made, [pairs, width], for one token; `biases`
    /// [experts, width] are added to it before, unless they are null.
    void add(int64_t token, const float* made, const float* biases, int64_t first, int64_t last, int64_t width,
             float* y) const {
        for (int64_t pair = token * chosen_; pair < (token + 1) * chosen_; ++pair) {
            const int64_t place = places_[static_cast<size_t>(pair)];
            if (place < first || place >= last) continue;
            const float share = shares_[static_cast<size_t>(pair)];
            const float* const row = made + (place - first) * width;
            float* const target = y + token * width;
            if (biases == nullptr) {
                for (int64_t i = 0; i < width; ++i) target[i] += share * row[i];
                continue;
            }
            const float* const bias = biases + experts_[static_cast<size_t>(pair)] * width;
            for (int64_t i = 0; i < width; ++i) target[i] += share * (row[i] + bias[i]);
        }
    }

private:
    /// Writes one token's experts in ascending order, and their shares.
    void choose(const float* logits, int64_t experts, bool normalised, int64_t* taken, float* shares) const {
        std::vector<int64_t> order(static_cast<size_t>(experts));
        for (int64_t expert = 0; expert < experts; ++expert) order[static_cast<size_t>(expert)] = expert;
        const auto rank = [&](int64_t expert) { return std::isnan(logits[expert]) ? -INFINITY : logits[expert]; };
        const auto better = [&](int64_t one, int64_t other) {
            return rank(one) != rank(other) ? rank(one) > rank(other) : one < other;
        };
        std::partial_sort(order.begin(), order.begin() + chosen_, order.end(), better);
        std::copy_n(order.begin(), chosen_, taken);
        std::sort(taken, taken + chosen_);
        const float largest = rank(order[0]);
        float total = 0.0f;
        for (int64_t expert = 0; expert < experts; ++expert) total += std::exp(logits[expert] - largest);
        float sum = 0.0f;
        for (int64_t i = 0; i < chosen_; ++i) sum += shares[i] = std::exp(logits[taken[i]] - largest) / total;
        if (!normalised) return;
        for (int64_t i = 0; i < chosen_; ++i) shares[i] /= sum;
    }

    int64_t tokens_, chosen_;
    std::vector<int64_t> starts_;
    std::vector<int64_t> experts_;    ///< of each token's pairs in turn
    std::vector<int64_t> tokens_of_;  ///< of each pair, by expert
    std::vector<int64_t> places_;     ///< of each token's pairs among those by expert
    std::vector<float> shares_;
};

class AnyExperts : public Kernel {
public:
    AnyExperts(const Attributes& attributes, bool clamped)
        : chosen_(attributes.integer("chosen", 1)), normalised_(attributes.flag("normalised")), clamped_(clamped) {}

    void compute(Call& call) const override {
        const Kernels& set = kernels();  // one set per call: each orders rounded tokens in its own way
        const int64_t tokens = call.sizes()[Symbol::kSymbolT], width = call.sizes()[Symbol::kSymbolIn];
        const int64_t experts = call.sizes()[Symbol::kSymbolExperts], inner = call.sizes()[Symbol::kSymbolInner];
        require(chosen_ <= experts, "attribute chosen: expected at most ", experts, " experts, found ", chosen_);
        require(width > 0 && inner > 0, "x: expected columns");
        check(call);
        const float* const x = call.input<float>(0);
        float* const y = call.output<float>(0);
        std::fill_n(y, tokens * width, 0.0f);
        if (tokens == 0) return;
        const std::optional<Clamping> clamping = clamping_of(call);
        const Routing routing = route(call, set, x, tokens, experts, clamping ? clamping->router : nullptr);
        const int64_t most = std::min(routing.pairs(), kPairsAtOnce);
        const Scratch memory = aligned(most * (2 * width + 2 * inner) * int64_t{sizeof(float)});
        float* const rows = reinterpret_cast<float*>(memory.get());
        float* const made = rows + most * width;
        float* const gate = made + most * width;
        float* const up = gate + most * inner;
        for (int64_t first = 0; first < routing.pairs(); first += most) {
            const int64_t last = std::min(first + most, routing.pairs());
            const Batch batch = routing.batch(first, last);
            for (int64_t pair = first; pair < last; ++pair) {
                std::copy_n(x + routing.tokens()[pair] * width, width, rows + (pair - first) * width);
            }
            multiply(call, set, batch, rows, width, inner, {{kGate, gate}, {kUp, up}});
            by_tokens(call, last - first, [&](int64_t begin, int64_t end) {
                if (!clamping) return set.gate({gate, up, gate, inner, inner}, begin, end);
                clamp(set, *clamping, batch, gate, up, inner, begin, end);
            });
            multiply(call, set, batch, gate, inner, width, {{kDown, made}});
            by_tokens(call, tokens, [&](int64_t begin, int64_t end) {
                const float* const biases = clamping ? clamping->down : nullptr;
                for (int64_t token = begin; token < end; ++token) {
                    routing.add(token, made, biases, first, last, width, y);
                }
            });
        }
    }

protected:
    /// The matrices, in the order of the operator's inputs.
    static constexpr size_t kGate = 0, kUp = 1, kDown = 2;

    /// The average number of tokens of an expert, rounded up. It decides how a call adds up: if an expert's own number
    /// of tokens did, a token's result would depend on the choices of the tokens beside it.
    int64_t average(const Call& call) const {
        return parts_of(call.sizes()[Symbol::kSymbolT] * chosen_, call.sizes()[Symbol::kSymbolExperts]);
    }

    /// Checks the sizes that follow from attributes.
    virtual void check(Call& call) const = 0;

    /// Multiplies the rows x [pairs, in] of a batch by the matrices [out, in] of their experts, for each product.
    virtual void multiply(const Call& call, const Kernels& set, const Batch& batch, const float* x, int64_t in,
                          int64_t out, const std::vector<Product>& products) const = 0;

    /// Calls work(piece, product, first row, last row) for all rows of all matrices.
    template <typename Work>
    static void by_rows(const Call& call, const Batch& batch, size_t products, int64_t out, const Work& work) {
        const size_t parts = static_cast<size_t>(parts_of(out, kRowsOfTask));
        call.parallel(batch.size() * products * parts, [&](size_t task) {
            const int64_t first = static_cast<int64_t>(task % parts) * kRowsOfTask;
            const size_t matrix = task / parts;
            work(batch[matrix / products], matrix % products, first, std::min(first + kRowsOfTask, out));
        });
    }

    /// Calls work(first, last) for all of some rows.
    template <typename Work>
    static void by_tokens(const Call& call, int64_t rows, const Work& work) {
        call.parallel(static_cast<size_t>(parts_of(rows, kTokensOfTask)), [&](size_t task) {
            const int64_t first = static_cast<int64_t>(task) * kTokensOfTask;
            work(first, std::min(first + kTokensOfTask, rows));
        });
    }

private:
    std::optional<Clamping> clamping_of(const Call& call) const {
        if (!clamped_) return std::nullopt;
        const int64_t numbers = call.sizes()[Symbol::kOne];
        require(numbers == 1, "gate_limit: expected 1 number, found ", numbers);
        return Clamping{.router = call.input<float>("router_bias"),
                        .gate = call.input<float>("gate_bias"),
                        .up = call.input<float>("up_bias"),
                        .down = call.input<float>("down_bias"),
                        .limit = *call.input<float>("gate_limit"),
                        .gain = *call.input<float>("gate_gain")};
    }

    /// Applies the clamped gate to rows first..last-1 of a batch, in place of `gate`.
    static void clamp(const Kernels& set, const Clamping& clamping, const Batch& batch, float* gate, const float* up,
                      int64_t inner, int64_t first, int64_t last) {
        for (const Piece& piece : batch) {
            const ClampedGateCall call{.gate = gate,
                                       .up = up,
                                       .gate_bias = clamping.gate + piece.expert * inner,
                                       .up_bias = clamping.up + piece.expert * inner,
                                       .target = gate,
                                       .size = inner,
                                       .limit = clamping.limit,
                                       .gain = clamping.gain};
            set.clamped_gate(call, std::max(first, piece.first), std::min(last, piece.first + piece.count));
        }
    }

    /// Chooses the experts of all tokens; `biases` [experts] are added to the logits, unless they are null.
    Routing route(const Call& call, const Kernels& set, const float* x, int64_t tokens, int64_t experts,
                  const float* biases) const {
        std::vector<float> logits(static_cast<size_t>(tokens * experts));
        const int64_t width = call.sizes()[Symbol::kSymbolIn];
        by_tokens(call, tokens, [&](int64_t first, int64_t last) {
            const NarrowCall product{.x = x + first * width,
                                     .matrix = call.input<float>(1),
                                     .y = logits.data() + first * experts,
                                     .tokens = last - first,
                                     .in = width,
                                     .out = experts};
            set.multiply_narrow(product, 0, experts);
            if (biases == nullptr) return;
            for (int64_t i = 0; i < product.tokens * experts; ++i) product.y[i] += biases[i % experts];
        });
        return {logits.data(), tokens, experts, chosen_, normalised_};
    }

    int64_t chosen_;
    bool normalised_, clamped_;
};

class Experts : public AnyExperts {
public:
    using AnyExperts::AnyExperts;

protected:
    void check(Call&) const override {}

    void multiply(const Call& call, const Kernels& set, const Batch& batch, const float* x, int64_t in, int64_t out,
                  const std::vector<Product>& products) const override {
        const bool narrow = average(call) <= kNarrow;
        by_rows(
            call, batch, products.size(), out, [&](const Piece& piece, size_t product, int64_t first, int64_t last) {
                const float* const matrix = call.input<float>(2 + products[product].input) + piece.expert * out * in;
                const float* const rows = x + piece.first * in;
                float* const y = products[product].y + piece.first * out;
                if (narrow) {
                    set.multiply_narrow({rows, matrix, y, piece.count, in, out}, first, last);
                    return;
                }
                const Scratch scratch = aligned(kLinearScratch);
                set.linear->multiply({.x = rows,
                                      .matrix = matrix,
                                      .y = y,
                                      .tokens = piece.count,
                                      .in = in,
                                      .out = out,
                                      .first_row = first,
                                      .rows = last - first,
                                      .scratch = scratch.get()});
            });
    }
};

class QuantisedExperts : public AnyExperts {
public:
    QuantisedExperts(const Attributes& attributes, bool clamped)
        : AnyExperts(attributes, clamped),
          bits_(static_cast<int>(attributes.integer("bits"))),
          wide_(attributes.flag("wide_input")) {
        const int64_t block = attributes.integer("block");
        require(bits_ == 4 || bits_ == 8, "attribute bits: expected 4 or 8, found ", bits_);
        require(block == kQuantisedBlock, "attribute block: expected ", kQuantisedBlock, ", found ", block);
    }

protected:
    void check(Call& call) const override {
        const int64_t width = call.sizes()[Symbol::kSymbolIn], inner = call.sizes()[Symbol::kSymbolInner];
        for (const int64_t size : {width, inner}) {
            require(size % kQuantisedBlock == 0, "x: expected columns in multiples of ", kQuantisedBlock, ", found ",
                    size);
        }
        call.fix(Symbol::kSymbolInBlocks, width / kQuantisedBlock, "x");
        call.fix(Symbol::kSymbolInnerBlocks, inner / kQuantisedBlock, "down_packed");
        call.fix(Symbol::kSymbolBytes, kQuantisedBlock * bits_ / 8, "attribute bits");
    }

    void multiply(const Call& call, const Kernels& set, const Batch& batch, const float* x, int64_t in, int64_t out,
                  const std::vector<Product>& products) const override {
        const int64_t blocks = in / kQuantisedBlock, pairs = batch.back().first + batch.back().count;
        const Rounded rounded(wide_ ? 2 * pairs : pairs, blocks);
        const Order order = order_of(average(call));
        by_rounding(call, batch, [&](const Piece& piece, int64_t first, int64_t last) {
            const float* const rows = x + piece.first * in;
            if (wide_) {
                return round_wide(set, rows, bits_, first, last, rounded.wide(2 * piece.first, piece.count, order));
            }
            set.round_input(rows, bits_, first, last, rounded.of(piece.first, piece.count, order), nullptr);
        });
        by_rows(call, batch, products.size(), out,
                [&](const Piece& piece, size_t product, int64_t first, int64_t last) {
                    const size_t input = 2 + 2 * products[product].input;
                    const int64_t row = piece.expert * out;
                    const QuantisedMatrix matrix{.packed = call.input<uint8_t>(input) + row * blocks * 4 * bits_,
                                                 .scales = call.input<uint16_t>(input + 1) + row * blocks,
                                                 .rows = out,
                                                 .blocks = blocks,
                                                 .bits = bits_};
                    float* const y = products[product].y + piece.first * out;
                    if (wide_) {
                        const RoundedParts parts = rounded.wide(2 * piece.first, piece.count, order);
                        return multiply_wide(set, matrix, parts, first, last, y);
                    }
                    set.multiply(matrix, rounded.of(piece.first, piece.count, order), first, last, y, out);
                });
    }

private:
    /// Calls work(piece, first, last) for some of a piece's rows at a time.
    template <typename Work>
    static void by_rounding(const Call& call, const Batch& batch, const Work& work) {
        call.parallel(batch.size(), [&](size_t task) { work(batch[task], 0, batch[task].count); });
    }

    int bits_;
    bool wide_;
};

template <class Made, bool Clamped>
std::unique_ptr<Kernel> make(const Attributes& attributes) {
    return std::make_unique<Made>(attributes, Clamped);
}

}  // namespace

const Implementation kExpertsImplementation{schemas::kKvcExperts, make<Experts, false>};
const Implementation kClampedExpertsImplementation{schemas::kKvcClampedExperts, make<Experts, true>};
const Implementation kQuantisedExpertsImplementation{schemas::kKvcQuantisedExperts, make<QuantisedExperts, false>};
const Implementation kQuantisedClampedExpertsImplementation{schemas::kKvcQuantisedClampedExperts,
                                                            make<QuantisedExperts, true>};

}  // namespace kvc

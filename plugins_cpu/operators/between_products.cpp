// The steps between a layer's products: each operator here replaces two to eight standard operators. No graph file
// contains them: they replace those nodes in the copy of a graph that is loaded (kvc_trt/graph/rewrites/fused.py).
#include <algorithm>
#include <memory>

#include "kernels/choice.h"
#include "operators/all.h"

namespace kvc {
namespace {

constexpr ort::ElementType kFloat = ort::ElementType::kFloat;
constexpr Symbol kTokens = Symbol::kSymbolT, kIn = Symbol::kSymbolIn, kOut = Symbol::kSymbolOut;

/// Numbers that one task works on: fewer are not worth a second thread.
constexpr int64_t kNumbersOfTask = 1 << 14;

/// Calls work(first, last) for all rows of `size` numbers.
template <typename Work>
void by_rows(const Call& call, int64_t rows, int64_t size, const Work& work) {
    const int64_t at_once = std::max<int64_t>(1, kNumbersOfTask / std::max<int64_t>(1, size));
    call.parallel(static_cast<size_t>((rows + at_once - 1) / at_once), [&](size_t task) {
        const int64_t first = static_cast<int64_t>(task) * at_once;
        work(first, std::min(first + at_once, rows));
    });
}

// KvcGatedUnit: gate * sigmoid(gate) * up.
constexpr Symbol kGateShape[] = {kTokens, kOut};
constexpr TensorSpec kGatedInputs[] = {{"gate", kFloat, false, kGateShape}, {"up", kFloat, false, kGateShape}};
constexpr TensorSpec kGatedOutputs[] = {{"y", kFloat, false, kGateShape}};
constexpr Schema kGatedSchema[] = {{"KvcGatedUnit", kGatedInputs, kGatedOutputs}};

class GatedUnit : public Kernel {
public:
    void compute(Call& call) const override {
        const int64_t rows = call.sizes()[kTokens], size = call.sizes()[kOut];
        const GatedCall gated{call.input<float>(0), call.input<float>(1), call.output<float>(0), size, size};
        const Kernels& set = kernels();
        by_rows(call, rows, size, [&](int64_t first, int64_t last) { set.gate(gated, first, last); });
    }
};

// KvcGatedHalves: KvcGatedUnit on one tensor whose first half holds the gates and whose second half holds the values.
constexpr Symbol kHalvesShape[] = {kTokens, kIn};
constexpr TensorSpec kHalvesInputs[] = {{"both", kFloat, false, kHalvesShape}};
constexpr Schema kHalvesSchema[] = {{"KvcGatedHalves", kHalvesInputs, kGatedOutputs}};

class GatedHalves : public Kernel {
public:
    void compute(Call& call) const override {
        const int64_t rows = call.sizes()[kTokens], both = call.sizes()[kIn];
        require(both % 2 == 0, "both: expected an even number of columns, found ", both);
        call.fix(kOut, both / 2, "both");
        const float* const x = call.input<float>(0);
        const GatedCall gated{x, x + both / 2, call.output<float>(0), both, both / 2};
        const Kernels& set = kernels();
        by_rows(call, rows, both, [&](int64_t first, int64_t last) { set.gate(gated, first, last); });
    }
};

// KvcAddNorm: a sum, and the root mean square norm of the sum.
constexpr Symbol kWeightShape[] = {kIn};
constexpr TensorSpec kAddNormInputs[] = {{"x", kFloat, false, kHalvesShape},
                                         {"added", kFloat, false, kHalvesShape},
                                         {"weight", kFloat, false, kWeightShape}};
constexpr TensorSpec kAddNormOutputs[] = {{"sum", kFloat, false, kHalvesShape}, {"y", kFloat, false, kHalvesShape}};
constexpr Schema kAddNormSchema[] = {{"KvcAddNorm", kAddNormInputs, kAddNormOutputs}};

class AddedNorm : public Kernel {
public:
    explicit AddedNorm(const Attributes& attributes) : epsilon_(attributes.real("epsilon")) {}

    void compute(Call& call) const override {
        const int64_t rows = call.sizes()[kTokens], size = call.sizes()[kIn];
        const AddNormCall normed{call.input<float>(0),
                                 call.input<float>(1),
                                 call.input<float>(2),
                                 call.output<float>(0),
                                 call.output<float>(1),
                                 size,
                                 epsilon_};
        const Kernels& set = kernels();
        by_rows(call, rows, 2 * size, [&](int64_t first, int64_t last) { set.add_norm(normed, first, last); });
    }

private:
    float epsilon_;
};

// KvcRotatedHeads: splits one token's queries, keys and values from their joint product, and rotates queries and keys.
constexpr Symbol kB = Symbol::kBatch, kD = Symbol::kHeadSize;
constexpr Symbol kJoined[] = {kB, kIn}, kAngles[] = {kB, kTokens, kOut};
constexpr Symbol kQueries[] = {kB, Symbol::kHeads, kD}, kKeys[] = {kB, Symbol::kKvHeads, kD};
constexpr TensorSpec kRotatedInputs[] = {
    {"x", kFloat, false, kJoined}, {"cos", kFloat, false, kAngles}, {"sin", kFloat, false, kAngles}};
constexpr TensorSpec kRotatedOutputs[] = {
    {"query", kFloat, false, kQueries}, {"k_new", kFloat, false, kKeys}, {"v_new", kFloat, false, kKeys}};
constexpr Schema kRotatedSchema[] = {{"KvcRotatedHeads", kRotatedInputs, kRotatedOutputs}};

class RotatedHeads : public Kernel {
public:
    explicit RotatedHeads(const Attributes& attributes)
        : heads_(attributes.integer("heads", 1)), kv_heads_(attributes.integer("kv_heads", 1)) {}

    void compute(Call& call) const override {
        const int64_t rows = call.sizes()[kB], half = call.sizes()[kOut], size = 2 * half;
        const int64_t stride = (heads_ + 2 * kv_heads_) * size;
        call.fix(kTokens, 1, "cos");
        call.fix(kIn, stride, "x");
        call.fix(kD, size, "cos");
        call.fix(Symbol::kHeads, heads_, "attribute heads");
        call.fix(Symbol::kKvHeads, kv_heads_, "attribute kv_heads");
        const float* const x = call.input<float>(0);
        const float* const cos = call.input<float>(1);
        const float* const sin = call.input<float>(2);
        const Kernels& set = kernels();
        const int64_t keys = heads_ * size, values = keys + kv_heads_ * size;
        set.rotate({x, cos, sin, call.output<float>(0), stride, heads_, size}, 0, rows);
        set.rotate({x + keys, cos, sin, call.output<float>(1), stride, kv_heads_, size}, 0, rows);
        float* const target = call.output<float>(2);
        for (int64_t row = 0; row < rows; ++row) {
            std::copy_n(x + row * stride + values, kv_heads_ * size, target + row * kv_heads_ * size);
        }
    }

private:
    int64_t heads_, kv_heads_;
};

template <class Made>
std::unique_ptr<Kernel> make(const Attributes&) {
    return std::make_unique<Made>();
}
template <class Made>
std::unique_ptr<Kernel> make_with(const Attributes& attributes) {
    return std::make_unique<Made>(attributes);
}

}  // namespace

const Implementation kGatedUnitImplementation{kGatedSchema, make<GatedUnit>};
const Implementation kGatedHalvesImplementation{kHalvesSchema, make<GatedHalves>};
const Implementation kAddNormImplementation{kAddNormSchema, make_with<AddedNorm>};
const Implementation kRotatedHeadsImplementation{kRotatedSchema, make_with<RotatedHeads>};

}  // namespace kvc

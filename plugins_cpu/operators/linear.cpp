// KvcLinear: y = x matrix^T with a float matrix. No graph file has it: it replaces Gemm with a constant matrix in the
// copy of a prefill graph that is loaded (kvc_trt/graph/rewrites/native.py).
#include <algorithm>
#include <memory>

#include "kernels/choice.h"
#include "operators/all.h"
#include "operators/scratch.h"

namespace kvc {
namespace {

/// Tokens that are multiplied at once: their rounded inputs take memory beside the input.
constexpr int64_t kTokensAtOnce = 4096;

constexpr Symbol kX[] = {Symbol::kSymbolT, Symbol::kSymbolIn};
constexpr Symbol kMatrix[] = {Symbol::kSymbolOut, Symbol::kSymbolIn};
constexpr Symbol kY[] = {Symbol::kSymbolT, Symbol::kSymbolOut};
constexpr TensorSpec kInputs[] = {{"x", ort::ElementType::kFloat, false, kX},
                                  {"matrix", ort::ElementType::kFloat, false, kMatrix}};
constexpr TensorSpec kOutputs[] = {{"y", ort::ElementType::kFloat, false, kY}};
constexpr Schema kSchema[] = {{"KvcLinear", kInputs, kOutputs}};

class Linear : public Kernel {
public:
    explicit Linear(const Attributes& attributes) : bf16_(attributes.flag("bf16")) {}

    void compute(Call& call) const override {
        const Kernels& set = kernels();  // one set for the whole call
        const LinearKernels* const chosen = bf16_ ? set.linear_bf16 : set.linear;
        require(chosen != nullptr, "attribute bf16: the instruction set ", set.name, " multiplies no bfloat16");
        const int64_t tokens = call.sizes()[Symbol::kSymbolT], in = call.sizes()[Symbol::kSymbolIn];
        const int64_t out = call.sizes()[Symbol::kSymbolOut], at_once = std::min(tokens, kTokensAtOnce);
        require(in > 0, "x: expected columns");
        const float* const x = call.input<float>(0);
        const float* const matrix = call.input<float>(1);
        float* const y = call.output<float>(0);
        const int64_t width = (in + chosen->elements - 1) / chosen->elements;
        const Scratch rounded = chosen->round == nullptr ? nullptr : aligned(at_once * width * 4);
        for (int64_t first = 0; first < tokens; first += kTokensAtOnce) {
            const int64_t count = std::min(tokens - first, kTokensAtOnce);
            const void* steps = x + first * in;
            if (rounded != nullptr) {
                round(call, *chosen, x + first * in, in, count, rounded.get());
                steps = rounded.get();
            }
            call.parallel(static_cast<size_t>((out + kLinearPanel - 1) / kLinearPanel), [&](size_t task) {
                const int64_t row = static_cast<int64_t>(task) * kLinearPanel;
                const Scratch scratch = aligned(kLinearScratch);
                chosen->multiply({.x = steps,
                                  .matrix = matrix,
                                  .y = y + first * out,
                                  .tokens = count,
                                  .in = in,
                                  .out = out,
                                  .first_row = row,
                                  .rows = std::min(kLinearPanel, out - row),
                                  .scratch = scratch.get()});
            });
        }
    }

private:
    static void round(const Call& call, const LinearKernels& chosen, const float* x, int64_t in, int64_t tokens,
                      uint8_t* steps) {
        constexpr int64_t at_once = 16;
        call.parallel(static_cast<size_t>((tokens + at_once - 1) / at_once), [&](size_t task) {
            const int64_t first = static_cast<int64_t>(task) * at_once;
            chosen.round(x, in, first, std::min(first + at_once, tokens), steps);
        });
    }

    bool bf16_;
};

}  // namespace

const Implementation kLinearImplementation{kSchema, [](const Attributes& attributes) -> std::unique_ptr<Kernel> {
                                               return std::make_unique<Linear>(attributes);
                                           }};

}  // namespace kvc

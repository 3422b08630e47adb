// KvcNarrowLinear: y = x matrix^T with a float matrix, for a few tokens. No graph file has it: it replaces Gemm with a
// constant matrix in the copy of a draft graph that is loaded (kvc_trt/graph/rewrites/native.py).
#include <algorithm>
#include <memory>

#include "kernels/choice.h"
#include "operators/all.h"

namespace kvc {
namespace {

/// Rows of the matrix per task: enough for a thread to read on for a while.
constexpr int64_t kRowsOfTask = 64;

constexpr Symbol kX[] = {Symbol::kSymbolT, Symbol::kSymbolIn};
constexpr Symbol kMatrix[] = {Symbol::kSymbolOut, Symbol::kSymbolIn};
constexpr Symbol kY[] = {Symbol::kSymbolT, Symbol::kSymbolOut};
constexpr TensorSpec kInputs[] = {{"x", ort::ElementType::kFloat, false, kX},
                                  {"matrix", ort::ElementType::kFloat, false, kMatrix}};
constexpr TensorSpec kOutputs[] = {{"y", ort::ElementType::kFloat, false, kY}};
constexpr Schema kSchema[] = {{"KvcNarrowLinear", kInputs, kOutputs}};

class NarrowLinear : public Kernel {
public:
    void compute(Call& call) const override {
        const int64_t out = call.sizes()[Symbol::kSymbolOut];
        const NarrowCall product{.x = call.input<float>(0),
                                 .matrix = call.input<float>(1),
                                 .y = call.output<float>(0),
                                 .tokens = call.sizes()[Symbol::kSymbolT],
                                 .in = call.sizes()[Symbol::kSymbolIn],
                                 .out = out};
        const Kernels& set = kernels();
        call.parallel(static_cast<size_t>((out + kRowsOfTask - 1) / kRowsOfTask), [&](size_t task) {
            const int64_t first = static_cast<int64_t>(task) * kRowsOfTask;
            set.multiply_narrow(product, first, std::min(first + kRowsOfTask, out));
        });
    }
};

}  // namespace

const Implementation kNarrowLinearImplementation{
    kSchema, [](const Attributes&) -> std::unique_ptr<Kernel> { return std::make_unique<NarrowLinear>(); }};

}  // namespace kvc

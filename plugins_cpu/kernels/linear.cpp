// Products of many tokens with a float matrix, in float32 or in bfloat16 with sums in float32. A panel of rows is
// transposed and rounded once for all tokens, one part at a time, so that the part stays in the processor's cache.
#include "kernels/linear.h"

#include "kernels/multiply.h"

namespace kvc::KVC_TARGET {
namespace {

/// Adds the products of all tokens with one part of a panel to y, or writes them if it is the first.
template <bool Add, class Step>
void multiply_part(const LinearCall& call, int64_t first_step, int64_t steps, const Step* panel, float* rest) {
    const int64_t width = steps_of<Step>(call.in), whole = call.rows / kWidth * kWidth;
    const Step* const x = static_cast<const Step*>(call.x) + first_step;
    float* const y = call.y + call.first_row;
    multiply<Add>(x, width, panel, kLinearPanel, call.tokens, steps, whole, y, call.out);
    if (whole == call.rows) return;
    // The last columns do not fill a vector: they are computed in scratch memory, beside y.
    const auto bytes = static_cast<size_t>(call.rows - whole) * sizeof(float);
    for (int64_t token = 0; token < call.tokens; ++token) {
        float* const place = y + token * call.out + whole;
        if (Add) std::memcpy(rest, place, bytes);
        multiply<Add>(x + token * width, width, panel + whole, kLinearPanel, 1, steps, kWidth, rest, kWidth);
        std::memcpy(place, rest, bytes);
    }
}

template <class Step>
void multiply_panel(const LinearCall& call) {
    auto* const panel = reinterpret_cast<Step*>(call.scratch);
    auto* const rest = reinterpret_cast<float*>(call.scratch + kLinearPanel * kLinearDepth * int64_t{sizeof(Step)});
    for (int64_t first = 0; first < call.in; first += kLinearDepth * kElements<Step>) {
        const int64_t left = call.in - first, most = kLinearDepth * kElements<Step>;
        const int64_t count = left < most ? left : most;
        transpose_to_steps(call.matrix + call.first_row * call.in + first, call.in, call.rows, count, kLinearPanel,
                           panel);
        const auto part = first == 0 ? multiply_part<false, Step> : multiply_part<true, Step>;
        part(call, first / kElements<Step>, steps_of<Step>(count), panel, rest);
    }
}

#if defined(__AVX512BF16__)
void round(const float* x, int64_t in, int64_t first, int64_t last, void* steps) {
    const int64_t width = steps_of<Pair>(in);
    for (int64_t token = first; token < last; ++token) {
        to_steps(x + token * in, in, static_cast<Pair*>(steps) + token * width);
    }
}
#endif

}  // namespace

const LinearKernels kLinear{nullptr, kElements<float>, multiply_panel<float>};
#if defined(__AVX512BF16__)
const LinearKernels kLinearBf16{round, kElements<Pair>, multiply_panel<Pair>};
#endif

}  // namespace kvc::KVC_TARGET

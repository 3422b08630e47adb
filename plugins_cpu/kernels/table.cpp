// The table of one instruction set's kernels.
#include "kernels/attend.h"
#include "kernels/delta_target.h"
#include "kernels/elementwise_target.h"
#include "kernels/kernels.h"
#include "kernels/linear.h"
#include "kernels/narrow.h"
#include "kernels/observe.h"
#include "kernels/page_scores.h"
#include "kernels/prefill.h"
#include "kernels/quantised_target.h"
#include "kernels/store.h"
#include "kernels/take_best.h"

#define KVC_TEXT_OF(name) #name
#define KVC_TEXT(name) KVC_TEXT_OF(name)

namespace kvc::KVC_TARGET {

extern const Kernels kTable;
const Kernels kTable{
    .name = KVC_TEXT(KVC_TARGET),
    .attend = attend,
    .store_vectors = store_vectors,
    .widen_vectors = widen_vectors,
    .take_tokens = take_tokens,
    .gate = gate,
    .clamped_gate = clamped_gate,
    .add_norm = add_norm,
    .rotate = rotate,
    .round_input = round_input,
    .multiply = multiply,
    .rank_pages = rank_pages,
    .observe = observe,
    .prefill = &kPrefill,
#if defined(__AVX512BF16__)
    .prefill_bf16 = &kPrefillBf16,
    .linear = &kLinear,
    .linear_bf16 = &kLinearBf16,
#else
    .prefill_bf16 = nullptr,
    .linear = &kLinear,
    .linear_bf16 = nullptr,
#endif
    .multiply_narrow = multiply_narrow,
    .take_best = take_best,
};

}  // namespace kvc::KVC_TARGET

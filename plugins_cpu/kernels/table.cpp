// The kernels of one instruction set.
#include "kernels/attend.h"
#include "kernels/kernels.h"
#include "kernels/page_scores.h"
#include "kernels/prefill.h"
#include "kernels/quantised_target.h"
#include "kernels/take_best.h"

#define KVC_TEXT_OF(name) #name
#define KVC_TEXT(name) KVC_TEXT_OF(name)

namespace kvc::KVC_TARGET {

extern const Kernels kTable;
const Kernels kTable{
    .name = KVC_TEXT(KVC_TARGET),
    .attend = attend,
    .round_input = round_input,
    .multiply = multiply,
    .rank_pages = rank_pages,
    .prefill = prefill,
    .take_best = take_best,
};

}  // namespace kvc::KVC_TARGET

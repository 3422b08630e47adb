#pragma once

#include "kernels/kernels.h"

namespace kvc::KVC_TARGET {

extern const PrefillKernels kPrefill;
#if defined(__AVX512BF16__)
extern const PrefillKernels kPrefillBf16;
#endif

}  // namespace kvc::KVC_TARGET

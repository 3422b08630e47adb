#pragma once

#include "kernels/kernels.h"

namespace kvc::KVC_TARGET {

extern const LinearKernels kLinear;
#if defined(__AVX512BF16__)
extern const LinearKernels kLinearBf16;
#endif

}  // namespace kvc::KVC_TARGET

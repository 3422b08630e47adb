#pragma once

#include "kernels/kernels.h"

namespace kvc::KVC_TARGET {

void observe(const ObserveCall& call, int32_t* ranks);

}  // namespace kvc::KVC_TARGET

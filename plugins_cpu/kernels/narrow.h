#pragma once

#include "kernels/kernels.h"

namespace kvc::KVC_TARGET {

void multiply_narrow(const NarrowCall& call, int64_t first_row, int64_t last_row);

}  // namespace kvc::KVC_TARGET

// Which instruction set's kernels are used.
#pragma once

#include "kernels/kernels.h"

namespace kvc {

/// The kernels in use: by default those of the best instruction set that this processor has.
const Kernels& kernels();

/// Uses the kernels of another instruction set from now on, in every session; false if they cannot be had here.
bool use_kernels(const char* name);

}  // namespace kvc

// Chooses the instruction set whose kernels run.
#pragma once

#include "kernels/kernels.h"

namespace kvc {

/// Returns the kernels in use: by default those of the best instruction set that this processor supports.
const Kernels& kernels();

/// Switches every session to another instruction set; returns false if this processor or this library lacks it.
bool use_kernels(const char* name);

}  // namespace kvc

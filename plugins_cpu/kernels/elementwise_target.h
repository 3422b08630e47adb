#pragma once

#include "kernels/elementwise.h"

namespace kvc::KVC_TARGET {

Gate gate;
ClampedGate clamped_gate;
AddNorm add_norm;
Rotate rotate;

}  // namespace kvc::KVC_TARGET

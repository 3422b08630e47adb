#pragma once

#include "kernels/quantised.h"

namespace kvc::KVC_TARGET {

RoundInput round_input;
Multiply multiply;

}  // namespace kvc::KVC_TARGET

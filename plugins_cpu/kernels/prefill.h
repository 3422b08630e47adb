#pragma once

#include "kernels/kernels.h"

namespace kvc::KVC_TARGET {

void prefill(const PrefillCall& call);

}  // namespace kvc::KVC_TARGET

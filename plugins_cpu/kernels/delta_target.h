#pragma once

#include "kernels/delta.h"

namespace kvc::KVC_TARGET {

TakeTokens take_tokens;

}  // namespace kvc::KVC_TARGET

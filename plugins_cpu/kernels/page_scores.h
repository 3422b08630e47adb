#pragma once

#include "kernels/kernels.h"

namespace kvc::KVC_TARGET {

void rank_pages(const PageScoreCall& call, int32_t* ranks);

}  // namespace kvc::KVC_TARGET

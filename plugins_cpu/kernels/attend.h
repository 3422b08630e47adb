#pragma once

#include "kernels/kernels.h"

namespace kvc::KVC_TARGET {

void attend(const AttendCall& call, const Attended& result);

}  // namespace kvc::KVC_TARGET

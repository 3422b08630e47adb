#pragma once

#include "kernels/kernels.h"

namespace kvc::KVC_TARGET {

void store_vectors(const float* vectors, int64_t count, const WritableVectors& target);
void widen_vectors(const Vectors& vectors, int64_t count, float* target);

}  // namespace kvc::KVC_TARGET

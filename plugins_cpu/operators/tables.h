// Moves of stored vectors: the parts of a format, without making codes anew.
#pragma once

#include <cstdint>

#include "kernels/stored.h"

namespace kvc {

/// Copies `count` vectors to the start of `target`: bytes where both have one format, else the exact ones are stored.
void put_vectors(const Vectors& source, int64_t count, const WritableVectors& target);

/// Writes zeros to `count` vectors.
void clear_vectors(const WritableVectors& target, int64_t count);

}  // namespace kvc

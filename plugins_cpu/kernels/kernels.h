// The computations that are compiled once per instruction set, and the table by which the operators call them.
//
// A file that is compiled so may define nothing that the linker could merge with code of another instruction set: no
// templates of the standard library that are not inlined, no inline functions outside of the set's own namespace.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/quantised.h"

namespace kvc {

/// Attention of the query heads of one KV head to some of its tokens. D elements of a token are contiguous.
struct AttendCall {
    const float* query;     ///< [group, head_size], scaled
    const float* keys;      ///< the KV head's slot 0, [slots, head_size]
    const float* values;    ///< likewise
    const int32_t* tokens;  ///< the slots to read; null for 0, 1, ..., count - 1
    int64_t count;
    int64_t group;
    int64_t head_size;
    float* scratch;  ///< attend_scratch(count, group, head_size) floats
};

/// What remains of some tokens until they are merged with others.
struct Attended {
    float* output;   ///< [group, head_size], the sum of weight times value
    float* maximum;  ///< [group], the largest score
    float* total;    ///< [group], the sum of weights
};

/// Scratch floats that `attend` needs.
constexpr int64_t attend_scratch(int64_t count, int64_t group, int64_t head_size) {
    constexpr int64_t widest = 16;
    const auto padded = [](int64_t size) { return (size + widest - 1) / widest * widest; };
    return group * (padded(count) + 2 * padded(head_size)) + padded(head_size);
}

struct Kernels {
    const char* name;
    void (*attend)(const AttendCall& call, const Attended& result);
    RoundInput* round_input;
    Multiply* multiply;
};

}  // namespace kvc

// Linear layers (Gated DeltaNet, arXiv 2412.06464): tokens pass through the memory of one value head, one by one.
#pragma once

#include <cstdint>

namespace kvc {

/// The tokens of one row for one value head; pointers are those of the row, strides those of all heads together.
struct DeltaHead {
    const float* mixed;        ///< [tokens, channels]: queries, keys and values before the convolution
    const float* before;       ///< [kernel - 1, channels]: the convolution's inputs of the tokens before
    const float* convolution;  ///< [channels, kernel]
    const float* write;        ///< [tokens, heads], from this head on
    const float* decay;        ///< likewise
    float* memory;             ///< [key_size, value_size], updated
    float* read;               ///< [tokens, heads, value_size], from this head on
    int64_t tokens;
    int64_t channels;
    int64_t heads;
    int64_t kernel;
    int64_t key_size;
    int64_t value_size;
    int64_t query;  ///< the head's first channel of queries
    int64_t key;
    int64_t value;
    float rate;  ///< e to the power of the logarithm of the decay
    float decay_bias;
    float* scratch;  ///< delta_scratch(...) floats
};

/// Scratch floats that a head needs: its weights of the convolution, and the vectors of a token.
static constexpr int64_t delta_scratch(int64_t kernel, int64_t key_size, int64_t value_size) {
    return (kernel + 1) * (2 * key_size + value_size);
}

using TakeTokens = void(const DeltaHead& head);

}  // namespace kvc

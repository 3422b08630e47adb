// Memory for tokens that are rounded to 8 bits, and the order of their elements.
#pragma once

#include <cstdint>

#include "kernels/quantised.h"
#include "operators/scratch.h"

namespace kvc {

/// With at most this many tokens, rows are multiplied as they are: unpacking panels would take longer.
inline constexpr int64_t kFewTokens = 8;

inline Order order_of(int64_t tokens) { return tokens <= kFewTokens ? Order::kByVector : Order::kByPanel; }

/// Memory for rounded tokens of so many blocks each.
class Rounded {
public:
    Rounded(int64_t tokens, int64_t blocks) : blocks_(blocks), padded_(padded_blocks(blocks)) {
        const int64_t all = tokens * padded_;
        memory_ = aligned(all * (kQuantisedBlock + int64_t{sizeof(float)} + kSumsOfBlock * int64_t{sizeof(int32_t)}));
        levels_ = reinterpret_cast<int8_t*>(memory_.get());
        scales_ = reinterpret_cast<float*>(memory_.get() + all * kQuantisedBlock);
        sums_ = reinterpret_cast<int32_t*>(scales_ + all);
    }

    /// The memory of `tokens` tokens from `first` on.
    RoundedInput of(int64_t first, int64_t tokens, Order order) const {
        const int64_t start = first * padded_;
        return {.levels = levels_ + start * kQuantisedBlock,
                .scales = scales_ + start,
                .sums = sums_ + start * kSumsOfBlock,
                .tokens = tokens,
                .blocks = blocks_,
                .order = order};
    }

private:
    int64_t blocks_, padded_;
    Scratch memory_;
    int8_t* levels_;
    float* scales_;
    int32_t* sums_;
};

}  // namespace kvc

#include "kernels/quantised.h"

#include "kernels/by_panel.h"
#include "kernels/by_vector.h"
#include "kernels/quantised_target.h"

namespace kvc::KVC_TARGET {

namespace {

constexpr float kLargestLevel = 127.0f;

typedef uint8_t BlockBytes __attribute__((vector_size(kBlock)));

/// Order of a block's elements among its levels: even ones first where a byte holds two nibbles, by eight in a panel.
constexpr BlockBytes kHalves{0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30,
                             1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31};
constexpr BlockBytes kEighths{0,  2,  4,  6,  1,  3,  5,  7,  8,  10, 12, 14, 9,  11, 13, 15,
                              16, 18, 20, 22, 17, 19, 21, 23, 24, 26, 28, 30, 25, 27, 29, 31};

/// The largest lane.
template <int... Lanes>
int32_t largest_lane(Integers vector, Numbers<Lanes...>) {
    for (int half = kWidth / 2; half > 0; half /= 2) {
        const Integers across = (Integers{Lanes...} + half) & (kWidth - 1);
        const Integers other = __builtin_shuffle(vector, across);
        vector = vector > other ? vector : other;
    }
    return vector[0];
}

/// Rounds one block to levels, in the order of its elements, and returns the scale. `left` as in RoundInput.
float round_block(const float* x, int8_t* levels, float* left) {
    constexpr int vectors = kBlock / kWidth;
    typedef int8_t Levels __attribute__((vector_size(kWidth)));
    Vector parts[vectors];
    // Magnitudes are compared by their bits: NaN has the largest, so it reaches the scale and, through it, the results.
    Integers magnitudes{};
    for (int i = 0; i < vectors; ++i) {
        parts[i] = load(x + i * kWidth);
        const Integers magnitude = reinterpret_cast<Integers>(parts[i]) & INT32_MAX;
        magnitudes = magnitude > magnitudes ? magnitude : magnitudes;
    }
    const int32_t bits = largest_lane(magnitudes, typename Counted<kWidth>::Type{});
    float largest;
    std::memcpy(&largest, &bits, sizeof largest);
    const float inverse = largest > 0.0f ? kLargestLevel / largest : 0.0f;
    const float scale = largest / kLargestLevel;
    const Vector rounding = all(kRounding);
    for (int i = 0; i < vectors; ++i) {
        const Vector level = (parts[i] * inverse + rounding) - rounding;
        const Levels narrow = __builtin_convertvector(__builtin_convertvector(level, Integers), Levels);
        std::memcpy(levels + i * kWidth, &narrow, sizeof narrow);
        if (left != nullptr) store(left + i * kWidth, parts[i] - level * scale);
    }
    return scale;
}

/// The place of a block's levels, which `dot` multiplies by vectors of a row.
void store_by_vector(const int8_t* plain, int64_t block, int bits, int8_t* token) {
    if (bits == 8) {
        std::memcpy(token + block * kBlock, plain, kBlock);
        return;
    }
    // The even elements of as many blocks as one vector of nibbles holds, then their odd elements.
    constexpr int64_t group = kWidth / 4, half = kBlock / 2;
    BlockBytes levels;
    std::memcpy(&levels, plain, sizeof levels);
    const BlockBytes halves = __builtin_shuffle(levels, kHalves);
    int8_t* const place = token + block / group * group * kBlock + block % group * half;
    std::memcpy(place, &halves, half);
    std::memcpy(place + group * half, reinterpret_cast<const uint8_t*>(&halves) + half, half);
}

void store_by_panel(const int8_t* plain, int64_t block, int bits, int8_t* token) {
    BlockBytes levels;
    std::memcpy(&levels, plain, sizeof levels);
    if (bits == 4) levels = __builtin_shuffle(levels, kEighths);
    std::memcpy(token + block * kBlock, &levels, sizeof levels);
}

/// The sums of groups of four levels.
Integers sums_of_four(const int8_t* levels) { return dot<4>(Integers{}, Bytes{} + 1, load_bytes(levels)); }

/// What every lane of a block's sum starts with: the correction, or half of it in both 16 bits of a lane.
int32_t start_of_block(int32_t correction, int bits) {
    if (bits == 8 || !kInPairs<4>) return correction;
    const int16_t half = static_cast<int16_t>(correction / 2);
    const int16_t both[2] = {half, half};
    int32_t start;
    std::memcpy(&start, both, sizeof start);
    return start;
}

/// The sum of a block's levels.
int32_t sum_of_block(const int8_t* levels) {
    Integers sums{};
    for (int i = 0; i < kBlock / 4; i += kWidth) {
        if constexpr (kBytes <= kBlock) {
            sums += sums_of_four(levels + 4 * i);
        } else {  // a vector holds two blocks; the levels of the second one do not count
            Bytes ones{};
            for (int byte = 0; byte < kBlock; ++byte) ones[byte] = 1;
            sums += dot<4>(Integers{}, ones, load_bytes(levels));
        }
    }
    int32_t sum = 0;
    for (int lane = 0; lane < kWidth; ++lane) sum += sums[lane];
    return sum;
}

/// Rounds one token; blocks after the last one become zeros.
void round_token(const float* x, int bits, int64_t token, const RoundedInput& result, float* left) {
    const int64_t padded = padded_blocks(result.blocks);
    int8_t* const levels = result.levels + token * padded * kBlock;
    float* const scales = result.scales + token * padded;
    int32_t* const sums = result.sums + token * padded;
    const int32_t zero = 1 << (bits - 1);
    for (int64_t block = 0; block < padded; ++block) {
        alignas(64) int8_t plain[kBytes > kBlock ? kBytes : kBlock] = {};
        scales[block] = 0.0f;
        if (block < result.blocks) {
            float* const left_of_block = left == nullptr ? nullptr : left + block * kBlock;
            scales[block] = round_block(x + block * kBlock, plain, left_of_block);
        }
        const int32_t correction = -zero * sum_of_block(plain);
        if (result.order == Order::kByPanel) {
            store_by_panel(plain, block, bits, levels);
            sums[block] = start_of_block(correction, bits);
        } else {
            store_by_vector(plain, block, bits, levels);
            sums[block] = correction;
        }
    }
}

/// Multiplies all tokens with the `count` <= `kRowsAtOnce` rows from `row` on.
template <int Bits>
void multiply_by_vector(const QuantisedMatrix& matrix, const RoundedInput& input, int64_t row, int64_t count, float* y,
                        int64_t stride) {
    int64_t token = 0;
    for (; token + kTokensAtOnce <= input.tokens; token += kTokensAtOnce) {
        multiply_group<Bits, kTokensAtOnce>(matrix, input, token, row, count, y + token * stride + row, stride);
    }
    for (; token < input.tokens; ++token) {
        multiply_group<Bits, 1>(matrix, input, token, row, count, y + token * stride + row, stride);
    }
}

/// Calls `some`(row, count) for every `together` rows.
template <class Some>
void for_rows(int64_t first, int64_t last, int64_t together, const Some& some) {
    for (int64_t row = first; row < last; row += together) {
        some(row, last - row < together ? last - row : together);
    }
}

template <int Bits>
void multiply_as(const QuantisedMatrix& matrix, const RoundedInput& input, int64_t first, int64_t last, float* y,
                 int64_t stride) {
    if (input.order == Order::kByVector) {
        for_rows(first, last, kRowsAtOnce,
                 [&](int64_t row, int64_t count) { multiply_by_vector<Bits>(matrix, input, row, count, y, stride); });
    } else if (input.tokens <= kNarrowTokens) {
        for_rows(first, last, kNarrowVectors * kWidth, [&](int64_t row, int64_t count) {
            multiply_panel<Bits, kNarrowVectors>(matrix, input, row, count, y, stride);
        });
    } else {
        for_rows(first, last, kWideVectors * kWidth, [&](int64_t row, int64_t count) {
            multiply_panel<Bits, kWideVectors>(matrix, input, row, count, y, stride);
        });
    }
}

}  // namespace

void round_input(const float* x, int bits, int64_t first, int64_t last, const RoundedInput& result, float* left) {
    for (int64_t token = first; token < last; ++token) {
        const int64_t start = token * result.blocks * kBlock;
        round_token(x + start, bits, token, result, left == nullptr ? nullptr : left + start);
    }
}

void multiply(const QuantisedMatrix& matrix, const RoundedInput& input, int64_t first, int64_t last, float* y,
              int64_t stride) {
    const auto chosen = matrix.bits == 4 ? multiply_as<4> : multiply_as<8>;
    chosen(matrix, input, first, last, y, stride);
}

}  // namespace kvc::KVC_TARGET

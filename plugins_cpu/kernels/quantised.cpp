#include "kernels/quantised.h"

#include <type_traits>

#include "kernels/bytes.h"
#include "kernels/quantised_target.h"

namespace kvc::KVC_TARGET {

namespace {

constexpr int kPanelVectors = 2;
constexpr int kPanelRows = kPanelVectors * kWidth;
static_assert(kPanelRows <= kWidestPanel);
/// Tokens whose sums stay in registers while a panel is read.
constexpr int kTileTokens = kWidth == 16 ? 6 : kWidth == 8 ? 4 : 2;
/// Steps of a panel's block without a jump: with eight of them, GCC runs out of 16 registers.
constexpr int kStepsAtOnce = kWidth == 16 ? 8 : 2;
/// Rows that are read at once for few tokens, and those tokens.
constexpr int kRowsAtOnce = 4, kTokensAtOnce = kWidth == 8 ? 2 : 1;
/// Least distance in bytes from a read to its prefetch: processors do not prefetch past a page by themselves.
constexpr int64_t kAhead = 8192;
/// Bytes that one prefetch fetches.
constexpr int kLine = 64;
constexpr int kBlock = static_cast<int>(kQuantisedBlock);
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

/// True if a panel's products are summed in 16 bits over a whole block: with 16 levels of at most 15 and inputs of at
/// most 127, a sum that starts at half of the correction stays within 16 * 11 * 127 + 16 * 4 * 127.
template <int Bits>
inline constexpr bool kInPairs = KVC_CENTRES && Bits == 4;

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
    int32_t* const sums = result.sums + token * padded * kSumsOfBlock;
    const int32_t zero = 1 << (bits - 1);
    for (int64_t block = 0; block < padded; ++block) {
        alignas(64) int8_t plain[kBytes > kBlock ? kBytes : kBlock] = {};
        scales[block] = 0.0f;
        if (block < result.blocks) {
            float* const left_of_block = left == nullptr ? nullptr : left + block * kBlock;
            scales[block] = round_block(x + block * kBlock, plain, left_of_block);
        }
        if (result.order == Order::kByPanel) {
            store_by_panel(plain, block, bits, levels);
            sums[block] = start_of_block(-zero * sum_of_block(plain), bits);
        } else {
            store_by_vector(plain, block, bits, levels);
        }
    }
    if (result.order == Order::kByPanel) return;
    // Each lane multiplies four levels of 8 bits, or four even and four odd levels of 4 bits.
    const int64_t vectors = padded * bits / kWidth;
    for (int64_t vector = 0; vector < vectors; ++vector) {
        const Integers sum =
            bits == 8 ? sums_of_four(levels + vector * kBytes)
                      : sums_of_four(levels + 2 * vector * kBytes) + sums_of_four(levels + (2 * vector + 1) * kBytes);
        const Integers correction = sum * -zero;
        std::memcpy(sums + vector * kWidth, &correction, sizeof correction);
    }
}

/// The rounded elements of a few tokens, from some block on.
struct TokenPart {
    const int8_t* levels;
    const float* scales;
    const int32_t* sums;
    int64_t padded;       ///< blocks of a token
    const uint8_t* next;  ///< packed elements to prefetch: rows follow each other in memory, so they are one stream
};

/// The products of a row's scales and a token's, of `kWidth` blocks; in memory, from where a lane is broadcast for free.
using Scales = float[kWidth];

/// The scale of each lane's block, for vector `Index`.
template <int Bits, int Index, int... Lanes>
inline Vector spread(const Scales& scales, Numbers<Lanes...>) {
    constexpr int first = Index * kWidth / Bits;
    if constexpr (kWidth <= Bits) return all(scales[first]);
    if constexpr (kWidth == 2 * Bits) {  // moves within quarters of a register are cheaper than those across it
        const Vector pairs = all_pairs(scales + first);
        return __builtin_shufflevector(pairs, pairs, (Lanes / Bits * Bits + Lanes / Bits)...);
    }
    const Vector whole = load(scales);
    return __builtin_shufflevector(whole, whole, ((Index * kWidth + Lanes) / Bits)...);
}

/// Adds the products of vector `Index` of `kWidth` blocks, and of the vectors after it.
template <int Bits, int Tokens, int Index = 0>
[[gnu::always_inline]] inline void add_vectors(const uint8_t* const* packed, const Scales (*scales)[kRowsAtOnce],
                                               const TokenPart& part, Vector (*sums)[kRowsAtOnce]) {
    if constexpr (Index < Bits) {
#pragma GCC unroll 4
        for (int row = 0; row < kRowsAtOnce; ++row) {
            const int ahead = (Index * kRowsAtOnce + row) * kBytes;
            if (ahead % kLine == 0) __builtin_prefetch(part.next + ahead);
            const Bytes bytes = load_bytes(packed[row] + Index * kBytes);
#pragma GCC unroll 2
            for (int t = 0; t < Tokens; ++t) {
                const int8_t* const levels = part.levels + t * part.padded * kBlock;
                const int32_t* const start = part.sums + t * part.padded * kSumsOfBlock + Index * kWidth;
                Integers product = kCentres<Bits> ? Integers{} : load_integers(start);
                if constexpr (Bits == 4) {
                    const Bytes low = bytes & 15, high = bytes >> 4;
                    product = dot<4>(product, low, load_bytes(levels + 2 * Index * kBytes));
                    product = dot<4>(product, high, load_bytes(levels + (2 * Index + 1) * kBytes));
                } else {
                    product = dot<8>(product, bytes, load_bytes(levels + Index * kBytes));
                }
                sums[t][row] += __builtin_convertvector(product, Vector) *
                                spread<Bits, Index>(scales[t][row], typename Counted<kWidth>::Type{});
            }
        }
        add_vectors<Bits, Tokens, Index + 1>(packed, scales, part, sums);
    }
}

/// Writes the sums of the first `count` rows' lanes, for each token.
template <int Tokens>
inline void store_sums(const Vector (*sums)[kRowsAtOnce], int64_t count, float* y, int64_t stride) {
    constexpr int made = Tokens * kRowsAtOnce, padded_to = (made + kWidth - 1) / kWidth * kWidth;
    Vector in_order[padded_to] = {};
#pragma GCC unroll 8
    for (int i = 0; i < made; ++i) in_order[i] = sums[i / kRowsAtOnce][i % kRowsAtOnce];
    float found[padded_to];
    for (int i = 0; i < made; i += kWidth) store(found + i, sum_each(in_order + i));
    for (int t = 0; t < Tokens; ++t) {
        float* const place = y + t * stride;
        if (count == kRowsAtOnce) {  // a copy of a known size takes one instruction
            std::memcpy(place, found + t * kRowsAtOnce, kRowsAtOnce * sizeof(float));
        } else {
            std::memcpy(place, found + t * kRowsAtOnce, static_cast<size_t>(count) * sizeof(float));
        }
    }
}

/// Multiplies `Tokens` tokens from `token` on with up to `kRowsAtOnce` rows from `first` on.
template <int Bits, int Tokens>
void multiply_rows(const QuantisedMatrix& matrix, const RoundedInput& input, int64_t token, int64_t first,
                   int64_t count, float* y, int64_t stride) {
    const int64_t padded = padded_blocks(input.blocks), blocks = matrix.blocks, whole = blocks / kWidth * kWidth;
    const int64_t together = kRowsAtOnce * blocks * 4 * Bits;
    TokenPart part{input.levels + token * padded * kBlock, input.scales + token * padded,
                   input.sums + token * padded * kSumsOfBlock, padded,
                   matrix.packed + first * blocks * 4 * Bits + (together > kAhead ? together : kAhead)};
    const uint8_t* packed[kRowsAtOnce];
    int64_t rows[kRowsAtOnce];
    Vector sums[Tokens][kRowsAtOnce] = {};
    alignas(64) Scales scales[Tokens][kRowsAtOnce];
    for (int row = 0; row < kRowsAtOnce; ++row) {
        rows[row] = (first + (row < count ? row : 0)) * blocks;
        packed[row] = matrix.packed + rows[row] * 4 * Bits;
    }
    const auto scale_row = [&](int row, Vector halves) {
        for (int t = 0; t < Tokens; ++t) store(scales[t][row], halves * load(part.scales + t * padded));
    };
    int64_t block = 0;
    for (; block < whole; block += kWidth) {
#pragma GCC unroll 4
        for (int row = 0; row < kRowsAtOnce; ++row) scale_row(row, load_half(matrix.scales + rows[row] + block));
        add_vectors<Bits, Tokens>(packed, scales, part, sums);
        part.levels += kWidth * kBlock;
        part.scales += kWidth;
        part.sums += kWidth * Bits;
        part.next += kRowsAtOnce * Bits * kBytes;
        for (int row = 0; row < kRowsAtOnce; ++row) packed[row] += Bits * kBytes;
    }
    if (block < blocks) {
        const int64_t rest = blocks - block;
        alignas(64) uint8_t copies[kRowsAtOnce][Bits * kBytes] = {};
        for (int row = 0; row < kRowsAtOnce; ++row) {
            std::memcpy(copies[row], packed[row], static_cast<size_t>(rest) * 4 * Bits);
            packed[row] = copies[row];
            scale_row(row, load_half_first(matrix.scales + rows[row] + block, rest));
        }
        add_vectors<Bits, Tokens>(packed, scales, part, sums);
    }
    store_sums<Tokens>(sums, count, y, stride);
}

/// A panel: the levels of all its rows for each block and group of four elements, and the rows' scales for each block.
struct Panel {
    uint8_t* levels;  ///< [blocks][8][kPanelVectors] vectors
    float* scales;    ///< [blocks][kPanelRows]
};

template <int Bits>
void unpack_panel(const QuantisedMatrix& matrix, int64_t first, int64_t count, const Panel& panel) {
    constexpr int steps = kBlock / 4, words = Bits;  // words of four bytes in a packed block
    const int64_t blocks = matrix.blocks;
    for (int64_t block = 0; block < blocks; ++block) {
        alignas(64) uint32_t columns[words][kPanelRows] = {};
        alignas(64) uint16_t halves[kPanelRows] = {};
        for (int64_t row = 0; row < count; ++row) {
            const int64_t place = (first + row) * blocks + block;
            uint32_t packed[words];
            std::memcpy(packed, matrix.packed + place * 4 * Bits, sizeof packed);
            for (int word = 0; word < words; ++word) columns[word][row] = packed[word];
            halves[row] = matrix.scales[place];
        }
        uint8_t* const levels = panel.levels + block * steps * kPanelVectors * kBytes;
        for (int vector = 0; vector < kPanelVectors; ++vector) {
            for (int word = 0; word < words; ++word) {
                const Bytes bytes = load_bytes(columns[word] + vector * kWidth);
                if constexpr (Bits == 4) {
                    const Bytes low = bytes & 15, high = bytes >> 4;
                    std::memcpy(levels + (2 * word * kPanelVectors + vector) * kBytes, &low, sizeof low);
                    std::memcpy(levels + ((2 * word + 1) * kPanelVectors + vector) * kBytes, &high, sizeof high);
                } else {
                    std::memcpy(levels + (word * kPanelVectors + vector) * kBytes, &bytes, sizeof bytes);
                }
            }
            const int64_t place = block * kPanelRows + vector * kWidth;
            store(panel.scales + place, load_half(halves + vector * kWidth));
        }
    }
}

/// The products of one block, summed in the lanes of a panel's rows: four elements of every row at a time.
template <int Bits>
class BlockSum {
public:
    BlockSum() = default;

    explicit BlockSum(int32_t start) : sum_(kCentres<Bits> ? Sum{} : reinterpret_cast<Sum>(all_integers(start))) {}

    void add(Bytes levels, Bytes input) {
        if constexpr (kInPairs<Bits>) {
            sum_ += products_in_pairs(levels, input);
        } else {
            sum_ = dot<Bits>(sum_, levels, input);
        }
    }

    Integers total() const {
        if constexpr (kInPairs<Bits>) {
            return sums_of_pairs(sum_, Pairs{} + 1);
        } else {
            return sum_;
        }
    }

private:
    using Sum = std::conditional_t<kInPairs<Bits>, Pairs, Integers>;
    Sum sum_;
};

/// Multiplies `Tokens` tokens from `token` on with a panel's rows.
template <int Bits, int Tokens>
void multiply_tile(const Panel& panel, const RoundedInput& input, int64_t token, int64_t count, float* y,
                   int64_t stride) {
    constexpr int steps = kBlock / 4;
    const int64_t padded = padded_blocks(input.blocks);
    const int8_t* const inputs = input.levels + token * padded * kBlock;
    const float* const scales = input.scales + token * padded;
    const int32_t* const corrections = input.sums + token * padded * kSumsOfBlock;
    Vector sums[Tokens][kPanelVectors] = {};
    for (int64_t block = 0; block < input.blocks; ++block) {
        BlockSum<Bits> products[Tokens][kPanelVectors];
#pragma GCC unroll 8
        for (int t = 0; t < Tokens; ++t) {
            const BlockSum<Bits> start(corrections[t * padded * kSumsOfBlock + block]);
#pragma GCC unroll 2
            for (int vector = 0; vector < kPanelVectors; ++vector) products[t][vector] = start;
        }
        const uint8_t* const levels = panel.levels + block * steps * kPanelVectors * kBytes;
#pragma GCC unroll kStepsAtOnce
        for (int step = 0; step < steps; ++step) {
            Bytes rows[kPanelVectors];
#pragma GCC unroll 2
            for (int vector = 0; vector < kPanelVectors; ++vector) {
                rows[vector] = load_bytes(levels + (step * kPanelVectors + vector) * kBytes);
            }
#pragma GCC unroll 8
            for (int t = 0; t < Tokens; ++t) {
                const Bytes four = all_bytes(inputs + (t * padded + block) * kBlock + 4 * step);
#pragma GCC unroll 2
                for (int vector = 0; vector < kPanelVectors; ++vector) {
                    products[t][vector].add(rows[vector], four);
                }
            }
        }
#pragma GCC unroll 2
        for (int vector = 0; vector < kPanelVectors; ++vector) {
            const int64_t place = block * kPanelRows + vector * kWidth;
            const Vector row_scales = load(panel.scales + place);
#pragma GCC unroll 8
            for (int t = 0; t < Tokens; ++t) {
                sums[t][vector] += __builtin_convertvector(products[t][vector].total(), Vector) *
                                   (row_scales * scales[t * padded + block]);
            }
        }
    }
    for (int t = 0; t < Tokens; ++t) {
        float* const place = y + (token + t) * stride;
        if (count == kPanelRows) {
            for (int vector = 0; vector < kPanelVectors; ++vector) store(place + vector * kWidth, sums[t][vector]);
        } else {
            std::memcpy(place, sums[t], static_cast<size_t>(count) * sizeof(float));
        }
    }
}

/// Multiplies the last `left` <= `Tokens` tokens with a panel's rows.
template <int Bits, int Tokens = kTileTokens - 1>
void multiply_rest(const Panel& panel, const RoundedInput& input, int64_t left, int64_t count, float* y,
                   int64_t stride) {
    if constexpr (Tokens > 0) {
        if (left == Tokens) {
            multiply_tile<Bits, Tokens>(panel, input, input.tokens - left, count, y, stride);
        } else {
            multiply_rest<Bits, Tokens - 1>(panel, input, left, count, y, stride);
        }
    }
}

template <int Bits>
void multiply_as(const QuantisedMatrix& matrix, const RoundedInput& input, int64_t first, int64_t last, float* y,
                 int64_t stride, uint8_t* scratch) {
    if (input.order == Order::kByVector) {
        for (int64_t row = first; row < last; row += kRowsAtOnce) {
            const int64_t count = last - row < kRowsAtOnce ? last - row : kRowsAtOnce;
            int64_t token = 0;
            for (; token + kTokensAtOnce <= input.tokens; token += kTokensAtOnce) {
                multiply_rows<Bits, kTokensAtOnce>(matrix, input, token, row, count, y + token * stride + row, stride);
            }
            for (; token < input.tokens; ++token) {
                multiply_rows<Bits, 1>(matrix, input, token, row, count, y + token * stride + row, stride);
            }
        }
        return;
    }
    const int64_t blocks = matrix.blocks;
    float* const scales = reinterpret_cast<float*>(scratch + blocks * kBlock * kPanelRows);
    const Panel panel{scratch, scales};
    for (int64_t row = first; row < last; row += kPanelRows) {
        const int64_t count = last - row < kPanelRows ? last - row : kPanelRows;
        unpack_panel<Bits>(matrix, row, count, panel);
        int64_t token = 0;
        for (; token + kTileTokens <= input.tokens; token += kTileTokens) {
            multiply_tile<Bits, kTileTokens>(panel, input, token, count, y + row, stride);
        }
        multiply_rest<Bits>(panel, input, input.tokens - token, count, y + row, stride);
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
              int64_t stride, uint8_t* scratch) {
    const auto chosen = matrix.bits == 4 ? multiply_as<4> : multiply_as<8>;
    chosen(matrix, input, first, last, y, stride, scratch);
}

}  // namespace kvc::KVC_TARGET

// Attention of 8 query heads over tiles of 16 tokens by one warp, on tensor cores: for fp16 and bf16 queries.
//
// Keys and values are copied to shared memory by cp.async, one or two tiles ahead (the ring), and from there into mma
// fragments. A lane copies its own operands, 16 bytes at a time, so a tile needs neither a barrier nor
// ldmatrix, and no bank is used twice:
// - Scores are S^T[16 tokens, 8 heads] = K Q^T. A sum over channels may take them in any order, so a lane's 8
//   consecutive channels of a key row serve as the fragments of two products, if the query is loaded the same way.
// - Outputs are O^T[channels, 8 heads] += V^T P^T. A lane copies 8 consecutive channels of the 4 tokens whose weights
//   it holds, and pairs up tokens of one channel by byte permutation.
// - Between the two, weights change lanes: P^T has tokens where S^T has heads. Four shuffles per 16 tokens do that.
// WeightFragments are split into two 16-bit numbers, so that they count with 16 (bf16) or 22 (fp16) bits, not with 8 or 11.
// (An infinite value in V therefore gives NaN where exact arithmetic may give an infinity.)
// Later keys replace a tile's keys as soon as they are multiplied, then its values: between 4 and 8 KB of a ring
// of one tile (D = 128) are under way at any time.
//
// In a format (stored_vector.cuh) the ring holds codes, which become operands without their scales (code_pairs.cuh):
// - Scores are sums of products with codes. Codes of a byte are multiplied in fp16, to which a query in bf16 is brought by
//   a power of two for each head, and the sum is scaled. In int4 sums are over 32 channels, each times the group's scale
//   of the token, plus the group's minimum times the sum of the query's channels, which a product with ones gives.
// - WeightFragments are multiplied by the scales of values before they are rounded, in bf16, whose exponents hold any of these
//   products. In int4, lanes exchange halves of what they copied, so that a product's channels are of one group; the
//   minima of a group add the same number to all its channels, summed up beside the outputs.
// A quad's lane t keeps the numbers of groups t and t + 4 for its quad's two tokens, read one tile ahead.
//
// Deterministic: a fixed order of products for every tile; no lane's result depends on another warp, or on the ring.
#pragma once

#include "kernels/attention_fragments.cuh"
#include "kernels/attention_tile.cuh"
#include "kernels/code_pairs.cuh"
#include "kernels/copy_async.cuh"
#include "kernels/mma.cuh"

namespace kvc {

// kHeadSize is the head size rounded up to 64, 128 or 256.
template <class T, int kHeadSize, class Formats>
class TensorCoreWarp {
    static constexpr VectorFormat kKeys = Formats::kKeys, kValues = Formats::kValues;
    static constexpr bool kExact = kKeys == VectorFormat::kExact;
    static constexpr bool kGroupedKeys = kKeys == VectorFormat::kInt4, kGroupedValues = kValues == VectorFormat::kInt4;
    using KeyUnit = ChannelUnit<kKeys>;
    using ValueUnit = ChannelUnit<kValues>;
    using Weight = std::conditional_t<kExact, T, bfloat16_t>;  // and values
    // Keys and the query in a product. Codes of a byte take fewer instructions in fp16.
    using KeyNumber = std::conditional_t<kExact || kGroupedKeys, T, half_t>;
    static constexpr bool kScalesQuery = !std::is_same_v<KeyNumber, T>;
    static constexpr int kScales = kScalesQuery ? 2 : 1;

    // Channels that the four lanes of a quad take together, a vector of 8 each.
    static constexpr int kQuadChannels = 32;
    static constexpr int kBlockChannels = 64;  // of four products with the same weights
    static constexpr int kBlocks = kHeadSize / kBlockChannels;
    static constexpr int kKeyVectors = kHeadSize / kQuadChannels;  // vectors of one key row in a lane
    static constexpr int kTileKeys = 2 * kKeyVectors;              // vectors of a tile in a lane: first the keys
    static constexpr int kTileValues = 4 * kBlocks;                // ... then the values
    static constexpr int kUnitFloats = sizeof(KeyUnit) / 4;
    static constexpr int kKeyFloats = kTileKeys * kWarpSize * kUnitFloats;
    static constexpr int kValueFloats = kTileValues * kWarpSize * static_cast<int>(sizeof(ValueUnit)) / 4;
    static constexpr int kGroupsOfLane = (kGroupedKeys || kGroupedValues) && kHeadSize == 256 ? 2 : 1;
    static constexpr int kGroups = kGroupedValues ? kHeadSize / kGroupChannels : 1;  // of values
    static constexpr int kSmallestHeadSize = kHeadSize == 64 ? 16 : kHeadSize / 2 + 8;

public:
    // Floats of shared memory of one tile.
    static constexpr int kTileFloats = kKeyFloats + kValueFloats;

    // The warp's query heads [heads,D], at most 8, and its ring of `stages` tiles (1 or 2).
    __device__ __forceinline__ TensorCoreWarp(const T* query, int heads, int head_size, float scale,
                                              SharedSpan<float> ring, int stages)
        : stages_(stages),
          group_(thread_anew() % kWarpSize / 4),
          t_(thread_anew() % 4),
          key_room_(head_size - t_ * 8),
          value_room_(head_size - group_ * 8),
          ring_(own_part(ring, stages)) {
        const T* const row = query + (group_ * head_size + t_ * 8);
#pragma unroll
        for (int i = 0; i < kKeyVectors; ++i) {
            const bool inside = group_ < heads && i * kQuadChannels < key_room_;
            query_[i] =
                in_order_of<kKeys>(inside ? platform::load_16_bytes(row + i * kQuadChannels) : uint4{0, 0, 0, 0});
        }
        if constexpr (kScalesQuery) {
            const float inverse = narrow_query() * scale;
            scale_[0] = __shfl_sync(kFullWarp, inverse, 8 * t_);
            scale_[1] = __shfl_sync(kFullWarp, inverse, 8 * t_ + 4);
        } else {
            scale_[0] = scale;
        }
    }

    __device__ __forceinline__ void attend(const TokenRows<T>& rows, TileRange tiles) {
        const int ahead = stages_ * tiles.step;
#pragma unroll 1
        for (int stage = 0; stage < stages_; ++stage) {
            copy_keys(rows, tiles.first + stage * tiles.step, stage);
            copy_values(rows, tiles.first + stage * tiles.step, stage);
        }
        read_tile_numbers<kKeys>(rows, rows.keys, tiles.first, key_numbers_);
        read_tile_numbers<kValues>(rows, rows.values, tiles.first, value_numbers_);
        int stage = 0;
#pragma unroll 1
        for (int first = tiles.first; first < tiles.end; first += tiles.step) {
            float scores[4];
            wait_for_oldest();
            multiply_keys(stage, scores);
            copy_keys(rows, first + ahead, stage);
            read_tile_numbers<kKeys>(rows, rows.keys, first + tiles.step, key_numbers_);
            weigh(scores, first + group_, rows.end);
            add_values(scores, stage);
            copy_values(rows, first + ahead, stage);
            read_tile_numbers<kValues>(rows, rows.values, first + tiles.step, value_numbers_);
            stage = stage + 1 < stages_ ? stage + 1 : 0;
        }
    }

    // The same for a warp that has just two tiles, in a ring of two, side by side: what one waits for, the other does not.
    __device__ __forceinline__ void attend_two(const TokenRows<T>& rows, TileRange tiles) {
        static_assert(kExact, "a tile's numbers are read one ahead");
        const int firsts[2] = {tiles.first, tiles.first + tiles.step};
        float scores[2][4], maxima[2][2], corrections[2][2];
        copy_keys(rows, firsts[0], 0);
        copy_keys(rows, firsts[1], 1);
        copy_values(rows, firsts[0], 0);
        copy_values(rows, firsts[1], 1);
        copy_async_wait<2>();
        multiply_keys(0, scores[0]);
        multiply_keys(1, scores[1]);
        leave_out(scores[0], firsts[0] + group_, rows.end);
        leave_out(scores[1], firsts[1] + group_, rows.end);
        find_maxima(scores, maxima);
        weigh_tile(scores[0], maxima[0], corrections[0]);
        weigh_tile(scores[1], maxima[1], corrections[1]);
        const WeightFragments weights[2] = {fragments_of(scores[0], 0), fragments_of(scores[1], 0)};
        copy_async_wait<1>();
        rescale_by(corrections[0]);
        multiply_tile(0, weights[0]);
        copy_async_wait<0>();
        rescale_by(corrections[1]);
        multiply_tile(1, weights[1]);
    }

    // Maximum and sum of each head; the lanes of one head hold the sums over different tokens.
    template <class Parts>  // SharedSpan<SoftmaxPart>, or the OutgoingSpan of another block's
    __device__ __forceinline__ void store_parts(const Parts& parts) const {
        const int lane = thread_anew() % kWarpSize;
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            const float sum = sum_groups(sum_[e]);
            if (lane < 4) {
                parts[2 * lane + e] = SoftmaxPart{maximum_[e], sum};
            }
        }
    }

    // Outputs as [8][kOutputStride], over the ring.
    template <class Floats>
    __device__ __forceinline__ void store_output(const Floats& to) const {
        const auto vectors = to.template cast<float4>();
        const int lane = thread_anew() % kWarpSize, group = lane / 4, t = lane % 4;
        __syncwarp();  // the other lanes have read their values
#pragma unroll
        for (int block = 0; block < kBlocks; ++block) {
            const float (&of)[4][4] = output_[block];
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                const int row = (2 * t + e) * kOutputStride<kHeadSize> + block * kBlockChannels;
                if constexpr (kGroupedValues) {
                    const int first = (row + group % 4 * 8 + group / 4 * 4) / 4;
                    const float lower = sum_groups(offsets_[2 * block][e]),
                                upper = sum_groups(offsets_[2 * block + 1][e]);
                    vectors[first] =
                        float4{of[0][e] + lower, of[1][e] + lower, of[0][2 + e] + lower, of[1][2 + e] + lower};
                    vectors[first + 8] =
                        float4{of[2][e] + upper, of[3][e] + upper, of[2][2 + e] + upper, of[3][2 + e] + upper};
                } else {
                    const int first = (row + group * 8) / 4;
                    vectors[first] = float4{of[0][e], of[0][2 + e], of[1][e], of[1][2 + e]};
                    vectors[first + 1] = float4{of[2][e], of[2][2 + e], of[3][e], of[3][2 + e]};
                }
            }
        }
    }

private:
    // A quad's numbers of the keys or values of a tile: for each of its tokens, groups t and t + 4.
    using TileNumbers = VectorNumbers[2][kGroupsOfLane];

    // Makes fp16 of the query in bf16, times the power of two that brings its head's largest magnitude to 2^15 and up:
    // numbers down to 2^-32 of that stay exact, and what is lost of others is less than scores are rounded by. Returns the
    // inverse power, which is normal even times 2^-8: of all that is below 2^-103 the product is exact too.
    __device__ __forceinline__ float narrow_query() {
        float largest = 0.0f;
        each_pair_of_query([&](uint32_t pair) {  // the lower number does not change the exponent of the upper one
            largest = fmaxf(largest, fmaxf(fabsf(__uint_as_float(pair << 16)), fabsf(__uint_as_float(pair))));
            return pair;
        });
        largest = fmaxf(largest, __shfl_xor_sync(kFullWarp, largest, 1));
        largest = fmaxf(largest, __shfl_xor_sync(kFullWarp, largest, 2));
        const uint32_t exponent = max(__float_as_uint(largest) >> 23, 24u);
        const float power = __uint_as_float((269 - exponent) << 23);
        each_pair_of_query([&](uint32_t pair) {
            return pack_pair<half_t>(__uint_as_float(pair << 16) * power, __uint_as_float(pair & 0xffff0000u) * power);
        });
        return __uint_as_float((exponent - 15) << 23);
    }

    // Replaces every two neighbouring numbers of this lane's query.
    template <class Replace>
    __device__ __forceinline__ void each_pair_of_query(Replace&& replace) {
#pragma unroll
        for (int i = 0; i < kKeyVectors; ++i) {
            query_[i] = {replace(query_[i].x), replace(query_[i].y), replace(query_[i].z), replace(query_[i].w)};
        }
    }

    // The ring from this lane's first unit on.
    __device__ __forceinline__ static SharedSpan<float> own_part(const SharedSpan<float>& ring, int stages) {
        const int first = thread_anew() % kWarpSize * kUnitFloats;
        return ring.part(first, stages * kTileFloats - first);
    }

    // This lane's keys and values of a tile, kWarpSize apart.
    __device__ __forceinline__ SharedSpan<KeyUnit> keys(int stage) const {
        constexpr int kSpan = (kTileKeys - 1) * kWarpSize + 1;
        return ring_.part(stage * kTileFloats, kSpan * kUnitFloats).template cast<KeyUnit>();
    }
    __device__ __forceinline__ SharedSpan<ValueUnit> values(int stage) const {
        constexpr int kSpan = (kTileValues - 1) * kWarpSize + 1, kFloats = sizeof(ValueUnit) / 4;
        const int first = stage * kTileFloats + kKeyFloats + (group_ * 4 + t_) * (kFloats - kUnitFloats);
        return ring_.part(first, kSpan * kFloats).template cast<ValueUnit>();
    }

    // Starts to read the numbers of a tile: those of tokens group and group + 8.
    template <VectorFormat kFormat>
    __device__ __forceinline__ void read_tile_numbers(const TokenRows<T>& rows, const VectorTable& table, int first,
                                                      TileNumbers& numbers) const {
        if constexpr (kFormat != VectorFormat::kExact) {
            if (first < rows.end) {
#pragma unroll
                for (int half = 0; half < 2; ++half) {
#pragma unroll
                    for (int i = 0; i < kGroupsOfLane; ++i) {
                        const int group = min(t_ + 4 * i, table.groups - 1);
                        numbers[half][i] = read_numbers<kFormat>(table, rows.slot(first + group_ + 8 * half), group);
                    }
                }
            }
        }
    }

    // The numbers of one group of this lane's tokens. A vector of one group has them in all lanes.
    __device__ __forceinline__ VectorNumbers numbers_of_group(const TileNumbers& numbers, int half, int group) const {
        return __shfl_sync(kFullWarp, numbers[half][group / 4 % kGroupsOfLane], group_ * 4 + group % 4);
    }

    // True if this lane's vector i of a key row, channels 32 i + 8 t and up, is inside the head.
    __device__ __forceinline__ bool has_key(int i) const {
        return kQuadChannels * (i + 1) <= kSmallestHeadSize || i * kQuadChannels < key_room_;
    }

    // True if this lane's vector of a value row in a block of channels is inside; if not, the output is dropped.
    __device__ __forceinline__ bool has_value(int block) const {
        return kBlockChannels * (block + 1) <= kSmallestHeadSize || block * kBlockChannels < value_room_;
    }

    // Tokens group and group + 8 of the tile.
    __device__ __forceinline__ void copy_keys(const TokenRows<T>& rows, int first, int stage) const {
        if (first < rows.end) {
            const SharedSpan<KeyUnit> to = keys(stage);
            const int slots[2] = {rows.slot(first + group_), rows.slot(first + group_ + 8)};  // all before the copies
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const char* row = rows.template row_of_slot<kKeys>(rows.keys, slots[half], t_ * 8);
#pragma unroll
                for (int i = 0; i < kKeyVectors; ++i) {
                    if (has_key(i)) {
                        copy_async(&to[(half * kKeyVectors + i) * kWarpSize], row + i * 4 * sizeof(KeyUnit));
                    }
                }
            }
        }
        copy_async_commit();
    }

    // Tokens 2t, 2t+1, 2t+8 and 2t+9 of the tile.
    __device__ __forceinline__ void copy_values(const TokenRows<T>& rows, int first, int stage) const {
        if (first < rows.end) {
            const SharedSpan<ValueUnit> to = values(stage);
            const int token = first + 2 * t_;
            const int slots[4] = {rows.slot(token), rows.slot(token + 1), rows.slot(token + 8), rows.slot(token + 9)};
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const char* row = rows.template row_of_slot<kValues>(rows.values, slots[i], group_ * 8);
#pragma unroll
                for (int block = 0; block < kBlocks; ++block) {
                    if (has_value(block)) {
                        copy_async(&to[(block * 4 + i) * kWarpSize], row + block * 8 * sizeof(ValueUnit));
                    }
                }
            }
        }
        copy_async_commit();
    }

    // A tile is two groups of copies, its keys and its values. Of the ring's groups all but the oldest may be under way.
    __device__ __forceinline__ void wait_for_oldest() const {
        if (stages_ == 1) {
            copy_async_wait<1>();
        } else {
            copy_async_wait<3>();
        }
    }

    // Two sums, over even and odd products: half the latency of one chain. In int4 they are those of one group.
    __device__ __forceinline__ void multiply_keys(int stage, float (&scores)[4]) const {
        const SharedSpan<KeyUnit> units = keys(stage);
        float even[4] = {}, odd[4] = {}, groups[4] = {};
#pragma unroll
        for (int i = 0; i < kKeyVectors; ++i) {
            const uint4 upper = key_pairs(units, i), lower = key_pairs(units, kKeyVectors + i);
            mma_m16n8k16<KeyNumber>(even, {upper.x, lower.x, upper.y, lower.y}, {query_[i].x, query_[i].y});
            mma_m16n8k16<KeyNumber>(odd, {upper.z, lower.z, upper.w, lower.w}, {query_[i].z, query_[i].w});
            if constexpr (kGroupedKeys) {
                add_group(i, even, odd, groups);
            }
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            if constexpr (kExact) {
                scores[i] = (even[i] + odd[i]) * scale_[0];
            } else if constexpr (kGroupedKeys) {
                scores[i] = groups[i] * scale_[0];
            } else {  // first what makes up for the query's power of two: no number on the way is larger than the score
                scores[i] = (even[i] + odd[i]) * scale_[i % kScales] * factor_of<kKeys>(key_numbers_[i / 2][0]);
            }
        }
    }

    // Vector `number` of this lane's keys; zeros past the head.
    __device__ __forceinline__ uint4 key_pairs(const SharedSpan<KeyUnit>& units, int number) const {
        KeyUnit unit{};
        if (has_key(number % kKeyVectors)) {
            unit = units[number * kWarpSize];
        }
        return widen_pairs<kKeys, KeyNumber>(unit);
    }

    // Adds the products of a group's codes, and of its minimum with the query, to the scores; the former start anew.
    __device__ __forceinline__ void add_group(int group, float (&even)[4], float (&odd)[4], float (&scores)[4]) const {
        const uint32_t ones = pack_pair<T>(1.0f, 1.0f);
        float query[4] = {};  // of every row: the sum of the group's channels of heads 2t, 2t+1
        mma_m16n8k16<T>(query, {ones, ones, ones, ones}, {query_[group].x, query_[group].y});
        mma_m16n8k16<T>(query, {ones, ones, ones, ones}, {query_[group].z, query_[group].w});
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const VectorNumbers numbers = numbers_of_group(key_numbers_, half, group);
            const float scale = factor_of<kKeys>(numbers), minimum = minimum_of(numbers);
#pragma unroll
            for (int e = 2 * half; e < 2 * half + 2; ++e) {
                scores[e] += (even[e] + odd[e]) * scale + query[e] * minimum;
                even[e] = odd[e] = 0.0f;
            }
        }
    }

    // Turns scores [tokens token, token + 8][heads 2t, 2t+1] into weights and rescales the sums so far.
    __device__ __forceinline__ void weigh(float (&scores)[4], int token, int end) {
        float corrections[2];
        leave_out(scores, token, end);
        const float maxima[2] = {maximum_groups(fmaxf(scores[0], scores[2])),
                                 maximum_groups(fmaxf(scores[1], scores[3]))};
        weigh_tile(scores, maxima, corrections);
        rescale_by(corrections);
    }

    // A tile whose maxima are known: its weights, and what the sums so far are to be multiplied by.
    __device__ __forceinline__ void weigh_tile(float (&scores)[4], const float (&maxima)[2], float (&corrections)[2]) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {  // of head 2t + e
            const float maximum = fmaxf(maximum_[e], maxima[e]);
            corrections[e] = softmax_weight(maximum_[e], maximum);
            scores[e] = softmax_weight(scores[e], maximum);
            scores[2 + e] = softmax_weight(scores[2 + e], maximum);
            sum_[e] = sum_[e] * corrections[e] + (scores[e] + scores[2 + e]);
            maximum_[e] = maximum;
        }
    }

    __device__ __forceinline__ void rescale_by(const float (&corrections)[2]) {
        if (__any_sync(kFullWarp, corrections[0] != 1.0f || corrections[1] != 1.0f)) {  // seldom, after a few tiles
            rescale(corrections);
        }
    }

    // WeightFragments as B fragments; in a format times the scales of a group of the tokens' values.
    __device__ __forceinline__ WeightFragments fragments_of(const float (&scores)[4], int group) {
        WeightFragments weights;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float a = scores[2 * half], b = scores[2 * half + 1];
            if constexpr (!kExact) {
                VectorNumbers numbers = value_numbers_[half][0];
                if constexpr (kGroupedValues) {
                    numbers = numbers_of_group(value_numbers_, half, group);
                    offsets_[group][0] += a * minimum_of(numbers);
                    offsets_[group][1] += b * minimum_of(numbers);
                }
                a *= factor_of<kValues>(numbers);
                b *= factor_of<kValues>(numbers);
            }
            weights.set<Weight>(half, a, b, group_, t_);
        }
        return weights;
    }

    __device__ __forceinline__ void rescale(const float (&corrections)[2]) {
#pragma unroll
        for (int block = 0; block < kBlocks; ++block) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    output_[block][i][e] *= corrections[e % 2];
                }
            }
        }
        if constexpr (kGroupedValues) {
#pragma unroll
            for (int group = 0; group < kGroups; ++group) {
                offsets_[group][0] *= corrections[0];
                offsets_[group][1] *= corrections[1];
            }
        }
    }

    // Waits for the tile's values and adds them, weighted, to the output.
    __device__ __forceinline__ void add_values(const float (&scores)[4], int stage) {
        if constexpr (kGroupedValues) {
            wait_for_oldest();
#pragma unroll
            for (int block = 0; block < kBlocks; ++block) {
                const WeightFragments lower = fragments_of(scores, 2 * block),
                                      upper = fragments_of(scores, 2 * block + 1);
                multiply_values(stage, block, lower, upper);
            }
        } else {
            wait_for_oldest();  // first: on sm_100 fragments that are made before would take a register too many
            multiply_tile(stage, fragments_of(scores, 0));
        }
    }

    // The products of a tile's values, which are there, with the same weights for all channels.
    __device__ __forceinline__ void multiply_tile(int stage, const WeightFragments& weights) {
#pragma unroll
        for (int block = 0; block < kBlocks; ++block) {
            if constexpr (kExact) {
                multiply_values(stage, block, weights, weights);
            } else {
                multiply_codes(stage, block, weights);
            }
        }
    }

    // The same for codes of a byte, two tokens' of one channel at a time: they are transposed as they are widened.
    __device__ __forceinline__ void multiply_codes(int stage, int block, const WeightFragments& weights) {
        const SharedSpan<ValueUnit> tile = values(stage);
        ValueUnit units[4];  // of the lane's tokens
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            units[i] = tile[(block * 4 + i) * kWarpSize];
        }
        uint32_t transposed[4][4];  // before all products: among them it would take a register too many
#pragma unroll
        for (int i = 0; i < 4; ++i) {
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const int token = j / 2 * 2;
                transposed[i][j] = widen_channel<kValues, Weight>(units[token], units[token + 1], 2 * i + j % 2);
            }
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            mma_m16n8k16<Weight>(output_[block][i], transposed[i], weights.rounded);
            mma_m16n8k16<Weight>(output_[block][i], transposed[i], weights.rest);
        }
    }

    // A lane has four channels of each of a block's two groups, instead of eight of one: it exchanges the upper or the
    // lower half of its codes with the lane that copied the other group.
    __device__ __forceinline__ uint32_t of_both_groups(uint32_t unit) const {
        const bool upper = group_ >= 4;
        const uint32_t other = __shfl_xor_sync(kFullWarp, upper ? unit : unit >> 16, 16);
        const uint32_t of_lower = upper ? other : unit, of_upper = upper ? unit >> 16 : other;
        return __byte_perm(of_lower, of_upper, 0x5140);  // a pair of channels of each group, then the next
    }

    // The products of one block of channels. In int4 the first two have weights `lower`, the others `upper`.
    __device__ __forceinline__ void multiply_values(int stage, int block, const WeightFragments& lower,
                                                    const WeightFragments& upper) {
        const SharedSpan<ValueUnit> tile = values(stage);
        uint32_t pairs[4][4];  // [token of the lane][pair of channels]
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            ValueUnit unit = tile[(block * 4 + i) * kWarpSize];
            if constexpr (kGroupedValues) {
                unit = of_both_groups(unit);
            }
            const uint4 values = widen_pairs<kValues, Weight>(unit);
            pairs[i][0] = values.x;
            pairs[i][1] = values.y;
            pairs[i][2] = values.z;
            pairs[i][3] = values.w;
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const WeightFragments& weights = i < 2 ? lower : upper;
            const uint32_t transposed[4] = {__byte_perm(pairs[0][i], pairs[1][i], kLowerHalves),
                                            __byte_perm(pairs[0][i], pairs[1][i], kUpperHalves),
                                            __byte_perm(pairs[2][i], pairs[3][i], kLowerHalves),
                                            __byte_perm(pairs[2][i], pairs[3][i], kUpperHalves)};
            mma_m16n8k16<Weight>(output_[block][i], transposed, weights.rounded);
            mma_m16n8k16<Weight>(output_[block][i], transposed, weights.rest);
        }
    }

    float scale_[kScales];  // of scores; where the query is scaled, of those of heads 2t, 2t+1
    int stages_, group_, t_;
    int key_room_, value_room_;  // channels from the lane's first one of a key or value row to the end of the head
    SharedSpan<float> ring_;     // [stage][keys, then values]
    uint4 query_[kKeyVectors];   // of head `group`
    TileNumbers key_numbers_{};
    TileNumbers value_numbers_{};
    // Of heads 2t, 2t+1.
    float maximum_[2] = {-INFINITY, -INFINITY};
    float sum_[2] = {};
    // [block][i]: channels 64 block + 8 group + 2i, + 1 (upper and lower half) of heads 2t, 2t+1; for values in int4
    // 64 block + 32 (i / 2) + 8 (group % 4) + 4 (group / 4) + i % 2, + 2
    float output_[kBlocks][4][4] = {};
    float offsets_[kGroups][2] = {};  // int4: what the minima of a group of values add; a lane's share of the tokens
};

}  // namespace kvc

// Attention of one step: the scores of all heads of a group, their softmax, the weighted sum of values.
#include "kernels/attend.h"

#include "kernels/cache_formats.h"
#include "kernels/vector.h"

namespace kvc::KVC_TARGET {
namespace {

/// The most heads that share each load of a row. Exact rows need no widening, and with fewer heads there is room for more
/// rows: that pays where registers are few.
template <VectorFormat Format>
constexpr int kMostHeads = Format == VectorFormat::kExact ? kWidth / 4 : 4;

/// Vectors of channels that are weighed at once. The sums of two of them and four heads leave room in 16 registers to
/// widen codes; exact rows need none.
template <VectorFormat Format>
constexpr int kVectorsAtOnce = kWidth == 16 || Format == VectorFormat::kExact ? 4 : 2;

/// Calls work<heads>(first head) for all heads, several at a time.
template <int Heads, class Work>
inline void by_heads(int64_t first, int64_t group, const Work& work) {
    for (; first + Heads <= group; first += Heads) work.template operator()<Heads>(first);
    if constexpr (Heads > 1) by_heads<Heads / 2>(first, group, work);
}

/// Scores of `Heads` heads for kWidth / Heads rows, one head after the other, without the scales of rows.
template <VectorFormat Format, int Heads>
inline Vector scores_of_block(const float* query, int64_t query_width, const Row* rows, int64_t head_size) {
    constexpr int kParts = kVectors<Format>, kStretch = kParts * kWidth, kRows = kWidth / Heads;
    Vector sums[kWidth] = {};
    const auto add = [&](int64_t channel, const auto& load_row) {
        Vector parts[Heads][kParts];
        for (int head = 0; head < Heads; ++head) {
            for (int part = 0; part < kParts; ++part) {
                const Vector one = load(query + head * query_width + channel + part * kWidth);
                // Where codes are widened in one register, all heads' queries have room beside the sums.
                parts[head][part] = Format == VectorFormat::kInt8 ? held(one) : one;
            }
        }
#pragma GCC unroll 16
        for (int row = 0; row < kRows; ++row) {
            Vector made[kParts];
            load_row(rows[row], made);
            for (int head = 0; head < Heads; ++head) {
                for (int part = 0; part < kParts; ++part) sums[head * kRows + row] += parts[head][part] * made[part];
            }
        }
    };
    int64_t channel = 0;
    for (; channel + kStretch <= head_size; channel += kStretch) {
        add(channel, [&](const Row& row, Vector* made) { load_channels<Format>(row, channel, made); });
    }
    const int64_t left = head_size - channel;  // the query is padded by zeros
    if (left > 0) {
        add(channel, [&](const Row& row, Vector* made) { load_last_channels<Format>(row, channel, left, made); });
    }
    return sum_each(sums);
}

/// Prefetches while the keys of `rows` tokens are read: their values if tokens are listed, their keys being prefetched
/// beforehand; in order later keys, and the first values after the last key.
KVC_PREFETCHES inline void prefetch_beside(const Table& keys, const Table& values, int64_t count, int64_t token,
                                           int64_t rows) {
    if (keys.tokens == nullptr) {
        const int64_t later = token + keys.ahead;
        return later < count ? prefetch_rows(keys, later, rows) : prefetch_rows(values, later - count, rows);
    }
    for (int64_t row = token; row < token + rows && row < count; ++row) prefetch_row(values, row);
}

/// scores[head, token] of `Heads` heads, of which `width` floats are written. Rows are prefetched if `values` are given.
template <VectorFormat Format, int Heads>
void score_heads(const Table& keys, const Table* values, int64_t count, const float* query, int64_t query_width,
                 float* scores, int64_t width) {
    constexpr int kRows = kWidth / Heads;
    for (int64_t start = 0; start < width; start += kRows) {
        Row rows[kRows];
        for (int row = 0; row < kRows; ++row) rows[row] = row_of(keys, start + row < count ? start + row : count - 1);
        if (values != nullptr) prefetch_beside(keys, *values, count, start, kRows);
        const Vector made = scores_of_block<Format, Heads>(query, query_width, rows, keys.vectors.head_size);
        for (int head = 0; head < Heads; ++head) {
            std::memcpy(scores + head * width + start, reinterpret_cast<const float*>(&made) + head * kRows,
                        kRows * sizeof(float));
        }
    }
}

/// scores[head, token] for all heads, without the scales of tokens.
template <VectorFormat Format>
void score(const AttendCall& call, const Table& keys, float* query, float* scores) {
    const int64_t width = padded(call.count), size = call.keys.head_size, query_width = loaded_width<Format>(size);
    for (int64_t head = 0; head < call.group; ++head) {
        float* const arranged = query + head * query_width;
        for (int64_t channel = 0; channel < query_width; ++channel) arranged[channel] = 0.0f;
        for (int64_t channel = 0; channel < size; ++channel) {
            arranged[place_of_channel<Format>(channel)] = call.query[head * size + channel];
        }
    }
    for (int64_t token = 0; call.tokens != nullptr && token < call.count; ++token) prefetch_row(keys, token);
    const Table values = table_of_codes(call.values, call.tokens);
    by_heads<kMostHeads<Format>>(0, call.group, [&]<int Heads>(int64_t head) {
        score_heads<Format, Heads>(keys, head == 0 ? &values : nullptr, call.count, query + head * query_width,
                                   query_width, scores + head * width, width);
    });
}

/// The first `count` elements, and `rest` in the others.
inline Vector first_or(Vector vector, int64_t count, float rest) {
    Vector made = all(rest);
    std::memcpy(&made, &vector, static_cast<size_t>(count) * sizeof(float));
    return made;
}

/// Turns the scores of one head into weights relative to the largest. The scales of tokens, null where they have none,
/// multiply the scores of keys with `unit`, and the weights of values.
void soften(float* scores, int64_t width, int64_t count, const float* key_scales, float unit, const float* value_scales,
            float* maximum, float* total) {
    Vector largest = all(kLowest);
    for (int64_t token = 0; token < width; token += kWidth) {
        Vector score = load(scores + token);
        if (key_scales != nullptr) score = score * unit * load(key_scales + token);
        if (token + kWidth > count) score = first_or(score, count - token, kLowest);
        store(scores + token, score);
        largest = larger(largest, score);
    }
    *maximum = largest_element(largest);
    Vector sum{};
    for (int64_t token = 0; token < width; token += kWidth) {
        Vector weight = exponential(load(scores + token) - *maximum);
        if (token + kWidth > count) weight = first_or(weight, count - token, 0.0f);
        sum += weight;
        store(scores + token, value_scales == nullptr ? weight : weight * load(value_scales + token));
    }
    *total = sum_of_elements(sum);
}

/// output[head, channel] = sum of weight times value, for `Heads` heads and `Parts` vectors of channels. Later rows are
/// prefetched in order: values and, behind the last one, the first keys of the part to which this thread attends next.
template <int Heads, int Parts, class Load>
inline void weigh_block(const Table& keys, const Table& values, int64_t count, const float* weights, int64_t width,
                        float* output, int64_t output_width, const Load& load_parts) {
    Vector sums[Heads][Parts] = {};
    for (int64_t token = 0; token < count; ++token) {
        Vector parts[Parts];
        if (values.tokens == nullptr) {
            const int64_t later = token + values.ahead;
            prefetch_row(later < count ? values : keys, later);
        }
        load_parts(row_of(values, token), parts);
        for (int head = 0; head < Heads; ++head) {
            const float weight = weights[head * width + token];
            for (int part = 0; part < Parts; ++part) sums[head][part] += parts[part] * weight;
        }
    }
    for (int head = 0; head < Heads; ++head) {
        for (int part = 0; part < Parts; ++part) store(output + head * output_width + part * kWidth, sums[head][part]);
    }
}

template <VectorFormat Format, int Heads>
void weigh_heads(const Table& keys, const Table& values, int64_t count, const float* weights, int64_t width,
                 float* output, int64_t output_width) {
    constexpr int kParts = kVectors<Format>, kStretch = kParts * kWidth, kAtOnce = kVectorsAtOnce<Format> / kParts;
    const int64_t size = values.vectors.head_size;
    int64_t channel = 0;
    for (; channel + kAtOnce * kStretch <= size; channel += kAtOnce * kStretch) {
        weigh_block<Heads, kVectorsAtOnce<Format>>(
            keys, values, count, weights, width, output + channel, output_width, [&](const Row& row, Vector* parts) {
                for (int at = 0; at < kAtOnce; ++at) {
                    load_channels<Format>(row, channel + at * kStretch, parts + at * kParts);
                }
            });
    }
    for (; channel + kStretch <= size; channel += kStretch) {
        weigh_block<Heads, kParts>(keys, values, count, weights, width, output + channel, output_width,
                                   [&](const Row& row, Vector* parts) { load_channels<Format>(row, channel, parts); });
    }
    if (channel < size) {
        weigh_block<Heads, kParts>(
            keys, values, count, weights, width, output + channel, output_width,
            [&](const Row& row, Vector* parts) { load_last_channels<Format>(row, channel, size - channel, parts); });
    }
}

/// result[head, channel] = sum of weight times value, for all heads; the scales of tokens are in the weights.
template <VectorFormat Format>
void weigh(const AttendCall& call, const Table& keys, const Table& values, const float* weights, float* output,
           float* result) {
    const int64_t width = padded(call.count), size = call.values.head_size, output_width = loaded_width<Format>(size);
    by_heads<4>(0, call.group, [&]<int Heads>(int64_t head) {
        weigh_heads<Format, Heads>(keys, values, call.count, weights + head * width, width,
                                   output + head * output_width, output_width);
    });
    for (int64_t head = 0; head < call.group; ++head) {
        for (int64_t channel = 0; channel < size; ++channel) {
            result[head * size + channel] =
                output[head * output_width + place_of_channel<Format>(channel)] * kCodeUnit<Format>;
        }
    }
}

/// Functions for one VectorFormat.
struct OfFormat {
    Table (*open)(const Vectors& vectors, const int32_t* tokens, int64_t count, float* scratch);
    void (*score)(const AttendCall& call, const Table& keys, float* query, float* scores);
    void (*weigh)(const AttendCall& call, const Table& keys, const Table& values, const float* weights, float* output,
                  float* result);
    bool scales_sums;
    float unit;
};
template <VectorFormat Format>
constexpr OfFormat kOfFormat = {open_table<Format>, score<Format>, weigh<Format>, kScalesSums<Format>,
                                kCodeUnit<Format>};
constexpr const OfFormat* kFormats[] = {&kOfFormat<VectorFormat::kExact>, &kOfFormat<VectorFormat::kInt8>,
                                        &kOfFormat<VectorFormat::kFp8>, &kOfFormat<VectorFormat::kInt4>};

}  // namespace

void attend(const AttendCall& call, const Attended& result) {
    const int64_t width = padded(call.count), row = loaded_width<VectorFormat::kInt4>(call.keys.head_size);
    float* const query = call.scratch;
    float* const output = query + call.group * row;
    float* const scores = output + call.group * row;
    float* const numbers = scores + call.group * width;
    const OfFormat& of_keys = *kFormats[static_cast<int>(call.keys.format)];
    const OfFormat& of_values = *kFormats[static_cast<int>(call.values.format)];
    if (call.tokens == nullptr) prefetch_numbers(call.values, 0, call.count);
    const Table keys = of_keys.open(call.keys, call.tokens, call.count, numbers);
    of_keys.score(call, keys, query, scores);
    // The scales of keys are still needed then, and there is one for each.
    const Table values = of_values.open(call.values, call.tokens, call.count, numbers + width);
    for (int64_t head = 0; head < call.group; ++head) {
        soften(scores + head * width, width, call.count, of_keys.scales_sums ? keys.scales : nullptr, of_keys.unit,
               of_values.scales_sums ? values.scales : nullptr, result.maximum + head, result.total + head);
    }
    if (call.tokens == nullptr) prefetch_numbers(call.keys, call.count, call.count);
    of_values.weigh(call, keys, values, scores, output, result.output);
}

}  // namespace kvc::KVC_TARGET

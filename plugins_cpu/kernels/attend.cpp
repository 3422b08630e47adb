// Attention of one step: the scores of all heads of a group, their softmax, the weighted sum of values.
#include "kernels/attend.h"

#include "kernels/vector.h"

namespace kvc::KVC_TARGET {
namespace {

/// Reads the slots by number: in order, or from a list.
class Rows {
public:
    Rows(const float* first, const int32_t* tokens, int64_t head_size)
        : first_(first), tokens_(tokens), head_size_(head_size) {}
    const float* operator[](int64_t number) const {
        return first_ + (tokens_ == nullptr ? number : tokens_[number]) * head_size_;
    }

private:
    const float* first_;
    const int32_t* tokens_;
    int64_t head_size_;
};

/// Scores of one head for the `kWidth` rows, as one vector.
inline Vector scores_of_block(const float* query, const float* const* rows, int64_t head_size) {
    Vector sums[kWidth] = {};
    int64_t channel = 0;
    for (; channel + kWidth <= head_size; channel += kWidth) {
        const Vector part = load(query + channel);
#pragma GCC unroll 16
        for (int row = 0; row < kWidth; ++row) sums[row] += part * load(rows[row] + channel);
    }
    if (channel < head_size) {
        const Vector part = load(query + channel);  // padded by zeros
        for (int row = 0; row < kWidth; ++row) sums[row] += part * load_first(rows[row] + channel, head_size - channel);
    }
    return sum_each(sums);
}

/// scores[head, token] for all heads; entries past `count` hold the lowest number.
void score(const AttendCall& call, const float* query, float* scores) {
    const Rows keys(call.keys, call.tokens, call.head_size), values(call.values, call.tokens, call.head_size);
    const bool scattered = call.tokens != nullptr;  // the processor prefetches slots that are read in order
    for (int64_t token = 0; scattered && token < call.count; ++token) prefetch(keys[token], call.head_size);
    const int64_t width = padded(call.count), query_width = padded(call.head_size);
    for (int64_t start = 0; start < call.count; start += kWidth) {
        const float* rows[kWidth];
        for (int row = 0; row < kWidth; ++row)
            rows[row] = keys[start + row < call.count ? start + row : call.count - 1];
        for (int64_t token = start; scattered && token < start + kWidth && token < call.count; ++token) {
            prefetch(values[token], call.head_size);
        }
        for (int64_t head = 0; head < call.group; ++head) {
            store(scores + head * width + start, scores_of_block(query + head * query_width, rows, call.head_size));
        }
    }
    for (int64_t head = 0; head < call.group; ++head) {
        for (int64_t token = call.count; token < width; ++token) scores[head * width + token] = kLowest;
    }
}

/// Turns the scores of one head into weights relative to the largest.
void soften(float* scores, int64_t width, int64_t count, float* maximum, float* total) {
    Vector largest = load(scores);
    for (int64_t token = kWidth; token < width; token += kWidth) largest = larger(largest, load(scores + token));
    *maximum = largest_element(largest);
    Vector sum{};
    for (int64_t token = 0; token < width; token += kWidth) {
        Vector weight = exponential(load(scores + token) - *maximum);
        if (token + kWidth > count) weight = load_first(reinterpret_cast<const float*>(&weight), count - token);
        store(scores + token, weight);
        sum += weight;
    }
    *total = sum_of_elements(sum);
}

/// output[head, channel] = sum of weight times value, for `Heads` heads and `Parts` vectors of channels.
template <int Heads, int Parts>
inline void weigh_block(const Rows& values, int64_t count, const float* weights, int64_t width, int64_t channel,
                        float* output, int64_t output_width) {
    Vector sums[Heads][Parts] = {};
    for (int64_t token = 0; token < count; ++token) {
        const float* row = values[token] + channel;
        Vector parts[Parts];
        for (int part = 0; part < Parts; ++part) parts[part] = load(row + part * kWidth);
        for (int head = 0; head < Heads; ++head) {
            const float weight = weights[head * width + token];
            for (int part = 0; part < Parts; ++part) sums[head][part] += parts[part] * weight;
        }
    }
    for (int head = 0; head < Heads; ++head) {
        for (int part = 0; part < Parts; ++part) store(output + head * output_width + part * kWidth, sums[head][part]);
    }
}

template <int Heads>
void weigh(const AttendCall& call, const float* weights, float* output) {
    const Rows values(call.values, call.tokens, call.head_size);
    const int64_t width = padded(call.count), output_width = padded(call.head_size);
    int64_t channel = 0;
    for (; channel + 4 * kWidth <= call.head_size; channel += 4 * kWidth) {
        weigh_block<Heads, 4>(values, call.count, weights, width, channel, output + channel, output_width);
    }
    for (; channel + kWidth <= call.head_size; channel += kWidth) {
        weigh_block<Heads, 1>(values, call.count, weights, width, channel, output + channel, output_width);
    }
    if (channel < call.head_size) {
        Vector sums[Heads] = {};
        for (int64_t token = 0; token < call.count; ++token) {
            const Vector part = load_first(values[token] + channel, call.head_size - channel);
            for (int head = 0; head < Heads; ++head) sums[head] += part * weights[head * width + token];
        }
        for (int head = 0; head < Heads; ++head) store(output + head * output_width + channel, sums[head]);
    }
}

}  // namespace

void attend(const AttendCall& call, const Attended& result) {
    const int64_t width = padded(call.count), row = padded(call.head_size);
    float* const query = call.scratch;
    float* const output = query + call.group * row;
    float* const scores = output + call.group * row;
    for (int64_t head = 0; head < call.group; ++head) {
        for (int64_t channel = 0; channel < row; ++channel) {
            query[head * row + channel] = channel < call.head_size ? call.query[head * call.head_size + channel] : 0.0f;
        }
    }
    score(call, query, scores);
    for (int64_t head = 0; head < call.group; ++head) {
        soften(scores + head * width, width, call.count, result.maximum + head, result.total + head);
    }
    int64_t head = 0;
    for (; head + 4 <= call.group; head += 4) weigh<4>(call, scores + head * width, output + head * row);
    for (; head + 2 <= call.group; head += 2) weigh<2>(call, scores + head * width, output + head * row);
    for (; head < call.group; ++head) weigh<1>(call, scores + head * width, output + head * row);
    for (head = 0; head < call.group; ++head) {
        std::memcpy(result.output + head * call.head_size, output + head * row,
                    static_cast<size_t>(call.head_size) * sizeof(float));
    }
}

}  // namespace kvc::KVC_TARGET

// Scores of pages from the bounds of their keys on a few channels, by the same operations in the same order per page:
// pages with equal bounds get equal scores, wherever they lie.
#include "kernels/page_scores.h"

#include "kernels/cache_formats.h"
#include "kernels/take_best.h"
#include "kernels/vector.h"

namespace kvc::KVC_TARGET {
namespace {

float magnitude(float value) { return value < 0.0f ? -value : value; }
Vector magnitude(Vector value) { return value < Vector{} ? -value : value; }

/// Finds the channels where |query| summed over the group is largest, ascending.
void choose_channels(const PageScoreCall& call, int32_t* ranks, int32_t* channels) {
    by_vector(call.head_size, [&](int64_t channel, int64_t count) {
        Vector sum{};
        for (int64_t head = 0; head < call.group; ++head) {
            sum += magnitude(load_some(call.query + head * call.head_size + channel, count));
        }
        store_ranks(ranks + channel, ranks_of(sum), count);
    });
    take_best({.ranks = ranks, .items = call.head_size, .weight = 1, .last_weight = 1}, call.channels, channels);
}

/// signed_query[head, i] = the query on chosen channel i, negated where the channel's minimum is read, divided by the
/// head's temperature. rows[i] becomes the row of the bounds.
void prepare_query(const PageScoreCall& call, int32_t* rows, float* signed_query) {
    const int64_t size = call.head_size, count = call.channels;
    // Each sum waits for the one before, so those of a few heads take turns.
    constexpr int64_t together = 4;
    for (int64_t first = 0; first < call.group; first += together) {
        const int64_t heads = call.group - first < together ? call.group - first : together;
        const float* const query = call.query + first * size;
        float covered[together] = {}, whole[together] = {};
        for (int64_t index = 0; index < count; ++index) {
            for (int64_t head = 0; head < heads; ++head) covered[head] += magnitude(query[head * size + rows[index]]);
        }
        for (int64_t channel = 0; channel < size; ++channel) {
            for (int64_t head = 0; head < heads; ++head) whole[head] += magnitude(query[head * size + channel]);
        }
        for (int64_t head = 0; head < heads; ++head) {
            const float share = covered[head] > 0.0f ? covered[head] / whole[head] : 1.0f;
            const float temperature = __builtin_sqrtf(share * static_cast<float>(size));
            float* const target = signed_query + (first + head) * count;
            for (int64_t index = 0; index < count; ++index)
                target[index] = query[head * size + rows[index]] / temperature;
        }
    }
    for (int64_t index = 0; index < count; ++index) {
        float sum = 0.0f;
        for (int64_t head = 0; head < call.group; ++head) sum += call.query[head * size + rows[index]];
        if (sum > 0.0f) continue;
        for (int64_t head = 0; head < call.group; ++head) signed_query[head * count + index] *= -1.0f;
        rows[index] += static_cast<int32_t>(size);
    }
}

inline Vector load_bounds(const float* bounds) { return load(bounds); }
inline Vector load_bounds(const uint8_t* bounds) { return widened_e5m2(load_codes(bounds)); }
inline Vector load_first_bounds(const float* bounds, int64_t count) { return load_first(bounds, count); }
inline Vector load_first_bounds(const uint8_t* bounds, int64_t count) {
    return widened_e5m2(load_first_codes(bounds, count));
}

/// Computes estimates[head, page] for `Heads` heads and `Parts` vectors of pages; the last vector holds `pages` pages.
template <class Bound, int Heads, int Parts>
inline void estimate_block(const PageScoreCall& call, const int32_t* rows, const float* query, int64_t page,
                           int64_t pages, float* estimates, int64_t width) {
    Vector sums[Heads][Parts] = {};
    for (int64_t index = 0; index < call.channels; ++index) {
        const Bound* const bounds = static_cast<const Bound*>(call.bounds) + rows[index] * call.pages + page;
        Vector parts[Parts];
        if (pages == kWidth) {
            for (int part = 0; part < Parts; ++part) parts[part] = load_bounds(bounds + part * kWidth);
            // Too many rows for the processor.
            for (int part = 0; Parts > 1 && part < Parts; ++part) __builtin_prefetch(bounds + (Parts + part) * kWidth);
        } else {
            parts[0] = load_first_bounds(bounds, pages);
        }
        for (int head = 0; head < Heads; ++head) {
            const float factor = query[head * call.channels + index];
            for (int part = 0; part < Parts; ++part) sums[head][part] += parts[part] * factor;
        }
    }
    for (int head = 0; head < Heads; ++head) {
        for (int part = 0; part < Parts; ++part) store(estimates + head * width + part * kWidth, sums[head][part]);
    }
}

template <class Bound, int Heads>
void estimate(const PageScoreCall& call, const int32_t* rows, const float* query, int64_t used, float* estimates,
              int64_t width) {
    int64_t page = 0;
    for (; page + 4 * kWidth <= used; page += 4 * kWidth) {
        estimate_block<Bound, Heads, 4>(call, rows, query, page, kWidth, estimates + page, width);
    }
    for (; page < used; page += kWidth) {
        const int64_t left = call.pages - page;
        estimate_block<Bound, Heads, 1>(call, rows, query, page, left < kWidth ? left : kWidth, estimates + page,
                                        width);
    }
}

template <class Bound>
void estimate_heads(const PageScoreCall& call, const int32_t* rows, const float* query, int64_t used, float* estimates,
                    int64_t width) {
    int64_t head = 0;
    const auto of = [&](int64_t first) { return query + first * call.channels; };
    const auto at = [&](int64_t first) { return estimates + first * width; };
    for (; head + 4 <= call.group; head += 4) estimate<Bound, 4>(call, rows, of(head), used, at(head), width);
    for (; head + 2 <= call.group; head += 2) estimate<Bound, 2>(call, rows, of(head), used, at(head), width);
    for (; head < call.group; ++head) estimate<Bound, 1>(call, rows, of(head), used, at(head), width);
}

/// Turns the estimates of one head into softmax weights over tokens; returns the factor that makes them probabilities.
float soften(float* estimates, int64_t used, int64_t width, float page_size, float last_size) {
    for (int64_t page = used; page < width; ++page) estimates[page] = kLowest;
    Vector largest = load(estimates);
    for (int64_t page = kWidth; page < width; page += kWidth) largest = larger(largest, load(estimates + page));
    const float maximum = largest_element(largest);
    Vector sum{};
    for (int64_t page = 0; page < width; page += kWidth) {
        const Vector weight = exponential(load(estimates + page) - maximum);
        store(estimates + page, weight);
        sum += page + kWidth <= used ? weight : load_first(estimates + page, used - page);
    }
    return 1.0f / (sum_of_elements(sum) * page_size - estimates[used - 1] * (page_size - last_size));
}

}  // namespace

void rank_pages(const PageScoreCall& call, int32_t* ranks) {
    const int64_t used = (call.length + call.page_size - 1) / call.page_size, width = padded(used);
    const int64_t last_size = call.length - (used - 1) * call.page_size;
    float* const estimates = call.scratch;
    float* const query = estimates + call.group * width;
    int32_t* const rows = reinterpret_cast<int32_t*>(query + call.group * call.channels);
    int32_t* const channel_ranks = rows + call.channels;
    float* const factors = reinterpret_cast<float*>(channel_ranks + call.head_size);
    choose_channels(call, channel_ranks, rows);
    prepare_query(call, rows, query);
    if (call.fp8_bounds) {
        estimate_heads<uint8_t>(call, rows, query, used, estimates, width);
    } else {
        estimate_heads<float>(call, rows, query, used, estimates, width);
    }
    int64_t head;
    const auto at = [&](int64_t first) { return estimates + first * width; };
    for (head = 0; head < call.group; ++head) {
        factors[head] =
            soften(at(head), used, width, static_cast<float>(call.page_size), static_cast<float>(last_size));
    }
    for (int64_t page = 0; page < width; page += kWidth) {
        Vector score{};
        for (head = 0; head < call.group; ++head) score += load(at(head) + page) * factors[head];
        store_ranks(ranks + page, ranks_of(score), used - page < kWidth ? used - page : kWidth);
    }
}

}  // namespace kvc::KVC_TARGET

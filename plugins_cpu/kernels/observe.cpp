// Votes of the last queries of a prompt: their softmax probabilities, summed over queries, then over the heads of the
// group, then spread to neighbours by the maximum or the sum. Equal keys get equal votes, wherever they lie.
#include "kernels/observe.h"

#include "kernels/multiply.h"
#include "kernels/store.h"
#include "kernels/take_best.h"

namespace kvc::KVC_TARGET {
namespace {

/// Computes scores[query, token] of all heads; rows are `width` apart, and numbers past `length` are undefined.
void score(const ObserveCall& call, float* panel, float* scores, int64_t width) {
    for (int64_t start = 0; start < call.length; start += kObservedPanel) {
        const int64_t left = call.length - start, rows = left < kObservedPanel ? left : kObservedPanel;
        const float* keys = reinterpret_cast<const float*>(call.keys.codes) + start * call.head_size;
        if (call.keys.format == VectorFormat::kExact) {
            prefetch(keys + kObservedPanel * call.head_size, kObservedPanel * call.head_size);  // the next keys
        } else {
            float* const widened = panel + kObservedPanel * call.head_size;
            widen_vectors(from_token(call.keys, start), rows, widened);
            keys = widened;
        }
        transpose_to_steps(keys, call.head_size, rows, call.head_size, kObservedPanel, panel);
        multiply<false>(call.query, call.head_size, panel, kObservedPanel, call.group * call.window, call.head_size,
                        kObservedPanel, scores + start, width);
    }
}

/// Turns the scores of one query into weights relative to the largest of the first `visible` tokens; returns the factor
/// that makes them probabilities.
float soften(float* scores, int64_t visible, int64_t width) {
    for (int64_t token = visible; token < width; ++token) scores[token] = kLowest;
    Vector largest = load(scores);
    for (int64_t token = kWidth; token < width; token += kWidth) largest = larger(largest, load(scores + token));
    const float maximum = largest_element(largest);
    Vector sum{};
    for (int64_t token = 0; token < visible; token += kWidth) {
        const Vector weight = exponential(load(scores + token) - maximum);
        store(scores + token, weight);
        sum += token + kWidth <= visible ? weight : load_first(scores + token, visible - token);
    }
    return 1.0f / sum_of_elements(sum);
}

/// Adds the weights of one head's queries to the votes of the first `count` tokens.
void vote(const float* weights, int64_t width, const float* factors, int64_t window, int64_t count, float* votes) {
    for (int64_t token = 0; token < count; token += kWidth) {
        Vector sum{};
        for (int64_t index = 0; index < window; ++index) sum += load(weights + index * width + token) * factors[index];
        store(votes + token, load(votes + token) + sum);
    }
}

/// ranks[i] = the largest of the `count` ranks that are at most `reach` places from place i + `reach`.
void spread(int32_t* ranks, int64_t count, int64_t reach) {
    const int64_t all = count + 2 * reach, wanted = 2 * reach + 1;
    for (int64_t index = 0; index < reach; ++index) ranks[index] = ranks[all - 1 - index] = -1;
    const auto join = [ranks](int64_t until, int64_t distance) {
        for (int64_t index = 0; index < until; ++index) {
            const int32_t other = ranks[index + distance];
            ranks[index] = ranks[index] > other ? ranks[index] : other;
        }
    };
    int64_t covered = 1;  // ranks[i] is the largest of the `covered` ranks from i on
    for (; 2 * covered <= wanted; covered *= 2) join(all - 2 * covered + 1, covered);
    if (covered < wanted) join(count, wanted - covered);
}

/// sums[i] = the `count` votes that are at most `reach` places from place i, added from the lowest place on.
void add_up(const float* votes, int64_t count, int64_t reach, float* sums) {
    for (int64_t token = 0; token < count; ++token) sums[token] = 0.0f;
    const int64_t furthest = reach < count ? reach : count - 1;
    for (int64_t distance = -furthest; distance <= furthest; ++distance) {
        const int64_t first = distance < 0 ? -distance : 0, last = distance < 0 ? count : count - distance;
        for (int64_t token = first; token < last; ++token) sums[token] += votes[token + distance];
    }
}

}  // namespace

void observe(const ObserveCall& call, int32_t* ranks) {
    const int64_t width = (call.length + kObservedPanel - 1) / kObservedPanel * kObservedPanel;
    const int64_t count = call.length - call.window, queries = call.group * call.window;
    float* const scores = call.scratch;
    float* const votes = scores + queries * width;
    float* const factors = votes + width;
    score(call, factors + queries, scores, width);
    for (int64_t token = 0; token < width; ++token) votes[token] = 0.0f;
    for (int64_t head = 0; head < call.group; ++head) {
        float* const weights = scores + head * call.window * width;
        for (int64_t index = 0; index < call.window; ++index) {
            factors[index] = soften(weights + index * width, count + index + 1, width);
        }
        vote(weights, width, factors, call.window, count, votes);
    }
    if (call.adds) {
        float* const sums = scores;  // as long as one query's scores, which nothing reads any more
        add_up(votes, count, call.reach, sums);
        for (int64_t token = 0; token < count; ++token) ranks[token] = rank_of(sums[token]);
        return;
    }
    for (int64_t token = 0; token < count; ++token) ranks[call.reach + token] = rank_of(votes[token]);
    spread(ranks, count, call.reach);
}

}  // namespace kvc::KVC_TARGET

// Causal attention in tiles of 64 queries by 64 keys: scores never leave the processor's cache, and memory does not grow
// with the square of the prompt (the method of FlashAttention, arXiv 2205.14135). Keys and values are laid out once per
// KV head. Products are in float32 or in bfloat16; sums, maxima and softmax are float32 in both cases.
#include "kernels/prefill.h"

#include "kernels/multiply.h"
#include "kernels/vector.h"

namespace kvc::KVC_TARGET {
namespace {

constexpr int64_t kTile = kPrefillTile;

/// Bytes of one tile of keys or values. Keys are steps of channels [steps, 64], values steps of keys [steps, padded size].
template <class Step>
int64_t bytes_of_keys(int64_t head_size) {
    return steps_of<Step>(head_size) * kTile * int64_t{sizeof(Step)};
}
template <class Step>
int64_t bytes_of_values(int64_t head_size) {
    return steps_of<Step>(kTile) * padded(head_size) * int64_t{sizeof(Step)};
}
template <class Step>
int64_t bytes_of_tile(int64_t head_size) {
    return bytes_of_keys<Step>(head_size) + bytes_of_values<Step>(head_size);
}

/// Lays out up to 64 keys and their values; fills up with zeros after the last key.
template <class Step>
void lay_out(const float* k, const float* v, int64_t count, int64_t head_size, uint8_t* tile) {
    const int64_t width = padded(head_size);
    transpose_to_steps(k, head_size, count, head_size, kTile, reinterpret_cast<Step*>(tile));
    auto* const values = reinterpret_cast<Step*>(tile + bytes_of_keys<Step>(head_size));
    constexpr int parts = kElements<Step>;
    for (int64_t key = 0; key < kTile; key += parts) {
        for (int64_t channel = 0; channel < width; channel += kWidth) {
            const int64_t left = head_size - channel;
            Vector rows[parts]{};
            for (int part = 0; part < parts && key + part < count; ++part) {
                const float* const from = v + (key + part) * head_size + channel;
                rows[part] = left >= kWidth ? load(from) : load_first(from, left);
            }
            store_steps(values + key / parts * width + channel, steps_across(rows, Step{}));
        }
    }
}

/// Up to 64 rows of one query head, and their result so far.
template <class Step>
struct Tile {
    Step* query;     ///< [64, steps of head_size]
    float* output;   ///< [64, padded head_size], weighted values
    float* maximum;  ///< [64]
    float* totals;   ///< [64, kWidth], the sum of weights, one part per lane
    int64_t rows;
};

/// Turns the scores of each row into weights relative to the row's maximum so far, as steps in the place of the scores,
/// and rescales the tile's sums to that maximum. `factor` makes scores logarithms of base 2.
template <class Step>
void soften(const Tile<Step>& tile, float factor, float* scores, int64_t output_width) {
    constexpr int kVectors = kTile / kWidth, parts = kElements<Step>;
    constexpr bool kExact = parts == 1;
    for (int64_t row = 0; row < tile.rows; ++row) {
        float* const line = scores + row * kTile;
        Vector weights[kVectors];
        for (int part = 0; part < kVectors; ++part) weights[part] = load(line + part * kWidth);
        Vector largest = weights[0];
        for (int part = 1; part < kVectors; ++part) largest = larger(largest, weights[part]);
        const float before = tile.maximum[row], here = largest_element(largest);
        const float maximum = here > before ? here : before;
        Vector total = load(tile.totals + row * kWidth);
        if (here > before) {
            const Vector less = power_of_two<kExact>(all((before - maximum) * factor));
            total *= less;
            float* const output = tile.output + row * output_width;
            for (int64_t channel = 0; channel < output_width; channel += kWidth) {
                store(output + channel, load(output + channel) * less);
            }
            tile.maximum[row] = maximum;
        }
        for (int part = 0; part < kVectors; ++part) {
            weights[part] = power_of_two<kExact>((weights[part] - maximum) * factor);
            total += weights[part];
        }
        for (int part = 0; part < kVectors; part += parts) {
            store(line + part / parts * kWidth, steps_from(weights + part, Step{}));
        }
        store(tile.totals + row * kWidth, total);
    }
}

/// Adds the attention of a tile of queries to a tile of keys: row i sees the first `seen` + i keys. A row that sees
/// none of them has seen earlier keys, next to which the lowest score weighs nothing.
template <class Step>
void attend(const Tile<Step>& tile, const uint8_t* layout, int64_t head_size, int64_t seen, float factor,
            float* scores) {
    const int64_t width = padded(head_size), steps = steps_of<Step>(head_size);
    const auto* const keys = reinterpret_cast<const Step*>(layout);
    const auto* const values = reinterpret_cast<const Step*>(layout + bytes_of_keys<Step>(head_size));
    multiply<false>(tile.query, steps, keys, kTile, tile.rows, steps, kTile, scores, kTile);
    for (int64_t row = 0; row < tile.rows && seen + row < kTile; ++row) {
        for (int64_t key = seen + row > 0 ? seen + row : 0; key < kTile; ++key) scores[row * kTile + key] = kLowest;
    }
    soften(tile, factor, scores, width);
    multiply<true>(reinterpret_cast<const Step*>(scores), kTile, values, width, tile.rows, steps_of<Step>(kTile), width,
                   tile.output, width);
}

template <class Step>
void finish(const Tile<Step>& tile, int64_t head_size, float* target) {
    const int64_t width = padded(head_size);
    for (int64_t row = 0; row < tile.rows; ++row) {
        const float factor = 1.0f / sum_of_elements(load(tile.totals + row * kWidth));
        for (int64_t channel = 0; channel < head_size; ++channel) {
            target[row * head_size + channel] = tile.output[row * width + channel] * factor;
        }
    }
}

template <class Step>
void attend_rows(const PrefillCall& call) {
    const int64_t size = call.head_size, width = padded(size), steps = steps_of<Step>(size), head = call.queries * size;
    const int64_t row_tiles = (call.rows + kTile - 1) / kTile, tiles = call.group * row_tiles;
    const int64_t last_row = call.first_row + call.rows - 1;
    float* const scores = call.scratch;
    const auto first_row = [&](int64_t tile) { return call.first_row + tile % row_tiles * kTile; };
    const auto place = [&](int64_t tile) { return tile / row_tiles * head + first_row(tile) * size; };
    const auto tile_at = [&](int64_t tile) {
        const int64_t left = last_row + 1 - first_row(tile);
        float* const start = scores + kTile * kTile + tile * kTile * (steps + width + 1 + kWidth);
        return Tile<Step>{.query = reinterpret_cast<Step*>(start),
                          .output = start + kTile * steps,
                          .maximum = start + kTile * (steps + width),
                          .totals = start + kTile * (steps + width + 1),
                          .rows = left < kTile ? left : kTile};
    };
    constexpr float kLog2E = 1.44269504f;
    const float factor = kLog2E / __builtin_sqrtf(static_cast<float>(size));
    for (int64_t number = 0; number < tiles; ++number) {
        const Tile<Step> tile = tile_at(number);
        for (int64_t row = 0; row < tile.rows; ++row) {
            to_steps(call.q + place(number) + row * size, size, tile.query + row * steps);
        }
        for (int64_t index = 0; index < kTile * width; ++index) tile.output[index] = 0.0f;
        for (int64_t row = 0; row < kTile; ++row) tile.maximum[row] = kLowest;
        for (int64_t index = 0; index < kTile * kWidth; ++index) tile.totals[index] = 0.0f;
    }
    for (int64_t key = 0; key < call.length && key <= call.before + last_row; key += kTile) {
        const uint8_t* const layout = call.layout + key / kTile * bytes_of_tile<Step>(size);
        for (int64_t number = 0; number < tiles; ++number) {
            const Tile<Step> tile = tile_at(number);
            const int64_t seen = call.before + first_row(number) - key + 1;
            if (seen + tile.rows > 1) attend(tile, layout, size, seen, factor, scores);
        }
    }
    for (int64_t number = 0; number < tiles; ++number) finish(tile_at(number), size, call.o + place(number));
}

}  // namespace

const PrefillKernels kPrefill{bytes_of_tile<float>, lay_out<float>, attend_rows<float>};
#if defined(__AVX512BF16__)
const PrefillKernels kPrefillBf16{bytes_of_tile<Pair>, lay_out<Pair>, attend_rows<Pair>};
#endif

}  // namespace kvc::KVC_TARGET

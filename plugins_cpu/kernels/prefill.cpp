// Causal attention in tiles of 64 queries by 64 keys: scores never leave the processor's cache, and memory does not grow
// with the prompt (the method of FlashAttention, arXiv 2205.14135).
#include "kernels/prefill.h"

#include "kernels/multiply.h"
#include "kernels/vector.h"

namespace kvc::KVC_TARGET {
namespace {

constexpr int64_t kTile = kPrefillTile;
constexpr float kLowest = -3.4e38f;

/// Up to 64 rows of one query head, and their result so far.
struct Tile {
    const float* query;  ///< [64, head_size], scaled
    float* output;       ///< [64, padded head_size], weighted values
    float* maximum;      ///< [64]
    float* totals;       ///< [64, kWidth], the sum of weights, one part per lane
    int64_t rows;
};

/// columns[channel, key] of the keys, zeros behind the last.
void transpose(const float* keys, int64_t count, int64_t head_size, float* columns) {
    for (int64_t channel = 0; channel < head_size; ++channel) {
        float* const column = columns + channel * kTile;
        for (int64_t key = 0; key < count; ++key) column[key] = keys[key * head_size + channel];
        for (int64_t key = count; key < kTile; ++key) column[key] = 0.0f;
    }
}

/// Turns the scores of each row into weights relative to the row's maximum so far, and what it holds into the same scale.
void soften(const Tile& tile, float* scores, int64_t output_width) {
    constexpr int kVectors = kTile / kWidth;
    for (int64_t row = 0; row < tile.rows; ++row) {
        float* const line = scores + row * kTile;
        Vector largest = load(line);
        for (int part = 1; part < kVectors; ++part) largest = larger(largest, load(line + part * kWidth));
        const float before = tile.maximum[row], here = largest_element(largest);
        const float maximum = here > before ? here : before;
        Vector total = load(tile.totals + row * kWidth);
        if (here > before) {
            const Vector factor = exponential(all(before - maximum));
            total *= factor;
            float* const output = tile.output + row * output_width;
            for (int64_t channel = 0; channel < output_width; channel += kWidth) {
                store(output + channel, load(output + channel) * factor);
            }
            tile.maximum[row] = maximum;
        }
        for (int part = 0; part < kVectors; ++part) {
            const Vector weight = exponential(load(line + part * kWidth) - maximum);
            store(line + part * kWidth, weight);
            total += weight;
        }
        store(tile.totals + row * kWidth, total);
    }
}

/// Adds the attention of a tile to some keys.
void attend(const Tile& tile, const float* columns, const float* values, int64_t value_width, int64_t keys,
            int64_t head_size, bool diagonal, float* scores) {
    const int64_t output_width = padded(head_size);
    multiply<false>(tile.query, head_size, columns, kTile, tile.rows, head_size, kTile, scores, kTile);
    if (diagonal) {
        for (int64_t row = 0; row < tile.rows; ++row) {
            for (int64_t key = row + 1; key < kTile; ++key) scores[row * kTile + key] = kLowest;
        }
    }
    soften(tile, scores, output_width);
    multiply<true>(scores, kTile, values, value_width, tile.rows, keys, output_width, tile.output, output_width);
}

void finish(const Tile& tile, int64_t head_size, float* target) {
    const int64_t width = padded(head_size);
    for (int64_t row = 0; row < tile.rows; ++row) {
        const float factor = 1.0f / sum_of_elements(load(tile.totals + row * kWidth));
        for (int64_t channel = 0; channel < head_size; ++channel) {
            target[row * head_size + channel] = tile.output[row * width + channel] * factor;
        }
    }
}

}  // namespace

void prefill(const PrefillCall& call) {
    const int64_t size = call.head_size, width = padded(size), head = call.length * size;
    const int64_t row_tiles = (call.rows + kTile - 1) / kTile, tiles = call.group * row_tiles;
    const int64_t last_row = call.first_row + call.rows - 1;
    float* const columns = call.scratch;
    float* const padded_values = columns + kTile * size;
    float* const scores = padded_values + kTile * width;
    float* const state = scores + kTile * kTile;
    const auto first_row = [&](int64_t tile) { return call.first_row + tile % row_tiles * kTile; };
    const auto place = [&](int64_t tile) { return tile / row_tiles * head + first_row(tile) * size; };
    const auto tile_at = [&](int64_t tile) {
        const int64_t left = last_row + 1 - first_row(tile);
        float* const start = state + tile * kTile * (size + width + 1 + kWidth);
        return Tile{.query = start,
                    .output = start + kTile * size,
                    .maximum = start + kTile * (size + width),
                    .totals = start + kTile * (size + width + 1),
                    .rows = left < kTile ? left : kTile};
    };
    const float scale = 1.0f / __builtin_sqrtf(static_cast<float>(size));
    for (int64_t number = 0; number < tiles; ++number) {
        const Tile tile = tile_at(number);
        float* const query = state + number * kTile * (size + width + 1 + kWidth);
        for (int64_t index = 0; index < tile.rows * size; ++index) query[index] = call.q[place(number) + index] * scale;
        for (int64_t index = 0; index < kTile * width; ++index) tile.output[index] = 0.0f;
        for (int64_t row = 0; row < kTile; ++row) tile.maximum[row] = kLowest;
        for (int64_t index = 0; index < kTile * kWidth; ++index) tile.totals[index] = 0.0f;
    }
    for (int64_t key = 0; key <= last_row; key += kTile) {
        const int64_t keys = call.length - key < kTile ? call.length - key : kTile;
        transpose(call.k + key * size, keys, size, columns);
        const float* values = call.v + key * size;
        if (size != width) {
            for (int64_t row = 0; row < keys; ++row) {
                for (int64_t channel = 0; channel < width; ++channel) {
                    padded_values[row * width + channel] = channel < size ? values[row * size + channel] : 0.0f;
                }
            }
            values = padded_values;
        }
        for (int64_t number = 0; number < tiles; ++number) {
            if (key > first_row(number)) continue;
            attend(tile_at(number), columns, values, width, keys, size, key == first_row(number), scores);
        }
    }
    for (int64_t number = 0; number < tiles; ++number) finish(tile_at(number), size, call.o + place(number));
}

}  // namespace kvc::KVC_TARGET

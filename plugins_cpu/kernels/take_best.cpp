// Takes the best items by rank: finds the smallest taken rank bit by bit, by counting. No item is moved or sorted.
#include "kernels/take_best.h"

#include "kernels/bytes.h"

namespace kvc::KVC_TARGET {
namespace {

/// Returns the total weight of the items whose rank is at least this one.
int64_t counted_from(const RankedItems& items, int32_t rank) {
    Integers found{};
    int64_t item = 0;
    for (; item + kWidth <= items.items; item += kWidth) {
        found -= load_integers(items.ranks + item) >= rank;
    }
    int64_t count = 0;
    for (int lane = 0; lane < kWidth; ++lane) count += found[lane];
    for (; item < items.items; ++item) count += items.ranks[item] >= rank ? 1 : 0;
    const bool last = items.ranks[items.items - 1] >= rank;
    return count * items.weight - (last ? items.weight - items.last_weight : 0);
}

/// Bit i is set if lane i is at least `rank`, which is at least -1.
uint32_t lanes_from(Integers ranks, int32_t rank) {
#if defined(__AVX512F__)
    return _mm512_cmpge_epi32_mask(reinterpret_cast<__m512i>(ranks), reinterpret_cast<__m512i>(all_integers(rank)));
#elif defined(__AVX2__)
    return static_cast<uint32_t>(_mm256_movemask_ps(reinterpret_cast<__m256>(ranks > rank - 1)));
#else
    uint32_t lanes = 0;
    for (int lane = 0; lane < kWidth; ++lane) lanes |= static_cast<uint32_t>(ranks[lane] >= rank) << lane;
    return lanes;
#endif
}

/// Calls take(item) for all items, ascending, whose rank is at least `rank`.
template <class Take>
void for_ranks_from(const RankedItems& items, int32_t rank, const Take& take) {
    int64_t item = 0;
    for (; item + kWidth <= items.items; item += kWidth) {
        for (uint32_t lanes = lanes_from(load_integers(items.ranks + item), rank); lanes != 0; lanes &= lanes - 1) {
            take(item + __builtin_ctz(lanes));
        }
    }
    for (; item < items.items; ++item) {
        if (items.ranks[item] >= rank) take(item);
    }
}

}  // namespace

void take_best(const RankedItems& items, int64_t wanted, int32_t* parts) {
    int32_t smallest = -1;
    if (counted_from(items, 0) >= wanted) {
        smallest = 0;
        for (int bit = 30; bit >= 0; --bit) {
            const int32_t larger = smallest | (1 << bit);
            const int64_t count = counted_from(items, larger);
            if (count >= wanted) smallest = larger;
            if (count == wanted) break;  // a border, even if no item has exactly this rank
        }
    }
    // Among equal ranks at the border, the lowest items are taken; the last of them may be taken in part.
    int64_t left = wanted - (smallest == INT32_MAX ? 0 : counted_from(items, smallest + 1));
    for_ranks_from(items, smallest, [&](int64_t item) {
        int64_t count = item + 1 < items.items ? items.weight : items.last_weight;
        if (items.ranks[item] == smallest) {
            count = count < left ? count : left;
            left -= count;
        }
        const int32_t first = static_cast<int32_t>(item * items.weight);
        for (int32_t part = 0; part < count; ++part) *parts++ = first + part;
    });
}

}  // namespace kvc::KVC_TARGET

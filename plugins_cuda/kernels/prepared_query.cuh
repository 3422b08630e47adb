// The query of a KV head in the form that page_scores.cuh reads: prepare_step.cuh writes it once, every block that
// scores pages reads it.
//
// Per KV head, in vectors of 16 bytes; the rest of a part's last vector is undefined, except that `rows` ends in zeros:
//
//   rows          int32: the rows of the bounds that the chosen channels read, best channel first, then zeros
//   temperatures  fp32 [g]: 1/T
//   factors       the numbers that these rows are multiplied by, in the scorer's form
//
// A block needs the rows to choose the bounds to stage, so it reads them into registers; the rest it copies into shared
// memory while the bounds are on their way.
#pragma once

#include <type_traits>

#include "kernels/page_scores_fma.cuh"
#include "kernels/page_scores_tensor_core.cuh"

namespace kvc {

// Sums the bounds of a cache of T for kHeads query heads at a time: 1, 2 or 4 in fp32, the group rounded up to 4, 8 or
// 16 in 16 bit. The scorer's form of the query is the same for any Bound.
template <class T, int kHeads, class Bound = T>
using PageScorer = std::conditional_t<sizeof(T) == 2, TensorCoreScorer<T, kHeads, Bound>, FmaScorer<kHeads, Bound>>;

// The places at which the parts start, in vectors.
struct PreparedLayout {
    int temperatures;
    int factors;
    int total;
};

template <class Scorer>
__host__ __device__ __forceinline__ PreparedLayout prepared_layout(int channels, int group) {
    constexpr int kWords = 4;  // of a vector
    PreparedLayout layout;
    layout.temperatures = (Scorer::rows(channels) + kWords - 1) / kWords;
    layout.factors = layout.temperatures + (group + kWords - 1) / kWords;
    layout.total = layout.factors + Scorer::query_vectors(channels, group);
    return layout;
}

// Writes the parts that follow from the channels that `query` has chosen. No barrier.
template <class Scorer>
__device__ __forceinline__ void write_prepared(const GroupQuery& query, uint4* prepared) {
    const PreparedLayout layout = prepared_layout<Scorer>(query.channels, query.group);
    const int i = static_cast<int>(threadIdx.x);
    if (i < 4 * layout.temperatures) {
        reinterpret_cast<int32_t*>(prepared)[i] = i < query.channels ? query.chosen[i] : 0;
    }
    Scorer::write_query(query, prepared + layout.factors);
    find_temperatures(query, reinterpret_cast<float*>(prepared + layout.temperatures));
}

}  // namespace kvc

#include "operators/tables.h"

#include <cstring>

#include "kernels/choice.h"

namespace kvc {
namespace {

/// Calls part(member, bytes of a vector) for each part that a format has.
template <class Part>
void each_part(const WritableVectors& vectors, const Part& part) {
    const VectorFormat format = vectors.format;
    const int64_t numbers = bytes_of_scales(format, vectors.head_size);
    part([](const auto& of) { return of.codes; }, bytes_of_codes(format, vectors.head_size));
    if (vectors.scales != nullptr) part([](const auto& of) { return of.scales; }, numbers);
    if (vectors.minima != nullptr) part([](const auto& of) { return of.minima; }, numbers);
}

}  // namespace

void put_vectors(const Vectors& source, int64_t count, const WritableVectors& target) {
    if (source.format != target.format) {
        kernels().store_vectors(reinterpret_cast<const float*>(source.codes), count, target);
        return;
    }
    each_part(target, [&](const auto& part, int64_t bytes) {
        std::memcpy(part(target), part(source), static_cast<size_t>(count * bytes));
    });
}

void clear_vectors(const WritableVectors& target, int64_t count) {
    each_part(target, [&](const auto& part, int64_t bytes) {
        std::memset(part(target), 0, static_cast<size_t>(count * bytes));
    });
}

}  // namespace kvc

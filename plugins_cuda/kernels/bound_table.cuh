// Page bounds one at a time, for kernels that move few of them: the choice of the cache's type or fp8 is a uniform
// branch there, and one kernel serves both.
#pragma once

#include <cstdint>

#include "kernels/fp8.cuh"
#include "kernels/numeric.cuh"
#include "kernels/platform.cuh"

namespace kvc {

// Bounds of a call on caches of T. fp8 bounds are rounded up, others to nearest: a maximum of T is exact.
template <class T>
class BoundTable {
public:
    // A bound in its stored form; the load may still be under way.
    struct Stored {
        T number;
        fp8_t code;
    };

    __device__ __forceinline__ BoundTable(void* first, bool is_fp8) : first_(first), is_fp8_(is_fp8) {}

    // The table without its first elements.
    __device__ __forceinline__ BoundTable from(int64_t element) const {
        const int64_t bytes = element * static_cast<int64_t>(is_fp8_ ? sizeof(fp8_t) : sizeof(T));
        return {static_cast<char*>(first_) + bytes, is_fp8_};
    }

    __device__ __forceinline__ Stored load(int64_t i) const {
        Stored stored{};
        if (is_fp8_) {
            stored.code = static_cast<const fp8_t*>(first_)[i];
        } else {
            stored.number = static_cast<const T*>(first_)[i];
        }
        return stored;
    }
    __device__ __forceinline__ float widen(const Stored& stored) const {
        return is_fp8_ ? to_float(stored.code) : to_float(stored.number);
    }
    __device__ __forceinline__ void store(int64_t i, float bound) const {
        if (is_fp8_) {
            static_cast<fp8_t*>(first_)[i] = from_float<fp8_t>(bound);
        } else {
            static_cast<T*>(first_)[i] = from_float<T>(bound);
        }
    }

private:
    void* first_;
    bool is_fp8_;
};

}  // namespace kvc

// C = A B with operands that cp.async brings to shared memory; shapes: A [16, 16], B [16, 8] of T, C [16, 8] fp32.
#include "emulation/toy.h"
#include "kernels/copy_async.cuh"
#include "kernels/mma.cuh"
#include "kernels/shared.cuh"

namespace kvc {

template <class T>
struct MmaParams {
    const T* a;          // [16, 16]
    const T* b;          // [16, 8]
    const T* b_columns;  // [8, 16]: the transpose of b
    float* c;            // [3, 16, 8]: with b, with b_columns, with b by ldmatrix
    bool wait;           // false: b_columns is used before it has arrived
};

template <class T>
__device__ void write(float* c, const float (&fragment)[4]) {
    const int group = static_cast<int>(threadIdx.x) / 4;
    const int column = static_cast<int>(threadIdx.x) % 4 * 2;
    c[group * 8 + column] = fragment[0];
    c[group * 8 + column + 1] = fragment[1];
    c[(group + 8) * 8 + column] = fragment[2];
    c[(group + 8) * 8 + column + 1] = fragment[3];
}

template <class T>
__device__ uint32_t pair(T low, T high) {
    return pack_pair<T>(to_float(low), to_float(high));
}

template <class T>
__global__ void __launch_bounds__(32) product(const MmaParams<T> params) {
    wait_for_previous_launch();
    const int lane = static_cast<int>(threadIdx.x);
    const int group = lane / 4;
    const int t = lane % 4 * 2;
    KVC_SHARED(T, a, 16 * 16);
    KVC_SHARED(T, b, 16 * 8);
    KVC_SHARED(T, columns, 8 * 16);
    copy_async_16(&a[lane * 8], params.a + lane * 8);
    if (lane < 16) copy_async_16(&b[lane * 8], params.b + lane * 8);
    copy_async_commit();
    if (lane < 16) copy_async_16(&columns[lane * 8], params.b_columns + lane * 8);
    copy_async_commit();
    if (params.wait) {
        copy_async_wait<0>();
    } else {
        copy_async_wait<1>();
    }
    __syncthreads();

    const auto row_pair = [&](int row, int column) { return pair(a[row * 16 + column], a[row * 16 + column + 1]); };
    const uint32_t first[4] = {row_pair(group, t), row_pair(group + 8, t), row_pair(group, t + 8),
                               row_pair(group + 8, t + 8)};
    const uint32_t second[2] = {pair(b[t * 8 + group], b[(t + 1) * 8 + group]),
                                pair(b[(t + 8) * 8 + group], b[(t + 9) * 8 + group])};
    float c[4] = {};
    mma_m16n8k16<T>(c, first, second);
    write<T>(params.c, c);

    const uint32_t of_columns[2] = {pair(columns[group * 16 + t], columns[group * 16 + t + 1]),
                                    pair(columns[group * 16 + t + 8], columns[group * 16 + t + 9])};
    float from_columns[4] = {};
    mma_m16n8k16<T>(from_columns, first, of_columns);
    write<T>(params.c + 128, from_columns);
    copy_async_wait<0>();

    uint32_t loaded[4];  // the two halves of b, twice
    load_matrices_transposed(loaded, b[lane % 16 * 8]);
    float from_loaded[4] = {};
    mma_m16n8k16<T>(from_loaded, first, {loaded[0], loaded[3]});
    write<T>(params.c + 256, from_loaded);
}

}  // namespace kvc

template <class T>
static void run(kvc::Stream& stream, const uint16_t* a, const uint16_t* b, const uint16_t* b_columns, float* c,
                int wait) {
    const auto typed = [](const uint16_t* p) { return reinterpret_cast<const T*>(p); };
    kvc::launch<kvc::product<T>>("product", 1, 32, 0, stream, {typed(a), typed(b), typed(b_columns), c, wait != 0});
}

extern "C" const char* run_product(int bfloat16, const uint16_t* a, const uint16_t* b, const uint16_t* b_columns,
                                   float* c, int wait) {
    return message_of([&](kvc::Stream& stream) {
        (bfloat16 ? run<kvc::bfloat16_t> : run<kvc::half_t>)(stream, a, b, b_columns, c, wait);
    });
}

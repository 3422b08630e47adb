// C = A B through every way into fragments; shapes: A [16, 16], B [16, 8] of T, C [16, 8] fp32.
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
    float* c;            // [4, 16, 8]: by plain loads, by ldmatrix, by ldmatrix of columns, by ldmatrix_x2
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

    const T* A = params.a;
    const T* B = params.b;
    const uint32_t plain_a[4] = {pair(A[group * 16 + t], A[group * 16 + t + 1]),
                                 pair(A[(group + 8) * 16 + t], A[(group + 8) * 16 + t + 1]),
                                 pair(A[group * 16 + t + 8], A[group * 16 + t + 9]),
                                 pair(A[(group + 8) * 16 + t + 8], A[(group + 8) * 16 + t + 9])};
    const uint32_t plain_b[2] = {pair(B[t * 8 + group], B[(t + 1) * 8 + group]),
                                 pair(B[(t + 8) * 8 + group], B[(t + 9) * 8 + group])};
    float c[4] = {};
    mma_m16n8k16<T>(c, plain_a, plain_b);
    write<T>(params.c, c);

    uint32_t loaded_a[4];
    ldmatrix_x4(loaded_a, &a[lane % 16 * 16 + lane / 16 * 8]);
    uint32_t loaded_b[4];  // the rows of B twice
    ldmatrix_x4_trans(loaded_b, &b[lane % 16 * 8]);
    const uint32_t first_b[2] = {loaded_b[0], loaded_b[1]};
    float from_rows[4] = {};
    mma_m16n8k16<T>(from_rows, loaded_a, first_b);
    write<T>(params.c + 128, from_rows);

    uint32_t column_b[2];
    ldmatrix_x2(column_b, &columns[lane % 8 * 16 + lane / 8 % 2 * 8]);
    float from_columns[4] = {};
    mma_m16n8k16<T>(from_columns, loaded_a, column_b);
    write<T>(params.c + 256, from_columns);

    uint32_t row_b[2];
    ldmatrix_x2_trans(row_b, &b[lane % 16 * 8]);
    float from_two[4] = {};
    mma_m16n8k16<T>(from_two, loaded_a, row_b);
    write<T>(params.c + 384, from_two);
    copy_async_wait<0>();
}

}  // namespace kvc

template <class T>
static void run(const uint16_t* a, const uint16_t* b, const uint16_t* b_columns, float* c, int wait) {
    const auto typed = [](const uint16_t* p) { return reinterpret_cast<const T*>(p); };
    kvc::launch("product", kvc::product<T>, 1, 32, 0, nullptr, {typed(a), typed(b), typed(b_columns), c, wait != 0});
}

extern "C" const char* run_product(int bfloat16, const uint16_t* a, const uint16_t* b, const uint16_t* b_columns,
                                   float* c, int wait) {
    return message_of([&] { (bfloat16 ? run<kvc::bfloat16_t> : run<kvc::half_t>)(a, b, b_columns, c, wait); });
}

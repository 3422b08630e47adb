// Tensor-core products of one warp: C[16, 8] += A[16, 16] B[16, 8], fp16 or bf16 operands, fp32 sums. All lanes take
// part.
//
// Source: PTX manual, mma.sync.m16n8k16. With group = lane / 4 and t = lane % 4, two elements a register,
// the lower column (A, C) or row (B) in the lower half:
//   a[0] A[group][2t, 2t+1]   a[1] A[group+8][2t, 2t+1]   a[2] A[group][2t+8, 2t+9]   a[3] A[group+8][2t+8, 2t+9]
//   b[0] B[2t, 2t+1][group]   b[1] B[2t+8, 2t+9][group]
//   c[0], c[1] C[group][2t, 2t+1]   c[2], c[3] C[group+8][2t, 2t+1]
//
// Determinism: an element of C is a function of its row of A, its column of B and its old value alone, by a tree that
// the hardware fixes; the emulation adds by ascending k, so its last bits differ from a device's.
#pragma once

#include "kernels/numeric.cuh"

#include <cstdint>
#include <cstring>

namespace kvc {

template <class T>
__device__ __forceinline__ void mma_m16n8k16(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
    platform::mma_m16n8k16(T{}, c, a, b);
}

// Four 8 x 8 matrices of 16-bit elements from shared memory, each as half of the B operand: to[m] = M[2t, 2t+1][group].
// Lane 8 m + i gives the start of row i of matrix m, at a multiple of 16 bytes. (PTX manual, ldmatrix with .trans.)
// Two neighbouring elements of 8 bits are one of 16: they stay together.
template <class T>
__device__ __forceinline__ void load_matrices_transposed(uint32_t (&to)[4], const T& row) {
    static_assert(sizeof(T) <= 2);
    platform::load_matrices_transposed(to, &row);
}

// Two numbers rounded to T in one register, as a fragment holds them.
template <class T>
__device__ __forceinline__ uint32_t pack_pair(float low, float high) {
    static_assert(sizeof(T) == 2);
    const T pair[2] = {from_float<T>(low), from_float<T>(high)};
    uint32_t bits;
    memcpy(&bits, pair, sizeof bits);
    return bits;
}

}  // namespace kvc

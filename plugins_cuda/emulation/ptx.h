// Host twins of kernels/ptx.cuh: mma.sync, ldmatrix and cp.async with the register layouts of the PTX manual. A copy
// of cp.async is performed by the wait that covers it, not before, so that a missing wait shows.
#pragma once

#include "emulation/numeric_types.h"

#include <cstdint>

namespace kvc::platform {

using emulation::Site;

// c += A B, A 16 x 16 and B 16 x 8, sums in fp32 by ascending k.
void mma_m16n8k16(half_t, float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]);
void mma_m16n8k16(bfloat16_t, float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]);

void load_matrices(uint32_t* registers, int matrices, bool transpose, const void* row);

template <bool kTranspose>
void ldmatrix(uint32_t (&r)[4], const void* row) {
    load_matrices(r, 4, kTranspose, row);
}
template <bool kTranspose>
void ldmatrix(uint32_t (&r)[2], const void* row) {
    load_matrices(r, 2, kTranspose, row);
}

void copy_async_16(void* to, const void* from);
void copy_async_commit();
void copy_async_wait_for(int pending);

template <int kPending>
void copy_async_wait() {
    copy_async_wait_for(kPending);
}

}  // namespace kvc::platform

#include "emulation/ptx.h"

#include <algorithm>
#include <cstring>
#include <string>

namespace kvc::platform {

using emulation::current_block;
using emulation::Lanes;

namespace {

struct LoadedMatrices {
    uint32_t* to;
    const void* row;
};

// PTX manual, "ldmatrix" with .trans: register m is elements M[2t, 2t+1][group] of matrix m.
void load_matrices(const Lanes& operands) {
    const auto of = [&](int lane) -> const LoadedMatrices& {
        return *static_cast<const LoadedMatrices*>(operands[lane]);
    };
    for (int lane = 0; lane < kWarpSize; ++lane) {
        for (int matrix = 0; matrix < 4; ++matrix) {
            uint16_t pair[2];
            for (int i = 0; i < 2; ++i) {
                const void* const row = of(8 * matrix + 2 * (lane % 4) + i).row;
                std::memcpy(&pair[i], static_cast<const uint16_t*>(row) + lane / 4, sizeof pair[i]);
            }
            of(lane).to[matrix] = pair[0] | uint32_t{pair[1]} << 16;
        }
    }
}

struct MmaOperands {
    float* c;
    const uint32_t* a;
    const uint32_t* b;
};

template <class T>
float element(const uint32_t* registers, int index) {
    T value;
    value.bits = static_cast<uint16_t>(registers[index / 2] >> (index % 2 * 16));
    return widen(value);
}

// PTX manual, "Matrix Fragments for mma.m16n8k16": with group = lane / 4 and t = lane % 4,
//   A: element i of 8 is A[group + (i / 2 % 2 ? 8 : 0)][2 t + i % 2 + (i < 4 ? 0 : 8)]
//   B: element i of 4 is B[2 t + i % 2 + (i < 2 ? 0 : 8)][group]
//   C: element i of 4 is C[group + (i < 2 ? 0 : 8)][2 t + i % 2]
template <class T>
void multiply(const Lanes& operands) {
    float a[16][16];
    float b[16][8];
    const auto of = [&](int lane) -> const MmaOperands& { return *static_cast<const MmaOperands*>(operands[lane]); };
    for (int lane = 0; lane < kWarpSize; ++lane) {
        const int group = lane / 4;
        const int t = lane % 4;
        for (int i = 0; i < 8; ++i) {
            a[group + (i / 2 % 2 ? 8 : 0)][2 * t + i % 2 + (i < 4 ? 0 : 8)] = element<T>(of(lane).a, i);
        }
        for (int i = 0; i < 4; ++i) b[2 * t + i % 2 + (i < 2 ? 0 : 8)][group] = element<T>(of(lane).b, i);
    }
    for (int lane = 0; lane < kWarpSize; ++lane) {
        for (int i = 0; i < 4; ++i) {
            const int row = lane / 4 + (i < 2 ? 0 : 8);
            const int column = 2 * (lane % 4) + i % 2;
            float sum = of(lane).c[i];
            for (int k = 0; k < 16; ++k) sum += a[row][k] * b[k][column];
            of(lane).c[i] = sum;
        }
    }
}

template <class T>
void mma(float* c, const uint32_t* a, const uint32_t* b) {
    MmaOperands mine{c, a, b};
    current_block->warp_operation("mma.sync", kFullWarp, multiply<T>, &mine, Site::current());
}

}  // namespace

void mma_m16n8k16(half_t, float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) { mma<half_t>(c, a, b); }
void mma_m16n8k16(bfloat16_t, float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
    mma<bfloat16_t>(c, a, b);
}

void wait_for_previous_launch() { current_block->self().has_waited = true; }

void load_matrices_transposed(uint32_t (&to)[4], const void* row) {
    emulation::check_alignment(row, 16);
    if (!current_block->shared().contains(row, 16)) current_block->fail("ldmatrix outside shared memory");
    current_block->note_access(row, 16, emulation::RaceDetector::Kind::kRead);
    LoadedMatrices mine{to, row};
    current_block->warp_operation("ldmatrix", kFullWarp, load_matrices, &mine, Site::current());
}

void prefetch_to_l2(const void* from, uint32_t bytes) {
    emulation::check_alignment(from, 16);
    if (bytes % 16 != 0) current_block->fail("prefetch of " + std::to_string(bytes) + " bytes, no multiple of 16");
    current_block->require_wait(from, bytes);
    for (uint32_t i = 0; i < bytes; ++i) static_cast<void>(static_cast<const volatile char*>(from)[i]);
}

void copy_async(void* to, const void* from, size_t bytes) {
    emulation::check_alignment(to, bytes);
    emulation::check_alignment(from, bytes);
    current_block->require_wait(from, bytes);
    if (!current_block->shared().contains(to, bytes)) current_block->fail("cp.async outside shared memory");
    current_block->note_access(to, bytes, emulation::RaceDetector::Kind::kWrite);  // may happen now, or at the wait
    emulation::SharedMemory::poison(to, bytes);                                    // undefined until the wait
    emulation::Thread& thread = current_block->self();
    thread.copies.push_back({to, from, bytes, thread.copy_groups});
}

void copy_async_commit() { ++current_block->self().copy_groups; }

void copy_async_wait_for(int pending) {
    emulation::Thread& thread = current_block->self();
    const auto covered = [&](const emulation::PendingCopy& copy) {
        if (copy.group >= thread.copy_groups - pending) return false;
        current_block->note_copy(copy.to, copy.from, copy.bytes);
        std::memcpy(copy.to, copy.from, copy.bytes);
        return true;
    };
    std::erase_if(thread.copies, covered);
}

}  // namespace kvc::platform

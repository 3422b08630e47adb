#include "emulation/ptx.h"

#include <algorithm>
#include <cstring>

namespace kvc::platform {

using emulation::current_block;
using emulation::kWarpSize;
using emulation::Lanes;

namespace {

constexpr uint32_t kFullWarp = 0xffffffffu;

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

struct MatrixOperands {
    uint32_t* registers;
    const void* row;
};

// Lane 8 i + j holds the address of row j of matrix i; register i of a lane gets elements [lane / 4][2 (lane % 4)] and
// the next one of matrix i, or of its transpose.
template <int kMatrices, bool kTranspose>
void load(const Lanes& operands) {
    const auto of = [&](int lane) -> const MatrixOperands& {
        return *static_cast<const MatrixOperands*>(operands[lane]);
    };
    uint16_t matrices[kMatrices][8][8];
    for (int i = 0; i < kMatrices; ++i) {
        for (int j = 0; j < 8; ++j) {
            const void* row = of(8 * i + j).row;
            emulation::check_alignment(row, 16);
            if (!current_block->shared().contains(row, 16)) current_block->fail("ldmatrix outside shared memory");
            std::memcpy(matrices[i][j], row, 16);
        }
    }
    for (int lane = 0; lane < kWarpSize; ++lane) {
        for (int i = 0; i < kMatrices; ++i) {
            const int row = lane / 4;
            const int column = 2 * (lane % 4);
            const uint32_t low = kTranspose ? matrices[i][column][row] : matrices[i][row][column];
            const uint32_t high = kTranspose ? matrices[i][column + 1][row] : matrices[i][row][column + 1];
            of(lane).registers[i] = low | high << 16;
        }
    }
}

}  // namespace

void mma_m16n8k16(half_t, float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) { mma<half_t>(c, a, b); }
void mma_m16n8k16(bfloat16_t, float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
    mma<bfloat16_t>(c, a, b);
}

void load_matrices(uint32_t* registers, int matrices, bool transpose, const void* row) {
    if (emulation::lane() < 8 * matrices) current_block->note_access(row, 16, emulation::RaceDetector::Kind::kRead);
    MatrixOperands mine{registers, row};
    const auto operation =
        matrices == 4 ? (transpose ? load<4, true> : load<4, false>) : (transpose ? load<2, true> : load<2, false>);
    current_block->warp_operation("ldmatrix", kFullWarp, operation, &mine, Site::current());
}

void copy_async_16(void* to, const void* from) {
    emulation::check_alignment(to, 16);
    emulation::check_alignment(from, 16);
    if (!current_block->shared().contains(to, 16)) current_block->fail("cp.async outside shared memory");
    current_block->note_access(to, 16, emulation::RaceDetector::Kind::kWrite);  // may happen now, or at the wait
    emulation::Thread& thread = current_block->self();
    thread.copies.push_back({to, from, thread.copy_groups});
}

void copy_async_commit() { ++current_block->self().copy_groups; }

void copy_async_wait_for(int pending) {
    emulation::Thread& thread = current_block->self();
    const auto covered = [&](const emulation::PendingCopy& copy) {
        if (copy.group >= thread.copy_groups - pending) return false;
        current_block->note_copy(copy.to, copy.from, 16);
        std::memcpy(copy.to, copy.from, 16);
        return true;
    };
    std::erase_if(thread.copies, covered);
}

}  // namespace kvc::platform

// The functions that a kernel compiled with -fsanitize=thread calls at each memory access: emulation/race_detector.h.
// The compiler gives the names. This file and the rest of the emulation are compiled without that flag.
#include "emulation/block.h"

#include <cstddef>
#include <cstdint>

using kvc::emulation::Block;
using kvc::emulation::current_block;
using kvc::emulation::RaceDetector;

namespace {

void note(const void* address, size_t bytes, RaceDetector::Kind kind) {
    if (current_block != nullptr) current_block->note_access(address, bytes, kind);
}

}  // namespace

#define KVC_HOOK extern "C" __attribute__((visibility("hidden"))) void

KVC_HOOK __tsan_init() { RaceDetector::instrumented = true; }
KVC_HOOK __tsan_func_entry(void*) {}
KVC_HOOK __tsan_func_exit() {}
KVC_HOOK __tsan_vptr_update(void**, void*) {}
KVC_HOOK __tsan_vptr_read(void**) {}
KVC_HOOK __tsan_read_range(const void* address, size_t bytes) { note(address, bytes, RaceDetector::Kind::kRead); }
KVC_HOOK __tsan_write_range(const void* address, size_t bytes) { note(address, bytes, RaceDetector::Kind::kWrite); }

#define KVC_HOOKS(bytes)                                                                                            \
    KVC_HOOK __tsan_read##bytes(const void* address) { note(address, bytes, RaceDetector::Kind::kRead); }           \
    KVC_HOOK __tsan_write##bytes(const void* address) { note(address, bytes, RaceDetector::Kind::kWrite); }         \
    KVC_HOOK __tsan_unaligned_read##bytes(const void* address) { note(address, bytes, RaceDetector::Kind::kRead); } \
    KVC_HOOK __tsan_unaligned_write##bytes(const void* address) { note(address, bytes, RaceDetector::Kind::kWrite); }
KVC_HOOKS(1)
KVC_HOOKS(2)
KVC_HOOKS(4)
KVC_HOOKS(8)
KVC_HOOKS(16)

// Atomics of host code: the guard of a function's static variable, and the state of src/launch_kernel.h.
extern "C" __attribute__((visibility("hidden"))) uint8_t __tsan_atomic8_load(const volatile uint8_t* address, int) {
    return __atomic_load_n(address, __ATOMIC_ACQUIRE);
}
extern "C" __attribute__((visibility("hidden"))) uint32_t __tsan_atomic32_load(const volatile uint32_t* address, int) {
    return __atomic_load_n(address, __ATOMIC_ACQUIRE);
}
extern "C" __attribute__((visibility("hidden"))) uint64_t __tsan_atomic64_load(const volatile uint64_t* address, int) {
    return __atomic_load_n(address, __ATOMIC_ACQUIRE);
}
KVC_HOOK __tsan_atomic64_store(volatile uint64_t* address, uint64_t value, int) {
    __atomic_store_n(address, value, __ATOMIC_RELEASE);
}
KVC_HOOK __tsan_atomic32_store(volatile uint32_t* address, uint32_t value, int) {
    __atomic_store_n(address, value, __ATOMIC_RELEASE);
}

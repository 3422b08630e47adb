#include "emulation/fiber.h"

#include "emulation/context_switch.h"

#include <sys/mman.h>
#include <new>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

namespace kvc::emulation {
namespace {

constexpr size_t kGuardBytes = 4096;  // below the stack: an overflow faults instead of corrupting a neighbour

#if defined(__SANITIZE_ADDRESS__)
void leave_stack(void** fake_stack, const void* bottom, size_t bytes) {
    __sanitizer_start_switch_fiber(fake_stack, bottom, bytes);
}
void arrive_on_stack(void* fake_stack, const void** bottom, size_t* bytes) {
    __sanitizer_finish_switch_fiber(fake_stack, bottom, bytes);
}
void forget_stack(void* stack, size_t bytes) { __asan_unpoison_memory_region(stack, bytes); }
#else
void leave_stack(void**, const void*, size_t) {}
void arrive_on_stack(void*, const void**, size_t*) {}
void forget_stack(void*, size_t) {}
#endif

}  // namespace

Fiber::Fiber(size_t slot) : slot_(slot) {
    mapping_ = mmap(nullptr, kGuardBytes + kStackBytes, PROT_READ | PROT_WRITE,
                    MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (mapping_ == MAP_FAILED) throw std::bad_alloc();
    mprotect(mapping_, kGuardBytes, PROT_NONE);
    stack_ = static_cast<char*>(mapping_) + kGuardBytes;
}

Fiber::~Fiber() {
    forget_stack(stack_, kStackBytes);
    munmap(mapping_, kGuardBytes + kStackBytes);
}

void Fiber::prepare(Entry entry, void* argument) {
    forget_stack(stack_, kStackBytes);
    entry_ = entry;
    argument_ = argument;
    fiber_fake_stack_ = nullptr;
    // Stacks start at multiples of the page size: without the offset all their tops would share a few cache sets.
    const size_t colour = slot_ % 32 * 128;
    context_ =
        make_context(stack_ + kStackBytes - colour, [](void* fiber) { start(static_cast<Fiber*>(fiber)); }, this);
}

void Fiber::start(Fiber* fiber) {
    arrive_on_stack(nullptr, &fiber->scheduler_stack_, &fiber->scheduler_stack_bytes_);
    fiber->entry_(fiber->argument_);
    __builtin_trap();
}

void Fiber::resume() {
    leave_stack(&scheduler_fake_stack_, stack_, kStackBytes);
    switch_context(&scheduler_, context_);
    arrive_on_stack(scheduler_fake_stack_, nullptr, nullptr);
}

void Fiber::pause() {
    leave_stack(&fiber_fake_stack_, scheduler_stack_, scheduler_stack_bytes_);
    switch_context(&context_, scheduler_);
    arrive_on_stack(fiber_fake_stack_, &scheduler_stack_, &scheduler_stack_bytes_);
}

}  // namespace kvc::emulation

#include "emulation/context_switch.h"

#if defined(__x86_64__)

// System V ABI: rbx, rbp, r12-r15 and the stack pointer are preserved by a callee. The first context of a stack
// continues in the trampoline, which finds the start function in r12 and its argument in r13. (A jump, since a return
// to another stack than the call came from is always mispredicted.)
asm(R"(
.text
.globl kvc_emulation_switch_context
.hidden kvc_emulation_switch_context
.type kvc_emulation_switch_context, @function
kvc_emulation_switch_context:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    popq %rcx
    jmp *%rcx
.size kvc_emulation_switch_context, . - kvc_emulation_switch_context

.globl kvc_emulation_trampoline
.hidden kvc_emulation_trampoline
.type kvc_emulation_trampoline, @function
kvc_emulation_trampoline:
    movq %r13, %rdi
    callq *%r12
    ud2
.size kvc_emulation_trampoline, . - kvc_emulation_trampoline
)");

extern "C" void kvc_emulation_trampoline() __attribute__((visibility("hidden")));

namespace kvc::emulation {

void* make_context(char* top, void (*start)(void*), void* argument) {
    auto* words = reinterpret_cast<uint64_t*>(reinterpret_cast<uintptr_t>(top) & ~uintptr_t{15});
    words -= 9;  // r15 r14 r13 r12 rbx rbp, the return address, and padding: the trampoline finds an aligned stack
    for (int i = 0; i < 9; ++i) words[i] = 0;
    words[2] = reinterpret_cast<uint64_t>(argument);
    words[3] = reinterpret_cast<uint64_t>(start);
    words[6] = reinterpret_cast<uint64_t>(&kvc_emulation_trampoline);
    return words;
}

}  // namespace kvc::emulation

#elif defined(__aarch64__)

// AAPCS64: x19-x30, d8-d15 and the stack pointer are preserved by a callee.
asm(R"(
.text
.globl kvc_emulation_switch_context
.hidden kvc_emulation_switch_context
.type kvc_emulation_switch_context, %function
kvc_emulation_switch_context:
    sub sp, sp, #160
    stp x19, x20, [sp, #0]
    stp x21, x22, [sp, #16]
    stp x23, x24, [sp, #32]
    stp x25, x26, [sp, #48]
    stp x27, x28, [sp, #64]
    stp x29, x30, [sp, #80]
    stp d8, d9, [sp, #96]
    stp d10, d11, [sp, #112]
    stp d12, d13, [sp, #128]
    stp d14, d15, [sp, #144]
    mov x9, sp
    str x9, [x0]
    mov sp, x1
    ldp x19, x20, [sp, #0]
    ldp x21, x22, [sp, #16]
    ldp x23, x24, [sp, #32]
    ldp x25, x26, [sp, #48]
    ldp x27, x28, [sp, #64]
    ldp x29, x30, [sp, #80]
    ldp d8, d9, [sp, #96]
    ldp d10, d11, [sp, #112]
    ldp d12, d13, [sp, #128]
    ldp d14, d15, [sp, #144]
    add sp, sp, #160
    ret
.size kvc_emulation_switch_context, . - kvc_emulation_switch_context

.globl kvc_emulation_trampoline
.hidden kvc_emulation_trampoline
.type kvc_emulation_trampoline, %function
kvc_emulation_trampoline:
    mov x0, x20
    blr x19
    brk #1
.size kvc_emulation_trampoline, . - kvc_emulation_trampoline
)");

extern "C" void kvc_emulation_trampoline() __attribute__((visibility("hidden")));

namespace kvc::emulation {

void* make_context(char* top, void (*start)(void*), void* argument) {
    auto* words = reinterpret_cast<uint64_t*>(reinterpret_cast<uintptr_t>(top) & ~uintptr_t{15});
    words -= 20;
    for (int i = 0; i < 20; ++i) words[i] = 0;
    words[0] = reinterpret_cast<uint64_t>(start);
    words[1] = reinterpret_cast<uint64_t>(argument);
    words[11] = reinterpret_cast<uint64_t>(&kvc_emulation_trampoline);
    return words;
}

}  // namespace kvc::emulation

#else

// Any other machine: ucontext, slower (a system call per switch) but portable. The ucontext lives on the stack that
// it describes.
#include <ucontext.h>
#include <new>

extern "C" void kvc_emulation_switch_context(void** save, void* load) {
    ucontext_t here;
    *save = &here;
    swapcontext(&here, static_cast<ucontext_t*>(load));
}

namespace kvc::emulation {
namespace {

struct FirstContext {
    ucontext_t context;
    void (*start)(void*);
    void* argument;
};

void enter(unsigned high, unsigned low) {
    auto* first = reinterpret_cast<FirstContext*>((uintptr_t{high} << 16 << 16) | low);
    first->start(first->argument);
}

}  // namespace

void* make_context(char* top, void (*start)(void*), void* argument) {
    constexpr size_t kUsable = 48 * 1024;  // of the stack below the context itself
    auto* place = reinterpret_cast<char*>((reinterpret_cast<uintptr_t>(top) - sizeof(FirstContext)) & ~uintptr_t{63});
    auto* first = new (place) FirstContext{{}, start, argument};
    getcontext(&first->context);
    first->context.uc_stack.ss_sp = place - kUsable;
    first->context.uc_stack.ss_size = kUsable;
    const auto address = reinterpret_cast<uintptr_t>(first);
    makecontext(&first->context, reinterpret_cast<void (*)()>(enter), 2, static_cast<unsigned>(address >> 16 >> 16),
                static_cast<unsigned>(address));
    return &first->context;
}

}  // namespace kvc::emulation

#endif

// switch_context(save, load): saves the registers that a callee must preserve on the current stack, stores the stack
// pointer in *save, and continues where the context `load` was saved. make_context builds the first one of a stack.
#pragma once

#include <cstddef>
#include <cstdint>

extern "C" void kvc_emulation_switch_context(void** save, void* load) __attribute__((visibility("hidden")));

namespace kvc::emulation {

// A context that calls start(argument) on an empty stack ending at `top`; start must not return.
void* make_context(char* top, void (*start)(void*), void* argument);

inline void switch_context(void** save, void* load) { kvc_emulation_switch_context(save, load); }

}  // namespace kvc::emulation

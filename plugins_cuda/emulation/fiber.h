// A fiber: a function with its own stack that can be left in the middle and continued later, all on one OS thread.
// Each CUDA thread of an emulated block is one. The switch saves only what a called function must preserve (no system
// Each CUDA thread of an emulated block is one. The switch saves only registers that a callee must preserve (no system
#pragma once

#include <cstddef>

namespace kvc::emulation {

#if defined(__SANITIZE_ADDRESS__)
inline constexpr size_t kStackBytes = 256 * 1024;  // redzones around every local array
#else
inline constexpr size_t kStackBytes = 64 * 1024;
#endif

class Fiber {
public:
    using Entry = void (*)(void* argument);

    // `slot` spreads the tops of many stacks over the cache sets.
    explicit Fiber(size_t slot);
    ~Fiber();
    Fiber(const Fiber&) = delete;
    Fiber& operator=(const Fiber&) = delete;

    // The next resume() calls entry(argument) on an empty stack; the fiber's earlier work is forgotten.
    // `entry` must never return and never throw: it calls pause() when it is done.
    void prepare(Entry entry, void* argument);

    // Scheduler side: runs the fiber until it pauses.
    void resume();
    // Fiber side: returns to the scheduler that resumed it.
    void pause();

    bool owns(const void* address) const {
        const char* at = static_cast<const char*>(address);
        return at >= stack_ && at < stack_ + kStackBytes;
    }

private:
    static void start(Fiber* fiber);

    size_t slot_;
    void* mapping_;
    char* stack_;
    Entry entry_ = nullptr;
    void* argument_ = nullptr;
    void* context_ = nullptr;    // of the fiber, while it is paused
    void* scheduler_ = nullptr;  // of the scheduler, while the fiber runs
    void* fiber_fake_stack_ = nullptr;
    void* scheduler_fake_stack_ = nullptr;
    const void* scheduler_stack_ = nullptr;
    size_t scheduler_stack_bytes_ = 0;
};

}  // namespace kvc::emulation

// Programmatic dependent launch (sm_90 and later): a launch may begin while the one before it on the stream still runs.
// src/launch_kernel.h lists the launches that may. Every kernel begins with
//
//     start_next_launch();         // the next launch on the stream may take the room that is left
//     wait_for_previous_launch();  // all earlier work is over, and its writes are visible
//
// Before it waits, a thread may use its parameters, its indices and shared memory. Global memory it may neither read nor
// write: the launch before may still write the one and read the other. Loads through the read-only path may move ahead of
// the wait, so kernels have none. Every thread waits, also one with nothing to do: the launch after this
// one waits for this one alone, and one that ended without waiting would let it pass its own predecessor.
//
// The next launch's blocks begin when every block of this one has called start_next_launch, hence has begun: they take
// no room from it, so they may be let in at once. Where launches do not begin early, neither function does anything.
#pragma once

#include "kernels/platform.cuh"

namespace kvc {

__device__ __forceinline__ void start_next_launch() { platform::start_next_launch(); }

__device__ __forceinline__ void wait_for_previous_launch() { platform::wait_for_previous_launch(); }

}  // namespace kvc

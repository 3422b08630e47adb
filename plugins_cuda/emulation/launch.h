// kvc::launch for the host: runs the kernel to its end before it returns. One launch at a time in the process.
#pragma once

#include "emulation/block.h"

#include <cstddef>
#include <type_traits>

using cudaStream_t = void*;

namespace kvc {
namespace emulation {

// Throws LaunchError where the launch is beyond the limits, and where the kernel did something wrong.
void run_launch(const char* name, dim3 grid, dim3 block, size_t dynamic_shared_bytes, Body body);

}  // namespace emulation

// A kernel takes one parameter struct by value. Throws LaunchError; the stream is ignored.
template <class Params>
void launch(const char* name, void (*kernel)(Params), dim3 grid, dim3 block, size_t dynamic_shared_bytes, cudaStream_t,
            const std::type_identity_t<Params>& params) {
    struct Call {
        void (*kernel)(Params);
        const Params* params;
    };
    const Call call{kernel, &params};
    const auto body = [](const void* context) {
        const auto& that = *static_cast<const Call*>(context);
        that.kernel(*that.params);
    };
    emulation::run_launch(name, grid, block, dynamic_shared_bytes, {body, &call});
}

}  // namespace kvc

// Shared by the toy kernels of these tests: a launch whose error becomes a string that Python reads.
#pragma once

#include "kernels/dependent_launch.cuh"
#include "src/launch_kernel.h"

#include <string>

// "" where the call, which gets a stream, succeeded; valid until the next call.
template <class Call>
const char* message_of(Call call) {
    static std::string message;
    message.clear();
    try {
        kvc::Stream stream(nullptr);
        call(stream);
    } catch (const kvc::LaunchError& error) {
        message = error.what();
    }
    return message.c_str();
}

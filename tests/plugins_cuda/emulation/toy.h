// What the toy kernels of these tests share: a launch whose error becomes a string that Python reads.
#pragma once

#include "src/launch_kernel.h"

#include <string>

// "" where the call went well; valid until the next one.
template <class Call>
const char* message_of(Call call) {
    static std::string message;
    message.clear();
    try {
        call();
    } catch (const kvc::LaunchError& error) {
        message = error.what();
    }
    return message.c_str();
}

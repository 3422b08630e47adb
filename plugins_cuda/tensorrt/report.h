// Why a plugin refused something: one line on stderr, and the same line through kvc_plugin_last_error().
//
// TensorRT's own logger is never called: its object layout differs between TensorRT 10 and 11, and a library built on
// the headers of one crashes in the runtime of the other. No exception leaves a method that TensorRT calls.
#pragma once

#include <exception>
#include <stdexcept>

#include "kvc/types.h"

extern "C" {
/// The last reason reported on the calling thread, "" before the first; valid until the thread's next call.
KVC_API const char* kvc_plugin_last_error();
}

namespace kvc::tensorrt {

/// Something from TensorRT or a network that cannot be served; what() names it, its value and its range.
class Refusal : public std::runtime_error {
public:
    using std::runtime_error::runtime_error;
};

/// Throws a Refusal with a formatted reason.
[[noreturn, gnu::format(printf, 1, 2)]] void refuse(const char* format, ...);

/// Keeps and prints "kvc plugin: <where>: <reason>"; control characters in it become '?'.
void report(const char* where, const char* reason) noexcept;

/// Returns the result of `body`, or `failed` after reporting the exception that `body` threw.
template <class Result, class Body>
Result guarded(const char* where, Result failed, const Body& body) noexcept {
    try {
        return body();
    } catch (const std::exception& error) {
        report(where, error.what());
    } catch (...) {
        report(where, "unknown exception");
    }
    return failed;
}

}  // namespace kvc::tensorrt

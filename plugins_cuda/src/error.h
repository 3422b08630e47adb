// Errors inside the library, and the C boundary that turns them into a status and a message.
#pragma once

#include <cstdio>
#include <exception>
#include <stdexcept>
#include <string>

#include "kvc/types.h"

namespace kvc {

/// A refusal with its status. The text names the field, its value and the allowed values.
class Error : public std::runtime_error {
public:
    Error(KvcStatus status, const std::string& text) : std::runtime_error(text), status_(status) {}
    KvcStatus status() const { return status_; }

private:
    KvcStatus status_;
};

/// Copies a text into the caller's message, cut to its size; `message` may be null.
inline void write_message(KvcMessage* message, const char* text) {
    if (message != nullptr) {
        std::snprintf(message->text, sizeof(message->text), "%s", text);
    }
}

/// Runs `body` at the C boundary: no exception leaves it, and every status but KVC_OK comes with a message. Every
/// exception other than Error (a LaunchError, exhausted host memory) counts as a failed launch.
template <class Body>
KvcStatus guard(KvcMessage* message, Body&& body) noexcept {
    try {
        body();
        write_message(message, "");
        return KVC_OK;
    } catch (const Error& error) {
        write_message(message, error.what());
        return error.status();
    } catch (const std::exception& error) {
        write_message(message, error.what());
    } catch (...) {
        write_message(message, "unknown error");
    }
    return KVC_LAUNCH_FAILED;
}

}  // namespace kvc

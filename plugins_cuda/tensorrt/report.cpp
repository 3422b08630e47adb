#include "tensorrt/report.h"

#include <cstdarg>
#include <cstdio>

namespace kvc::tensorrt {
namespace {

constexpr int kLineBytes = 512;
thread_local char last_error[kLineBytes] = "";

}  // namespace

void refuse(const char* format, ...) {
    char reason[kLineBytes];
    va_list values;
    va_start(values, format);
    std::vsnprintf(reason, sizeof reason, format, values);
    va_end(values);
    throw Refusal(reason);
}

void report(const char* where, const char* reason) noexcept {
    std::snprintf(last_error, sizeof last_error, "kvc plugin: %s: %s", where, reason);
    for (char* c = last_error; *c != '\0'; ++c) {
        if (static_cast<unsigned char>(*c) < ' ' || *c == '\x7f') *c = '?';
    }
    std::fprintf(stderr, "%s\n", last_error);
}

}  // namespace kvc::tensorrt

const char* kvc_plugin_last_error() { return kvc::tensorrt::last_error; }

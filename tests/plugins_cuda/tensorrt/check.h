// Tests as functions with a name; a failed check prints its place and fails the test, whose rest still runs.
#pragma once

#include <cstdio>
#include <map>
#include <sstream>
#include <string>

#include "library.h"

/// Exit status of a test that does not apply to this library or machine.
inline constexpr int kSkipped = 77;

struct Suite {
    using Test = void (*)(const Library&);
    static std::map<std::string, Test>& tests() {
        static std::map<std::string, Test> tests;
        return tests;
    }
    static inline int failures = 0;
    Suite(const char* name, Test test) { tests()[name] = test; }
};

#define TEST(name)                                     \
    static void name(const Library& library);          \
    static const Suite registered_##name{#name, name}; \
    static void name([[maybe_unused]] const Library& library)

template <class Found, class Expected>
void check_equal(const Found& found, const Expected& expected, const char* what, int line) {
    if (found == expected) return;
    std::ostringstream text;
    text << "line " << line << ": " << what << ": expected <" << expected << ">, found <" << found << ">";
    std::fprintf(stderr, "%s\n", text.str().c_str());
    ++Suite::failures;
}

#define CHECK(condition) check_equal(static_cast<bool>(condition), true, #condition, __LINE__)
#define CHECK_EQUAL(found, expected) check_equal(found, expected, #found, __LINE__)

/// The library's last reason contains every one of `parts`.
inline void check_reason(const Library& library, std::initializer_list<std::string> parts, int line) {
    for (const std::string& part : parts) {
        if (library.last_error().find(part) != std::string::npos) continue;
        std::fprintf(stderr, "line %d: expected <%s> in the reason, found <%s>\n", line, part.c_str(),
                     library.last_error().c_str());
        ++Suite::failures;
    }
}
#define CHECK_REASON(...) check_reason(library, {__VA_ARGS__}, __LINE__)

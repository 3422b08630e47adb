#include "kernels/choice.h"

#include <atomic>
#include <cstring>

namespace kvc {

// The library holds one table for each instruction set that it was compiled for.
#ifdef __x86_64__
namespace avx512bf16 {
extern const Kernels kTable;
}
namespace avx512vnni {
extern const Kernels kTable;
}
namespace avx512 {
extern const Kernels kTable;
}
namespace avx2 {
extern const Kernels kTable;
}
#endif
namespace portable {
extern const Kernels kTable;
}

namespace {

struct Choice {
    const Kernels* table;
    bool (*available)();
};

#ifdef __x86_64__
bool has_avx512() {
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("fma") &&
           __builtin_cpu_supports("f16c");
}
#endif

constexpr Choice kChoices[] = {
#ifdef __x86_64__
    {&avx512bf16::kTable,
     [] { return has_avx512() && __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512bf16"); }},
    {&avx512vnni::kTable, [] { return has_avx512() && __builtin_cpu_supports("avx512vnni"); }},
    {&avx512::kTable, has_avx512},
    {&avx2::kTable,
     [] { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c"); }},
#endif
    {&portable::kTable, [] { return true; }},
};

const Kernels* best() {
    for (const Choice& choice : kChoices) {
        if (choice.available()) return choice.table;
    }
    return &portable::kTable;
}

std::atomic<const Kernels*>& current() {
    static std::atomic<const Kernels*> table = best();
    return table;
}

}  // namespace

const Kernels& kernels() { return *current(); }

bool use_kernels(const char* name) {
    for (const Choice& choice : kChoices) {
        if (std::strcmp(choice.table->name, name) == 0 && choice.available()) {
            current() = choice.table;
            return true;
        }
    }
    return false;
}

}  // namespace kvc

#include "emulation/kernel_resources.h"

#include "emulation/devices.h"

#include <array>
#include <map>
#include <string>
#include <string_view>

namespace kvc::emulation {
namespace {

using OnDevices = std::array<KernelResources, kDevices.size()>;

struct Row {
    const char* kernel;  // append<bf16>
    OnDevices on;
};
constexpr Row kRows[] = {
#include "emulation/kernel_resources.inc"
};

void replace_all(std::string& text, std::string_view from, std::string_view to) {
    for (size_t at = text.find(from); at != std::string::npos; at = text.find(from, at + to.size())) {
        text.replace(at, from.size(), to);
    }
}

// "... [with auto kKernel = kvc::append<kvc::bfloat16_t>]" -> "append<bf16>", as the table names it.
std::string name_of(std::string_view signature) {
    constexpr std::string_view kBefore = "kKernel = ";
    const size_t begin = signature.find(kBefore) + kBefore.size();
    std::string name(signature.substr(begin, signature.find_first_of(";]", begin) - begin));
    for (const auto& [from, to] : std::initializer_list<std::array<std::string_view, 2>>{{"kvc::", ""},
                                                                                         {"{anonymous}::", ""},
                                                                                         {"bfloat16_t", "bf16"},
                                                                                         {"half_t", "fp16"},
                                                                                         {"fp8_t", "fp8"},
                                                                                         {"float", "fp32"},
                                                                                         {"> >", ">>"}}) {
        replace_all(name, from, to);
    }
    return name;
}

}  // namespace

std::optional<KernelResources> resources_of(const Kernel& kernel, int device) {
    static const std::map<std::string, OnDevices> table = [] {
        std::map<std::string, OnDevices> rows;
        for (const Row& row : kRows) rows.emplace(row.kernel, row.on);
        return rows;
    }();
    const auto found = table.find(name_of(kernel.signature));
    if (found == table.end()) return std::nullopt;
    return found->second[static_cast<size_t>(device)];
}

}  // namespace kvc::emulation

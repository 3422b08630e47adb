// Errors inside the library: exceptions, which become a status before they reach ONNX Runtime.
#pragma once

#include <stdexcept>
#include <string>

namespace kvc {

/// A call that cannot be computed: a missing attribute, shapes that contradict each other, a slot past the capacity.
class Error : public std::runtime_error {
    using std::runtime_error::runtime_error;
};

/// Throws Error, with the parts joined to one text, unless `holds`.
template <typename... Parts>
void require(bool holds, const Parts&... parts) {
    if (holds) return;
    std::string text;
    const auto add = [&text](const auto& part) {
        if constexpr (std::is_arithmetic_v<std::decay_t<decltype(part)>>) {
            text += std::to_string(part);
        } else {
            text += part;
        }
    };
    (add(parts), ...);
    throw Error(text);
}

}  // namespace kvc

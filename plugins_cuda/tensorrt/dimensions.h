// Generated from the operators' schemas (kvc_trt/operators) by `python -m plugins_cuda.generate`; edit those.
#pragma once

#include <cstddef>
#include <cstdint>

namespace kvc::tensorrt {

/// Namespace and version of every plugin, as the nodes of a network name them.
inline constexpr const char* kNamespace = "kvc";
inline constexpr const char* kVersion = "1";

/// The symbols of tensor dimensions.
enum class Dim : uint8_t {
    kBatch,             ///< B
    kHeads,             ///< H
    kKvHeads,           ///< G
    kHeadSize,          ///< D
    kWindow,            ///< W
    kPromptLength,      ///< S
    kCapacity,          ///< C
    kBlock,             ///< M
    kCapacityAndBlock,  ///< C+M
    kPages,             ///< P
    kTwiceHeadSize,     ///< 2D
    kSelectedWidth,     ///< K
    kHalfHeadSize,      ///< D/2
    kGroups,            ///< groups
    kOne,               ///< 1
    kBytesPerElement,   ///< element_bytes
};
inline constexpr size_t kDims = 16;

/// The symbols' names in messages.
inline constexpr const char* kDimNames[kDims] = {"batch",
                                                 "heads",
                                                 "kv heads",
                                                 "head size",
                                                 "window",
                                                 "prompt length",
                                                 "capacity",
                                                 "block",
                                                 "capacity + block",
                                                 "pages",
                                                 "2 x head size",
                                                 "selected width",
                                                 "half head size",
                                                 "groups",
                                                 "one",
                                                 "bytes per element"};

/// The most attributes of any operator.
inline constexpr size_t kMaxFields = 8;

/// The most inputs that any operator has in some format, and more than it has outputs.
inline constexpr size_t kMaxTensors = 14;

}  // namespace kvc::tensorrt

// The functions that TensorRT looks for when it loads the library.
#include <NvInferRuntime.h>

#include <deque>
#include <vector>

#include "tensorrt/operators.h"

namespace {

using kvc::tensorrt::Creator;
using nvinfer1::IPluginCreatorInterface;

/// One per operator, made once; they keep their addresses.
const std::vector<IPluginCreatorInterface*>& creators() {
    static std::deque<Creator> made;
    static const std::vector<IPluginCreatorInterface*> listed = [] {
        std::vector<IPluginCreatorInterface*> all;
        for (const kvc::tensorrt::Operator* op : kvc::tensorrt::kOperators) all.push_back(&made.emplace_back(*op));
        return all;
    }();
    return listed;
}

}  // namespace

extern "C" {

/// TensorRT gives the name; it registers every creator under its own namespace and needs no symbol of libnvinfer.
KVC_API IPluginCreatorInterface* const* getCreators(int32_t& count) {
    count = static_cast<int32_t>(creators().size());
    return creators().data();
}

/// TensorRT requires this function. The finder is never called: see report.h.
KVC_API void setLoggerFinder(nvinfer1::ILoggerFinder*) {}
}

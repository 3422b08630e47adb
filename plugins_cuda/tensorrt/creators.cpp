// What TensorRT looks for when it loads the library.
#include <NvInferRuntime.h>

#include "tensorrt/plugin.h"

using kvc::tensorrt::Creator;

extern "C" {

/// Named so by TensorRT; registers every creator under its own namespace and needs no symbol of libnvinfer.
KVC_API nvinfer1::IPluginCreatorInterface* const* getCreators(int32_t& count) {
    static Creator compact(kvc::tensorrt::kCompact);
    static Creator hybrid_attention(kvc::tensorrt::kHybridAttention);
    static Creator dense_attention(kvc::tensorrt::kDenseAttention);
    static nvinfer1::IPluginCreatorInterface* const creators[] = {&compact, &hybrid_attention, &dense_attention};
    count = static_cast<int32_t>(std::size(creators));
    return creators;
}

/// TensorRT requires it to exist. The finder is left alone: see report.h.
KVC_API void setLoggerFinder(nvinfer1::ILoggerFinder*) {}
}

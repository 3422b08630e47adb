// A plugin library as TensorRT opens it, and plugins made by its creators.
#pragma once

#include <NvInferRuntime.h>
#include <dlfcn.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

using nvinfer1::DataType;
using nvinfer1::Dims;
using nvinfer1::DynamicPluginTensorDesc;
using nvinfer1::IPluginCreatorV3One;
using nvinfer1::IPluginV3;
using nvinfer1::IPluginV3OneBuildV2;
using nvinfer1::IPluginV3OneCore;
using nvinfer1::IPluginV3OneRuntime;
using nvinfer1::PluginCapabilityType;
using nvinfer1::PluginField;
using nvinfer1::PluginFieldCollection;
using nvinfer1::PluginFieldType;
using nvinfer1::PluginTensorDesc;
using nvinfer1::TensorFormat;
using nvinfer1::TensorRTPhase;

struct Library {
    void* handle;
    std::vector<IPluginCreatorV3One*> creators;

    explicit Library(const char* path) : handle{dlopen(path, RTLD_NOW | RTLD_LOCAL)} {
        if (handle == nullptr) {
            std::fprintf(stderr, "%s\n", dlerror());
            std::exit(2);
        }
        int32_t count = -1;
        using GetCreators = nvinfer1::IPluginCreatorInterface* const* (*)(int32_t&);
        auto* const* list = symbol<GetCreators>("getCreators")(count);
        for (int32_t i = 0; i < count; ++i) creators.push_back(static_cast<IPluginCreatorV3One*>(list[i]));
    }

    template <class T>
    T symbol(const char* name) const {
        void* found = dlsym(handle, name);
        if (found == nullptr) {
            std::fprintf(stderr, "%s is not exported\n", name);
            std::exit(2);
        }
        return reinterpret_cast<T>(found);
    }

    IPluginCreatorV3One* creator(const std::string& name) const {
        for (IPluginCreatorV3One* creator : creators) {
            if (name == creator->getPluginName()) return creator;
        }
        return nullptr;
    }
    std::string last_error() const { return symbol<const char* (*)()>("kvc_plugin_last_error")(); }
    std::string executor() const { return symbol<const char* (*)()>("kvc_executor")(); }
};

struct NamedValue {
    const char* name;
    int32_t value;
};
using Values = std::vector<NamedValue>;

/// A plugin with its three interfaces.
struct Made {
    std::unique_ptr<IPluginV3> plugin;
    explicit Made(IPluginV3* made) : plugin{made} {}
    explicit operator bool() const { return plugin != nullptr; }
    template <class T>
    T* interface(PluginCapabilityType type) const {
        return static_cast<T*>(plugin->getCapabilityInterface(type));
    }
    IPluginV3OneCore* core() const { return interface<IPluginV3OneCore>(PluginCapabilityType::kCORE); }
    IPluginV3OneBuildV2* build() const { return interface<IPluginV3OneBuildV2>(PluginCapabilityType::kBUILD); }
    IPluginV3OneRuntime* runtime() const { return interface<IPluginV3OneRuntime>(PluginCapabilityType::kRUNTIME); }
};

inline Made make(IPluginCreatorV3One* creator, const std::vector<PluginField>& fields,
                 TensorRTPhase phase = TensorRTPhase::kBUILD) {
    const PluginFieldCollection collection{static_cast<int32_t>(fields.size()), fields.data()};
    return Made(creator->createPlugin("layer", &collection, phase));
}

inline std::vector<PluginField> fields_of(const Values& values) {
    std::vector<PluginField> fields;
    for (const NamedValue& value : values) {
        fields.emplace_back(value.name, &value.value, PluginFieldType::kINT32, 1);
    }
    return fields;
}

inline Made make(IPluginCreatorV3One* creator, const Values& values) { return make(creator, fields_of(values)); }

inline Dims dims(std::initializer_list<int64_t> sizes) {
    Dims dims{};
    for (const int64_t size : sizes) dims.d[dims.nbDims++] = size;
    return dims;
}

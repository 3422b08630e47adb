// The three operators as a network of B sequences, 4 query heads, 2 KV heads of 16 would call them.
#pragma once

#include "library.h"

struct Tensor {
    DataType type;
    std::string shape;  ///< "B 4 16"
};

struct Example {
    const char* name;
    Values values;
    std::vector<Tensor> inputs;
    std::vector<Tensor> outputs;
    std::vector<int32_t> aliases;
};

inline constexpr DataType kCacheTypes[] = {DataType::kFLOAT, DataType::kHALF, DataType::kBF16};

/// C = 58 slots in pages of 4: 15 pages, the last one partial.
inline std::vector<Example> examples(DataType t = DataType::kHALF) {
    const DataType length = DataType::kINT64, index = DataType::kINT32;
    const Tensor head{t, "B 2 16"}, cache{t, "B 2 58 16"}, bounds{t, "B 2 32 15"}, query{t, "B 4 16"};
    return {
        {"KvcCompact",
         {{"prompt_budget", 50}, {"capacity", 58}, {"pool_kernel", 7}, {"page_size", 4}},
         {{t, "B 4 8 16"}, {t, "B 2 S 16"}, {t, "B 2 S 16"}, {length, "B"}},
         {cache, cache, bounds, {length, "B"}, {index, "B 2 58"}},
         {-1, -1, -1, -1, -1}},
        {"KvcHybridAttention",
         {{"page_size", 4}, {"top_r", 6}, {"top_k", 16}, {"token_budget", 32}, {"dense_until", 24}},
         {query, head, head, cache, cache, bounds, {length, "B"}},
         {query, cache, cache, bounds, {index, "B 2 32"}},
         {-1, 3, 4, 5, -1}},
        {"KvcDenseAttention",
         {{"dense_until", 32}},
         {query, head, head, cache, cache, {length, "B"}},
         {query, cache, cache},
         {-1, 3, 4}},
    };
}

inline Made make(const Library& library, const Example& example) {
    return make(library.creator(example.name), example.values);
}

/// Sizes in place of the symbols B and S.
inline Dims concrete(const std::string& shape, int64_t batch, int64_t prompt) {
    Dims dims{};
    for (size_t from = 0; from < shape.size();) {
        const size_t to = std::min(shape.find(' ', from), shape.size());
        const std::string word = shape.substr(from, to - from);
        dims.d[dims.nbDims++] = word == "B" ? batch : word == "S" ? prompt : std::stoll(word);
        from = to + 1;
    }
    return dims;
}

inline std::vector<PluginTensorDesc> descriptions(const std::vector<Tensor>& tensors, int64_t batch, int64_t prompt) {
    std::vector<PluginTensorDesc> all;
    for (const Tensor& tensor : tensors) {
        all.push_back({concrete(tensor.shape, batch, prompt), tensor.type, TensorFormat::kLINEAR, 1.0F});
    }
    return all;
}

struct Range {
    int64_t min, max;
};

inline std::vector<DynamicPluginTensorDesc> profile(const std::vector<Tensor>& tensors, Range batch, Range prompt) {
    std::vector<DynamicPluginTensorDesc> all;
    for (const Tensor& tensor : tensors) {
        const Dims wildcard = concrete(tensor.shape, -1, -1);
        const Dims min = concrete(tensor.shape, batch.min, prompt.min);
        const Dims max = concrete(tensor.shape, batch.max, prompt.max);
        // TensorRT asks for workspace with unknown optimum sizes.
        all.push_back({{wildcard, tensor.type, TensorFormat::kLINEAR, 1.0F}, min, max, wildcard});
    }
    return all;
}

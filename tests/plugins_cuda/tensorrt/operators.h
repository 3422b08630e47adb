// The calls of the operators in a network of B sequences, 4 query heads, 2 KV heads of 16.
#pragma once

#include <algorithm>

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
    bool scratch = true;  ///< true if a call needs scratch memory
};

inline constexpr DataType kCacheTypes[] = {DataType::kFLOAT, DataType::kHALF, DataType::kBF16};

/// C = 58 slots in pages of 4: 15 pages, the last one partial, and room for a multiple of 8 in 16 bit, of 16 in fp8.
inline std::vector<Example> examples(DataType t = DataType::kHALF, bool fp8 = false) {
    const DataType length = DataType::kINT64, index = DataType::kINT32;
    const Tensor bounds{fp8 ? DataType::kINT8 : t, t == DataType::kFLOAT && !fp8 ? "B 2 32 15" : "B 2 32 16"};
    const NamedValue kind{"fp8_bounds", fp8 ? 1 : 0};
    const NamedValue alike{"by_length", 0};
    const Tensor block{t, "B 2 M 16"}, joined{t, "B 2 (58+M) 16"}, positions{index, "B 2 58"};
    const Tensor head{t, "B 2 16"}, cache{t, "B 2 58 16"}, query{t, "B 4 16"};
    return {
        {"KvcCompact",
         {{"prompt_budget", 50}, {"capacity", 58}, {"pool_kernel", 7}, {"page_size", 4}, kind, alike},
         {{t, "B 4 8 16"}, {t, "B 2 S 16"}, {t, "B 2 S 16"}, {length, "B"}},
         {cache, cache, bounds, {length, "B"}, {index, "B 2 58"}},
         {-1, -1, -1, -1, -1}},
        {"KvcHybridAttention",
         {{"page_size", 4}, {"top_r", 6}, {"top_k", 16}, {"token_budget", 32}, {"dense_until", 24}, kind},
         {query, head, head, cache, cache, bounds, {length, "B"}},
         {query, cache, cache, bounds, {index, "B 2 32"}},
         {-1, 3, 4, 5, -1}},
        {"KvcDenseAttention",
         {{"dense_until", 32}},
         {query, head, head, cache, cache, {length, "B"}},
         {query, cache, cache},
         {-1, 3, 4}},
        {"KvcCompactTurn",
         {{"prompt_budget", 50}, {"capacity", 58}, {"pool_kernel", 7}, {"page_size", 4}, kind, alike},
         {{t, "B 4 8 16"}, {t, "B 2 S 16"}, {t, "B 2 S 16"}, {length, "B"}, {length, "B"}},
         {cache, cache, bounds, {length, "B"}, positions},
         {-1, -1, -1, -1, -1}},
        {"KvcAppendBlock",
         {},
         {block, block, cache, cache, {length, "B"}, {length, "B"}},
         {cache, cache},
         {2, 3},
         false},
        {"KvcRaiseBounds",
         {{"page_size", 4}, kind},
         {block, bounds, {length, "B"}, {length, "B"}},
         {bounds},
         {1},
         false},
        {"KvcJoinBlock",
         {},
         {block, block, cache, cache, {length, "B"}, {length, "B"}},
         {joined, joined, {length, "B"}},
         {-1, -1, -1},
         false},
        {"KvcReplaceCache",
         {},
         {cache, cache, positions, cache, cache, positions},
         {cache, cache, positions},
         {0, 1, 2},
         false},
        {"KvcReplaceBounds", {kind}, {bounds, bounds}, {bounds}, {0}, false},
    };
}

/// With caches of every type, and bounds of that type or in fp8.
inline std::vector<Example> examples_of_all_types() {
    std::vector<Example> all;
    for (const DataType type : kCacheTypes) {
        for (const bool fp8 : {false, true}) {
            const std::vector<Example> some = examples(type, fp8);
            all.insert(all.end(), some.begin(), some.end());
        }
    }
    return all;
}

/// The operators that have attributes.
inline std::vector<Example> examples_with_fields() {
    std::vector<Example> all = examples();
    std::erase_if(all, [](const Example& example) { return example.values.empty(); });
    return all;
}

inline std::vector<std::string> words_of(const std::string& shape) {
    std::vector<std::string> words;
    for (size_t from = 0; from < shape.size();) {
        const size_t to = std::min(shape.find(' ', from), shape.size());
        words.push_back(shape.substr(from, to - from));
        from = to + 1;
    }
    return words;
}

/// True if no other tensor contradicts another size of this one: it is an open size, and the only one of its name.
inline bool is_free(const Example& example, const Tensor& tensor, int32_t axis) {
    const std::string word = words_of(tensor.shape)[static_cast<size_t>(axis)];
    size_t uses = 0;
    for (const auto* tensors : {&example.inputs, &example.outputs}) {
        for (const Tensor& other : *tensors) {
            const std::vector<std::string> words = words_of(other.shape);
            uses += static_cast<size_t>(std::ranges::count(words, word));
        }
    }
    return word == "M" && uses == 1;
}

inline Made make(const Library& library, const Example& example) {
    return make(library.creator(example.name), example.values);
}

/// Sizes in place of the symbols B, S and M; the last two are of the same size.
inline Dims concrete(const std::string& shape, int64_t batch, int64_t prompt) {
    Dims dims{};
    for (const std::string& word : words_of(shape)) {
        const bool joined = word == "(58+M)";
        const int64_t size = word == "B" ? batch : joined && prompt > 0 ? 58 + prompt : prompt;
        dims.d[dims.nbDims++] = word == "B" || word == "S" || word == "M" || joined ? size : std::stoll(word);
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

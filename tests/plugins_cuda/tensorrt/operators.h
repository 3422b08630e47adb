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

/// How the vectors of a cache are stored: the value of `cache_format`, and the bits of codes of keys and of values.
struct Format {
    int32_t code, key_bits, value_bits;
    DataType scale;  ///< of codes of 8 bits; INT8 is the byte of an exponent
};
inline constexpr Format kAuto{0, 0, 0, DataType::kHALF};
inline constexpr Format kFormats[] = {
    {1, 8, 8, DataType::kHALF}, {2, 8, 8, DataType::kINT8}, {3, 4, 4, DataType::kHALF}, {4, 8, 4, DataType::kHALF}};

using Tensors = std::vector<Tensor>;

/// The tensors of vectors of 16 channels, for tokens of a shape ("B 2 58"): elements, or codes and numbers.
inline Tensors vectors(DataType t, const Format& format, int32_t bits, const std::string& tokens) {
    if (bits == 0) return {{t, tokens + " 16"}};
    if (bits == 8) return {{DataType::kINT8, tokens + " 16"}, {format.scale, tokens + " 1"}};
    return {{DataType::kINT8, tokens + " 8"}, {DataType::kHALF, tokens + " 1"}, {DataType::kHALF, tokens + " 1"}};
}

inline Tensors joined(std::initializer_list<Tensors> parts) {
    Tensors all;
    for (const Tensors& part : parts) all.insert(all.end(), part.begin(), part.end());
    return all;
}

/// `own` outputs of their own, then `count` that share the buffers of the inputs from `first` on, then `more` of their own.
inline std::vector<int32_t> aliases(size_t own, size_t first, size_t count, size_t more = 0) {
    std::vector<int32_t> all(own, -1);
    for (size_t i = 0; i < count; ++i) all.push_back(static_cast<int32_t>(first + i));
    all.insert(all.end(), more, -1);
    return all;
}

/// C = 58 slots in pages of 4: 15 pages, the last one partial, and room for a multiple of 8 in 16 bit, of 16 in fp8.
inline std::vector<Example> examples(DataType t = DataType::kHALF, bool fp8 = false, const Format& format = kAuto) {
    const auto stored = [&](const std::string& tokens) {
        return joined({vectors(t, format, format.key_bits, tokens), vectors(t, format, format.value_bits, tokens)});
    };
    const Tensor length{DataType::kINT64, "B"}, positions{DataType::kINT32, "B 2 58"};
    const Tensor bounds{fp8 ? DataType::kINT8 : t, t == DataType::kFLOAT && !fp8 ? "B 2 32 15" : "B 2 32 16"};
    const NamedValue kind{"fp8_bounds", fp8 ? 1 : 0}, alike{"by_length", 0}, form{"cache_format", format.code};
    const Tensor block{t, "B 2 M 16"}, head{t, "B 2 16"}, query{t, "B 4 16"}, window{t, "B 4 8 16"};
    const Tensors cache = stored("B 2 58"), prompt = stored("B 2 S"), table = stored("B 2 (58+M)");
    const Tensors exact = {{t, "B 2 S 16"}, {t, "B 2 S 16"}}, kept = {bounds, length, positions};
    const size_t parts = cache.size();
    return {
        {"KvcCompact",
         {{"prompt_budget", 50}, {"capacity", 58}, {"pool_kernel", 7}, {"page_size", 4}, kind, form, alike},
         joined({{window}, exact, {length}}),
         joined({cache, kept}),
         aliases(parts + 3, 0, 0)},
        {"KvcHybridAttention",
         {{"page_size", 4}, {"top_r", 6}, {"top_k", 16}, {"token_budget", 32}, {"dense_until", 24}, kind, form},
         joined({{query, head, head}, cache, {bounds, length}}),
         joined({{query}, cache, {bounds, {DataType::kINT32, "B 2 32"}}}),
         aliases(1, 3, parts + 1, 1)},
        {"KvcDenseAttention",
         {{"dense_until", 32}, form},
         joined({{query, head, head}, cache, {length}}),
         joined({{query}, cache}),
         aliases(1, 3, parts)},
        {"KvcCompactTurn",
         {{"prompt_budget", 50}, {"capacity", 58}, {"pool_kernel", 7}, {"page_size", 4}, kind, form, alike},
         joined({{window}, prompt, {length, length}}),
         joined({cache, kept}),
         aliases(parts + 3, 0, 0)},
        {"KvcAppendBlock",
         {form},
         joined({{block, block}, cache, {length, length}}),
         cache,
         aliases(0, 2, parts),
         false},
        {"KvcRaiseBounds", {{"page_size", 4}, kind, form}, {block, bounds, length, length}, {bounds}, {1}, false},
        {"KvcJoinBlock",
         {form},
         joined({{block, block}, cache, {length, length}}),
         joined({table, {length}}),
         aliases(parts + 1, 0, 0),
         false},
        {"KvcReplaceCache",
         {form},
         joined({cache, {positions}, cache, {positions}}),
         joined({cache, {positions}}),
         aliases(0, 0, parts + 1),
         false},
        {"KvcReplaceBounds", {kind}, {bounds, bounds}, {bounds}, {0}, false},
    };
}

/// With caches of every type and format, and bounds of that type or in fp8.
inline std::vector<Example> examples_of_all_types() {
    std::vector<Example> all;
    for (const DataType type : kCacheTypes) {
        for (const bool fp8 : {false, true}) {
            const std::vector<Example> some = examples(type, fp8);
            all.insert(all.end(), some.begin(), some.end());
        }
        for (const Format& format : kFormats) {
            const std::vector<Example> some = examples(type, true, format);
            all.insert(all.end(), some.begin(), some.end());
        }
    }
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

// One call of an operator by ONNX Runtime: inputs, outputs and sizes, checked against the schema, and threads.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <new>
#include <span>
#include <string>
#include <string_view>

#include "onnxruntime/abi.h"
#include "onnxruntime/error.h"
#include "onnxruntime/schemas.h"

namespace kvc {

/// The attributes of a node, read once when the session is made.
class Attributes {
public:
    Attributes(const ort::Api& api, const ort::Info* info) : api_(api), info_(info) {}

    /// Returns an INT attribute; throws Error where the node lacks it or its value is below `least`.
    int64_t integer(const char* name, int64_t least = 0) const;

    /// Returns an INT attribute, `absent` where the node lacks it, as those of older engines do.
    int64_t integer_or(const char* name, int64_t absent) const;

    /// Returns a FLOAT attribute; throws Error where the node lacks it.
    float real(const char* name) const;

    /// True where the node has this INT attribute and it is not 0.
    bool flag(const char* name) const;

private:
    ort::Api api_;
    const ort::Info* info_;
};

/// The sizes of one call by symbol: a symbol has the same size in all tensors.
class Sizes {
public:
    Sizes() { sizes_.fill(kUnknown); }

    /// The size of a symbol that an input or the operator has fixed.
    int64_t operator[](Symbol symbol) const { return sizes_[static_cast<size_t>(symbol)]; }

    /// Fixes a size; throws Error where it contradicts a known size. `where` names the tensor in the message.
    void fix(Symbol symbol, int64_t size, const char* where);

private:
    static constexpr int64_t kUnknown = -1;
    std::array<int64_t, kSymbols> sizes_;
};

/// The keys and values of the same tokens, each from its first token on.
template <class Byte>
struct Tables {
    VectorsOf<Byte> keys, values;
};

/// The constructor reads the inputs and binds their shapes; each output is made when the operator asks for it.
class Call {
public:
    Call(const ort::Api& api, ort::Context* context, const Schema& schema);

    const Sizes& sizes() const { return sizes_; }
    const Schema& schema() const { return schema_; }

    /// Fixes a size that follows from attributes. `where` names the source of the size.
    void fix(Symbol symbol, int64_t size, const char* where) { sizes_.fix(symbol, size, where); }

    /// The elements of an input; null for an optional one that the node lacks.
    template <typename T>
    const T* input(size_t index) const {
        return static_cast<const T*>(inputs_[index]);
    }

    /// The elements of an input by its name, which has another place in each format of the cache.
    template <typename T>
    const T* input(std::string_view name) const {
        return input<T>(place_of(schema_.inputs, name));
    }

    /// The elements of an output, writable; null for an optional output that nobody reads.
    template <typename T>
    T* output(size_t index) {
        return static_cast<T*>(output_memory(index));
    }
    template <typename T>
    T* output(std::string_view name) {
        return output<T>(place_of(schema_.outputs, name));
    }

    /// The output `name`_out, the next state of the input `name`: its memory where the caller bound it so, else a copy.
    template <typename T>
    T* updated(std::string_view name) {
        const std::string out = std::string(name) + "_out";
        return static_cast<T*>(updated_memory(place_of(schema_.inputs, name), place_of(schema_.outputs, out)));
    }

    /// Keys and values in the schema's format: the parts of `keys` and, behind them, those of the values.
    Tables<const uint8_t> input_tables(std::string_view keys) const;
    Tables<uint8_t> output_tables(std::string_view keys);
    /// Those of the outputs that are the next state of the inputs.
    Tables<uint8_t> updated_tables(std::string_view keys);

    /// Calls work(0), ..., work(count - 1) on the session's threads. `work` may throw std::bad_alloc and nothing else;
    /// the exception leaves this function once all threads are done.
    template <typename Work>
    void parallel(size_t count, const Work& work) const {
        if (count == 1) return work(0);
        struct Task {
            const Work& work;
            std::atomic<bool> out_of_memory{false};
        } task{work};
        const auto one = [](void* data, size_t index) noexcept {
            Task& shared = *static_cast<Task*>(data);
            try {
                shared.work(index);
            } catch (const std::bad_alloc&) {
                shared.out_of_memory = true;
            }
        };
        run(one, count, &task);
        if (task.out_of_memory) throw std::bad_alloc();
    }

private:
    /// Throws Error where no tensor has the name.
    static size_t place_of(std::span<const TensorSpec> tensors, std::string_view name);
    void* output_memory(size_t index);
    void* updated_memory(size_t index, size_t output);
    void derive_sizes();
    void run(void (*function)(void*, size_t), size_t count, void* data) const;
    void check(ort::Status* status) const;

    ort::Api api_;
    ort::Context* context_;
    const Schema& schema_;
    Sizes sizes_;
    std::array<const void*, kMaxTensors> inputs_{};
};

/// The code that computes one node.
class Kernel {
public:
    virtual ~Kernel() = default;
    virtual void compute(Call& call) const = 0;
};

/// An operator that this library computes.
struct Implementation {
    std::span<const Schema> schemas;  ///< one for each format of the caches, and type of bounds, that it serves
    std::unique_ptr<Kernel> (*make)(const Attributes&);
};

}  // namespace kvc

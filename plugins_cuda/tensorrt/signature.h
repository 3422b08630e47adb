// The tensors that one call has: an operator's tables list those of calls in every format, the attributes choose.
#pragma once

#include <array>
#include <cstdint>
#include <span>

#include "kernels/vector_formats.h"
#include "tensorrt/shapes.h"

namespace kvc::tensorrt {

struct Operator;
class Fields;

/// The tensors of a call on one side, with the types and widths of its format, and the places of each in the table.
class Tensors {
public:
    std::span<const TensorSpec> specs() const { return std::span(specs_).first(count_); }
    void add(const TensorSpec& spec, size_t place);
    /// The index of the tensor at this place of the table.
    int32_t index_of(int32_t place) const;
    /// The addresses of these tensors in the order of the table, null at the places that the call does not have.
    template <class Address>
    std::array<Address, kMaxTensors> in_table(const Address* addresses) const {
        std::array<Address, kMaxTensors> all{};
        for (size_t i = 0; i < count_; ++i) all[places_[i]] = addresses[i];
        return all;
    }

private:
    std::array<TensorSpec, kMaxTensors> specs_{};
    std::array<size_t, kMaxTensors> places_{};
    size_t count_ = 0;
};

struct Signature {
    Tensors inputs;
    Tensors outputs;  ///< an alias is the index of an input of the call

    Signature(const Operator& op, const Fields& fields);

    /// Sets the head size where codes of 4 bits alone tell it.
    void derive_head_size(Sizes& sizes) const;
    /// Sets the widths of codes, scales and minima, which follow from the head size.
    void derive_widths(Sizes& sizes) const;

private:
    /// The name of the first tensor with this symbol; null if none has it.
    const char* first_with(Dim dim) const;
};

}  // namespace kvc::tensorrt

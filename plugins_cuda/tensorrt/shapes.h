// Shapes and types of an operator's tensors as tables of symbols, and TensorRT's three questions about them:
// what is the (symbolic) shape of an output, do these sizes fit together, which types and formats are served.
#pragma once

#include <NvInferRuntime.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <initializer_list>
#include <span>

#include "kvc/types.h"
#include "tensorrt/dimensions.h"

namespace kvc::tensorrt {

/// The contents of a tensor: elements of the cache, page bounds, numbers; in the tables, also a part of stored vectors,
/// whose type and width follow from the cache's format (signature.h).
enum class Element : uint8_t {
    kCache,
    kBound,
    kInt64,
    kInt32,
    kInt8,
    kHalf,
    kKeys,
    kKeyScales,
    kKeyMinima,
    kValues,
    kValueScales,
    kValueMinima,
};

/// Types of the tensors of a call that an operator leaves open.
struct Types {
    nvinfer1::DataType cache;   ///< float32, float16 or bfloat16
    nvinfer1::DataType bounds;  ///< the cache's type, or INT8
};

struct Shape {
    std::array<Dim, 4> dims{};
    int32_t rank = 0;
    constexpr Shape() = default;
    constexpr Shape(std::initializer_list<Dim> list) {
        for (const Dim dim : list) dims[rank++] = dim;
    }
    bool has(Dim dim) const { return std::find(dims.begin(), dims.begin() + rank, dim) != dims.begin() + rank; }
};

inline constexpr int32_t kNotAliased = -1;

struct TensorSpec {
    const char* name;
    Element element;
    Shape shape;
    int32_t alias = kNotAliased;  ///< of an output: the input whose buffer it is
};

/// Sizes of the symbols, where they are known.
class Sizes {
public:
    Sizes() { values_.fill(kUnknown); }
    bool known(Dim dim) const { return values_[static_cast<size_t>(dim)] != kUnknown; }
    int32_t get(Dim dim) const { return values_[static_cast<size_t>(dim)]; }
    /// Product of known sizes. A product that does not fit wraps around: the C ABI refuses its factors.
    int64_t product(std::initializer_list<Dim> dims) const;
    /// Sets a size in 0..2^31-1; throws Refusal if it differs from the known size. `where` names the size's source.
    void fix(Dim dim, int64_t size, const char* where);

private:
    static constexpr int32_t kUnknown = -1;
    std::array<int32_t, kDims> values_;
};

using DimExpr = const nvinfer1::IDimensionExpr*;

/// Expressions of the symbols, null where unknown.
using SymbolExprs = std::array<DimExpr, kDims>;

/// Takes the sizes that `dims` gives to the symbols of `spec`; throws Refusal on a wrong rank or a contradiction.
void bind(const TensorSpec& spec, const nvinfer1::Dims& dims, Sizes& sizes);

/// Takes the expressions that `dims` gives to the symbols of `spec`; constant ones go to `sizes` too.
void bind(const TensorSpec& spec, const nvinfer1::DimsExprs& dims, SymbolExprs& exprs, Sizes& sizes);

/// The shape of an output.
nvinfer1::DimsExprs shape_of(const TensorSpec& spec, const SymbolExprs& exprs, const Sizes& sizes,
                             nvinfer1::IExprBuilder& builder);

nvinfer1::DataType type_of(const TensorSpec& spec, const Types& types);
bool is_cache_type(nvinfer1::DataType type);
KvcDtype dtype_of(nvinfer1::DataType cache_type);
int32_t element_bytes_of(nvinfer1::DataType cache_type);

/// Throws Refusal unless the tensor has the type of its spec and the linear format.
void check_type(const TensorSpec& spec, const nvinfer1::PluginTensorDesc& desc, const Types& types);

}  // namespace kvc::tensorrt

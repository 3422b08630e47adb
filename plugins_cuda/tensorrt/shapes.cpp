#include "tensorrt/shapes.h"

#include <cinttypes>

#include "src/sizes.h"
#include "tensorrt/report.h"

namespace kvc::tensorrt {
namespace {

using nvinfer1::DataType;
using nvinfer1::DimensionOperation;
using nvinfer1::Dims;
using nvinfer1::DimsExprs;
using nvinfer1::IExprBuilder;
using nvinfer1::PluginTensorDesc;
using nvinfer1::TensorFormat;

void check_rank(const TensorSpec& spec, int32_t found) {
    if (found != spec.shape.rank) {
        refuse("%s: expected %d dimensions, found %d", spec.name, static_cast<int>(spec.shape.rank),
               static_cast<int>(found));
    }
}

}  // namespace

void Sizes::fix(Dim dim, int64_t size, const char* where) {
    int32_t& value = values_[static_cast<size_t>(dim)];
    const char* name = kDimNames[static_cast<size_t>(dim)];
    if (size < 0 || size > INT32_MAX) {
        refuse("%s: expected %s in 0..%d, found %" PRId64, where, name, INT32_MAX, size);
    }
    if (value != kUnknown && value != size) {
        refuse("%s: expected %s = %d, found %" PRId64, where, name, static_cast<int>(value), size);
    }
    value = static_cast<int32_t>(size);
}

int64_t Sizes::product(std::initializer_list<Dim> dims) const {
    uint64_t product = 1;
    for (const Dim dim : dims) product *= static_cast<uint64_t>(get(dim));
    return static_cast<int64_t>(product);
}

void bind(const TensorSpec& spec, const Dims& dims, Sizes& sizes) {
    check_rank(spec, dims.nbDims);
    for (int32_t axis = 0; axis < spec.shape.rank; ++axis) sizes.fix(spec.shape.dims[axis], dims.d[axis], spec.name);
}

void bind(const TensorSpec& spec, const DimsExprs& dims, SymbolExprs& exprs, Sizes& sizes) {
    check_rank(spec, dims.nbDims);
    for (int32_t axis = 0; axis < spec.shape.rank; ++axis) {
        const Dim dim = spec.shape.dims[axis];
        if (dims.d[axis] == nullptr) refuse("%s: dimension %d has no expression", spec.name, static_cast<int>(axis));
        exprs[static_cast<size_t>(dim)] = dims.d[axis];
        if (dims.d[axis]->isConstant()) sizes.fix(dim, dims.d[axis]->getConstantValue(), spec.name);
    }
}

DimsExprs shape_of(const TensorSpec& spec, const SymbolExprs& exprs, const Sizes& sizes, IExprBuilder& builder) {
    DimsExprs shape{};
    shape.nbDims = spec.shape.rank;
    for (int32_t axis = 0; axis < spec.shape.rank; ++axis) {
        const Dim dim = spec.shape.dims[axis];
        DimExpr expr = exprs[static_cast<size_t>(dim)];
        if (expr == nullptr && sizes.known(dim)) expr = builder.constant(sizes.get(dim));
        if (expr == nullptr && dim == Dim::kTwiceHeadSize) {
            const DimExpr head_size = exprs[static_cast<size_t>(Dim::kHeadSize)];
            expr = builder.operation(DimensionOperation::kPROD, *head_size, *builder.constant(2));
        }
        if (expr == nullptr && dim == Dim::kCapacityAndBlock) {
            const DimExpr capacity = exprs[static_cast<size_t>(Dim::kCapacity)];
            const DimExpr block = exprs[static_cast<size_t>(Dim::kBlock)];
            expr = builder.operation(DimensionOperation::kSUM, *capacity, *block);
        }
        if (expr == nullptr) refuse("%s: its %s is not known", spec.name, kDimNames[static_cast<size_t>(dim)]);
        shape.d[axis] = expr;
    }
    return shape;
}

DataType type_of(const TensorSpec& spec, const Types& types) {
    switch (spec.element) {
        case Element::kInt64: return DataType::kINT64;
        case Element::kInt32: return DataType::kINT32;
        case Element::kInt8: return DataType::kINT8;
        case Element::kHalf: return DataType::kHALF;
        case Element::kBound: return types.bounds;
        default: return types.cache;
    }
}

bool is_cache_type(DataType type) {
    return type == DataType::kFLOAT || type == DataType::kHALF || type == DataType::kBF16;
}

KvcDtype dtype_of(DataType cache_type) {
    switch (cache_type) {
        case DataType::kFLOAT: return KVC_FLOAT32;
        case DataType::kHALF: return KVC_FLOAT16;
        case DataType::kBF16: return KVC_BFLOAT16;
        default:
            refuse("type of the cache: expected float32, float16 or bfloat16, found DataType %d",
                   static_cast<int>(cache_type));
    }
}

int32_t element_bytes_of(DataType cache_type) {
    return static_cast<int32_t>(kvc::element_bytes_of(dtype_of(cache_type)));
}

void check_type(const TensorSpec& spec, const PluginTensorDesc& desc, const Types& types) {
    const DataType expected = type_of(spec, types);
    if (desc.type != expected || desc.format != TensorFormat::kLINEAR) {
        refuse("%s: expected DataType %d in linear format, found DataType %d in format %d", spec.name,
               static_cast<int>(expected), static_cast<int>(desc.type), static_cast<int>(desc.format));
    }
}

}  // namespace kvc::tensorrt

#include "tensorrt/signature.h"

#include <algorithm>
#include <optional>

#include "tensorrt/plugin.h"

namespace kvc::tensorrt {
namespace {

/// The tensor of a table in a format; none where the format does not have it.
std::optional<TensorSpec> in_format(TensorSpec spec, CacheFormat formats) {
    const bool of_keys = spec.element >= Element::kKeys && spec.element <= Element::kKeyMinima;
    const VectorFormat format = of_keys ? formats.keys : formats.values;
    Dim& width = spec.shape.dims[spec.shape.rank - 1];
    switch (spec.element) {
        case Element::kKeys:
        case Element::kValues:
            spec.element = format == VectorFormat::kExact ? Element::kCache : Element::kInt8;
            if (format == VectorFormat::kInt4) width = Dim::kHalfHeadSize;
            return spec;
        case Element::kKeyScales:
        case Element::kValueScales:
            if (format == VectorFormat::kExact) return {};
            spec.element = format == VectorFormat::kFp8 ? Element::kInt8 : Element::kHalf;
            if (format != VectorFormat::kInt4) width = Dim::kOne;
            return spec;
        case Element::kKeyMinima:
        case Element::kValueMinima:
            if (format != VectorFormat::kInt4) return {};
            spec.element = Element::kHalf;
            return spec;
        default: return spec;
    }
}

}  // namespace

void Tensors::add(const TensorSpec& spec, size_t place) {
    specs_[count_] = spec;
    places_[count_++] = place;
}

int32_t Tensors::index_of(int32_t place) const {
    const auto end = places_.begin() + static_cast<ptrdiff_t>(count_);
    return static_cast<int32_t>(std::find(places_.begin(), end, static_cast<size_t>(place)) - places_.begin());
}

Signature::Signature(const Operator& op, const Fields& fields) {
    const CacheFormat formats = formats_of(fields.is_set("cache_format") ? fields.get("cache_format") : 0);
    const size_t absent = fields.is_set("by_length") ? 0 : op.by_length;
    for (size_t place = 0; place < op.inputs.size() - absent; ++place) {
        if (const auto spec = in_format(op.inputs[place], formats)) inputs.add(*spec, place);
    }
    for (size_t place = 0; place < op.outputs.size(); ++place) {
        auto spec = in_format(op.outputs[place], formats);
        if (!spec) continue;
        if (spec->alias != kNotAliased) spec->alias = inputs.index_of(spec->alias);
        outputs.add(*spec, place);
    }
}

void Signature::derive_head_size(Sizes& sizes) const {
    if (!sizes.known(Dim::kHalfHeadSize) || sizes.known(Dim::kHeadSize)) return;
    sizes.fix(Dim::kHeadSize, int64_t{2} * sizes.get(Dim::kHalfHeadSize), first_with(Dim::kHalfHeadSize));
}

void Signature::derive_widths(Sizes& sizes) const {
    if (sizes.known(Dim::kHeadSize)) {
        const int64_t head_size = sizes.get(Dim::kHeadSize);
        if (const char* name = first_with(Dim::kHalfHeadSize)) sizes.fix(Dim::kHalfHeadSize, head_size / 2, name);
        if (const char* name = first_with(Dim::kGroups)) sizes.fix(Dim::kGroups, groups_of(head_size), name);
    }
    if (const char* name = first_with(Dim::kOne)) sizes.fix(Dim::kOne, 1, name);
}

const char* Signature::first_with(Dim dim) const {
    for (const Tensors* side : {&inputs, &outputs}) {
        for (const TensorSpec& spec : side->specs()) {
            if (spec.shape.has(dim)) return spec.name;
        }
    }
    return nullptr;
}

}  // namespace kvc::tensorrt

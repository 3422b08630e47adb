"""Writes the tables that follow from the operators' schemas: `python -m plugins_cpu.generate` from the root.

The file is committed, so that compiling needs no Python; a test checks that it is current.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from kvc_trt.models.cache_formats import VectorFormat
from kvc_trt.operators import KVC_DOMAIN
from kvc_trt.operators.dimensions import SIZES
from kvc_trt.operators.native import NativeOperator, interface, variants
from kvc_trt.operators.registry import OPERATORS
from kvc_trt.operators.schema import CACHE, FLOAT, FLOAT16, INT8, INT32, INT64, UINT8, Operator, Tensor
from plugins_cuda.generate import laid_out

PLUGINS = Path(__file__).resolve().parents[1]
NOTE = "Generated from the operators' schemas (kvc_trt/operators) by `python -m plugins_cpu.generate`; edit those."
ELEMENT_TYPES = {
    CACHE: "kFloat",
    FLOAT: "kFloat",
    INT64: "kInt64",
    INT32: "kInt32",
    FLOAT16: "kFloat16",
    INT8: "kInt8",
    UINT8: "kUint8",
}
"""The element types' names in C++. The library serves only float32 activations, and float32 caches where they have no
format; the operators' ONNX bodies serve the other types."""

OF_FORMATS = {"D/2": "half head size", "groups": "groups", "1": "one"}
"""The sizes of the parts of stored vectors in words; the library derives them from the head size."""


def generated() -> Mapping[Path, str]:
    """Path and text of every generated file."""
    path = PLUGINS / "onnxruntime" / "schemas.h"
    return {path: laid_out(path, f"// {NOTE}\n{schemas_header()}")}


def schemas_header() -> str:
    """The text of schemas.h: inputs and outputs of the operators that the library computes, in the order of a node."""
    operators = {operator.name: variants(operator) for operator in implemented()}
    made = [variant.operator for found in operators.values() for variant in found]
    tensors = [tensor for operator in made for tensor in operator.tensors]
    symbols = list(dict.fromkeys(symbol for tensor in tensors for symbol in tensor.shape))
    most_tensors = max(len(side) for operator in made for side in (operator.inputs, operator.outputs))
    return f"""#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "kernels/stored.h"
#include "onnxruntime/abi.h"

namespace kvc {{

/// The version of the interface that Python and the library share.
inline constexpr int32_t kInterface = {interface()};

inline constexpr const char* kDomain = "{KVC_DOMAIN}";

/// The symbols of tensor dimensions.
enum class Symbol : uint8_t {{
{_lines(f"{symbol_name(symbol)},  ///< {symbol}" for symbol in symbols)}
}};
inline constexpr size_t kSymbols = {len(symbols)};

/// The symbols' names in messages.
inline constexpr const char* kSymbolNames[kSymbols] = {{{", ".join(f'"{_words(symbol)}"' for symbol in symbols)}}};

inline constexpr size_t kMaxTensors = {most_tensors};
inline constexpr size_t kMaxRank = {max(len(tensor.shape) for tensor in tensors)};

struct TensorSpec {{
    const char* name;
    ort::ElementType type;
    bool optional;
    std::span<const Symbol> shape;
}};

/// The inputs and outputs of an operator, in the order of a node, for caches of one format and bounds of one type.
struct Schema {{
    const char* name;
    std::span<const TensorSpec> inputs;
    std::span<const TensorSpec> outputs;
    VectorFormat keys = VectorFormat::kExact;
    VectorFormat values = VectorFormat::kExact;
    bool fp8_bounds = false;
}};

namespace schemas {{

{_lines(_shapes(tensors))}

{"".join(map(_operator, operators.values()))}
}}  // namespace schemas

}}  // namespace kvc
"""


def implemented() -> Iterator[Operator]:
    """The operators whose schema a source file in operators/ refers to."""
    sources = [path.read_text(encoding="utf-8") for path in sorted((PLUGINS / "operators").glob("*.cpp"))]
    return (
        one for one in OPERATORS.values() if any(re.search(rf"schemas::k{one.name}\b", source) for source in sources)
    )


def symbol_name(symbol: str) -> str:
    """The symbol's name in C++: kBatch, kHeads; kSymbolN for one that only one operator uses."""
    words = _words(symbol)
    if words == symbol and symbol not in OF_FORMATS:
        return "kSymbol" + symbol.replace("/", "Over")
    return "k" + "".join(word.capitalize() for word in words.replace("2 x", "twice").replace("+", "and").split())


def _words(symbol: str) -> str:
    return OF_FORMATS.get(symbol) or (SIZES[symbol].words if symbol in SIZES else symbol)


def _shapes(tensors: list[Tensor]) -> Iterator[str]:
    """One C++ array for each distinct shape."""
    for shape in dict.fromkeys(tensor.shape for tensor in tensors):
        symbols = ", ".join(f"Symbol::{symbol_name(symbol)}" for symbol in shape)
        yield f"inline constexpr Symbol {_shape_name(shape)}[] = {{{symbols}}};"


def _shape_name(shape: tuple[str, ...]) -> str:
    return "kShape" + "".join(f"_{symbol}" for symbol in shape).replace("/", "Over").replace("+", "And")


def _operator(variants: list[NativeOperator]) -> str:
    name, summary = variants[0].name, variants[0].operator.summary
    tensors = "\n".join(
        f"inline constexpr TensorSpec k{variant.name}{kind}[] = {{{', '.join(_tensor(variant, one) for one in side)}}};"
        for variant in variants
        for kind, side in (("Inputs", variant.operator.inputs), ("Outputs", variant.operator.outputs))
    )
    schemas = ", ".join(
        f'{{"{variant.name}", k{variant.name}Inputs, k{variant.name}Outputs, {_format(variant.form.keys)}, '
        f"{_format(variant.form.values)}, {_bool(variant.fp8_bounds)}}}"
        for variant in variants
    )
    return f"""// {summary}
{tensors}
inline constexpr Schema k{name}[] = {{{schemas}}};

"""


def _format(vector: VectorFormat | None) -> str:
    return f"VectorFormat::k{'Exact' if vector is None else vector.name.capitalize()}"


def _bool(value: bool) -> str:
    return "true" if value else "false"


def _tensor(variant: NativeOperator, tensor: Tensor) -> str:
    element = f"ort::ElementType::{ELEMENT_TYPES[variant.element_of(tensor)]}"
    return f'{{"{tensor.name}", {element}, {_bool(tensor.optional)}, {_shape_name(tensor.shape)}}}'


def _lines(lines: Iterator[str]) -> str:
    return "\n".join(lines)

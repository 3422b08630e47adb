"""Writes the tables that follow from the operators' schemas: `python -m plugins_cpu.generate` from the root.

The file is committed, so that compiling needs no Python; a test checks that it is current.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from kvc_trt.operators import KVC_DOMAIN
from kvc_trt.operators.dimensions import SIZES
from kvc_trt.operators.native import interface
from kvc_trt.operators.registry import OPERATORS
from kvc_trt.operators.schema import BOUND, CACHE, FLOAT, FLOAT16, INT32, INT64, UINT8, Operator, Tensor
from plugins_cuda.generate import laid_out

PLUGINS = Path(__file__).resolve().parents[1]
NOTE = "Generated from the operators' schemas (kvc_trt/operators) by `python -m plugins_cpu.generate`; edit those."
ELEMENT_TYPES = {
    CACHE: "kFloat",
    BOUND: "kFloat",
    FLOAT: "kFloat",
    INT64: "kInt64",
    INT32: "kInt32",
    FLOAT16: "kFloat16",
    UINT8: "kUint8",
}
"""The element types' names in C++. The library serves only float32 caches with float32 bounds; the operators' ONNX
bodies serve the other types."""


def generated() -> Mapping[Path, str]:
    """Path and text of every generated file."""
    path = PLUGINS / "onnxruntime" / "schemas.h"
    return {path: laid_out(path, f"// {NOTE}\n{schemas_header()}")}


def schemas_header() -> str:
    """The text of schemas.h: inputs and outputs of the operators that the library computes, in the order of a node."""
    operators = tuple(map(_with_optional_inputs, implemented()))
    tensors = [tensor for operator in operators for tensor in operator.tensors]
    symbols = list(dict.fromkeys(symbol for tensor in tensors for symbol in tensor.shape))
    most_tensors = max(len(side) for operator in operators for side in (operator.inputs, operator.outputs))
    return f"""#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

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

/// The inputs and outputs of an operator, in the order of a node.
struct Schema {{
    const char* name;
    std::span<const TensorSpec> inputs;
    std::span<const TensorSpec> outputs;
}};

namespace schemas {{

{_lines(_shapes(tensors))}

{"".join(map(_operator, operators))}
}}  // namespace schemas

}}  // namespace kvc
"""


def implemented() -> Iterator[Operator]:
    """The operators whose schema a source file in operators/ refers to."""
    sources = [path.read_text(encoding="utf-8") for path in sorted((PLUGINS / "operators").glob("*.cpp"))]
    return (one for one in OPERATORS.values() if any(f"schemas::k{one.name}," in source for source in sources))


def _with_optional_inputs(operator: Operator) -> Operator:
    """The operator with the inputs that only some nodes have, which are the last ones."""
    some = tuple(replace(tensor, optional=True) for tensor in operator.by_length)
    return replace(operator, inputs=(*operator.inputs, *some))


def symbol_name(symbol: str) -> str:
    """The symbol's name in C++: kBatch, kHeads; kSymbolN for one that only one operator uses."""
    if symbol not in SIZES:
        return "kSymbol" + symbol.replace("/", "Over")
    words = SIZES[symbol].words.replace("2 x", "twice").replace("+", "and").split()
    return "k" + "".join(word.capitalize() for word in words)


def _words(symbol: str) -> str:
    return SIZES[symbol].words if symbol in SIZES else symbol


def _shapes(tensors: list[Tensor]) -> Iterator[str]:
    """One C++ array for each distinct shape."""
    for shape in dict.fromkeys(tensor.shape for tensor in tensors):
        symbols = ", ".join(f"Symbol::{symbol_name(symbol)}" for symbol in shape)
        yield f"inline constexpr Symbol {_shape_name(shape)}[] = {{{symbols}}};"


def _shape_name(shape: tuple[str, ...]) -> str:
    return "kShape" + "".join(f"_{symbol}" for symbol in shape).replace("/", "Over").replace("+", "And")


def _operator(operator: Operator) -> str:
    name = operator.name
    return f"""// {operator.summary}
inline constexpr TensorSpec k{name}Inputs[] = {{{", ".join(map(_tensor, operator.inputs))}}};
inline constexpr TensorSpec k{name}Outputs[] = {{{", ".join(map(_tensor, operator.outputs))}}};
inline constexpr Schema k{name}{{"{name}", k{name}Inputs, k{name}Outputs}};

"""


def _tensor(tensor: Tensor) -> str:
    optional = "true" if tensor.optional else "false"
    element = f"ort::ElementType::{ELEMENT_TYPES[tensor.element]}"
    return f'{{"{tensor.name}", {element}, {optional}, {_shape_name(tensor.shape)}}}'


def _lines(lines: Iterator[str]) -> str:
    return "\n".join(lines)

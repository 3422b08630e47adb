"""The tables of the TensorRT plugins, and the functions that pass a call of TensorRT on to the C ABI."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from kvc_trt.kernels.parameters import Member, kernel_of, members, parts_in_formats
from kvc_trt.operators import KVC_DOMAIN
from kvc_trt.operators.dimensions import INT32_MAX, SIZES, names_in
from kvc_trt.operators.registry import KERNEL_OPERATORS
from kvc_trt.operators.schema import BOUND, CACHE, INT64, OF_SOME_CALLS, VERSION, Attribute, Operator, Stride, Tensor
from plugins_cuda.generate.formulas import expression


def dimensions_header() -> str:
    """The text of dimensions.h: the symbols of shapes, and the names by which TensorRT finds the plugins."""
    return f"""#pragma once

#include <cstddef>
#include <cstdint>

namespace kvc::tensorrt {{

/// Namespace and version of every plugin, as the nodes of a network name them.
inline constexpr const char* kNamespace = "{KVC_DOMAIN}";
inline constexpr const char* kVersion = "{VERSION}";

/// The symbols of tensor dimensions.
enum class Dim : uint8_t {{
{_lines(f"{_dimension(symbol)},  ///< {symbol}" for symbol in SIZES)}
}};
inline constexpr size_t kDims = {len(SIZES)};

/// The symbols' names in messages.
inline constexpr const char* kDimNames[kDims] = {{{", ".join(f'"{size.words}"' for size in SIZES.values())}}};

/// The most attributes of any operator.
inline constexpr size_t kMaxFields = {max(len(operator.call_attributes) for operator in KERNEL_OPERATORS)};

/// The most inputs that any operator has in some format, and more than it has outputs.
inline constexpr size_t kMaxTensors = {max(len(_table(one.whole, one.whole.inputs)) for one in KERNEL_OPERATORS)};

}}  // namespace kvc::tensorrt
"""


def operators_header() -> str:
    """The text of operators.h: the list of all operators."""
    return f"""// Every operator, each in a file of its own in operators/.
#pragma once

#include "tensorrt/plugin.h"

namespace kvc::tensorrt {{

{_lines(f"extern const Operator {_constant(one)};" for one in KERNEL_OPERATORS)}

inline constexpr const Operator* kOperators[] = {{{", ".join(f"&{_constant(one)}" for one in KERNEL_OPERATORS)}}};

}}  // namespace kvc::tensorrt
"""


def operator_sources() -> dict[str, str]:
    """The C++ source of each operator, by file name."""
    return {f"{kernel_of(one).operation.removeprefix('kvc_')}.cpp": _operator(one) for one in KERNEL_OPERATORS}


def _operator(operator: Operator) -> str:
    kernel, fields, by_length = kernel_of(operator), _fields(operator), len(operator.by_length)
    operator = operator.whole
    numbers = [member for member in members(operator) if not isinstance(member.source, Tensor)]
    formulas = _lines(_formulas(operator))
    attributes, sizes = " fields" if "fields." in formulas else "", " sizes" if formulas else ""
    return f"""// {operator.name}: {operator.summary}
// The operator's tables, and the conversion of its calls into calls of the C ABI.
{"#include <algorithm>" if "std::" in formulas else ""}

{'#include "kernels/stored_pages.h"' if "stored_pages(" in formulas else ""}
#include "kvc/kvc.h"
#include "tensorrt/operators.h"

namespace kvc::tensorrt {{
namespace {{

using enum Dim;
using enum Element;

{fields}

constexpr TensorSpec kInputs[] = {{{_tensors(operator, operator.inputs)}}};

// The number after a shape is the input whose buffer the output shares.
constexpr TensorSpec kOutputs[] = {{{_tensors(operator, operator.outputs)}}};

void derive(const Fields&{attributes}, Sizes&{sizes}) {{
{formulas}
}}

{kernel.struct} params_of(const Call& call) {{
    {kernel.struct} params{{}};
    params.struct_bytes = sizeof params;
    params.dtype = call.dtype;
{_lines(f"params.{one.name} = {_number(one)};" for one in numbers if one.source is not None)}
    return params;
}}

KvcStatus workspace(const Call& call, uint64_t* bytes, KvcMessage* message) {{
    const {kernel.struct} params = params_of(call);
    return {kernel.operation}_workspace(&params, bytes, message);
}}

KvcStatus launch(const Call& call, const Buffers& buffers, KvcMessage* message) {{
    {kernel.struct} params = params_of(call);
{_lines(_addresses(operator))}
    return {kernel.operation}(&params, buffers.workspace, buffers.workspace_bytes, buffers.stream, message);
}}

}}  // namespace

constinit const Operator {_constant(operator)} = {{
    "{operator.name}", kFields, kInputs, kOutputs, derive, workspace, launch{f", {by_length}" if by_length else ""}}};

}}  // namespace kvc::tensorrt
"""


def _lines(lines: Iterable[str]) -> str:
    return "\n".join(lines)


def _constant(operator: Operator) -> str:
    """The operator's constant in C++: kCompact, kDenseAttention ..."""
    return f"k{operator.name.removeprefix('Kvc')}"


def _dimension(symbol: str) -> str:
    """The symbol's name in C++: kBatch, kHeads, kTwiceHeadSize ..."""
    words = SIZES[symbol].words.replace("2 x", "twice").replace("+", "and").split()
    return "k" + "".join(word.capitalize() for word in words)


def _fields(operator: Operator) -> str:
    fields = "".join(_field(operator, one) + "," for one in operator.call_attributes)
    return f"constexpr FieldSpec kFields[] = {{{fields}}};"


def _field(operator: Operator, attribute: Attribute) -> str:
    parts = [
        f'.name = "{attribute.name}"',
        f".minimum = {attribute.least}",
        f".maximum = {'INT32_MAX' if attribute.most == INT32_MAX else attribute.most}",
    ]
    if attribute in OF_SOME_CALLS:
        parts.append(".optional = true")
    if attribute.odd:
        parts.append(".odd = true")
    if attribute.at_most in {one.name for one in operator.attributes}:
        parts.append(f'.at_most = "{attribute.at_most}"')
    return f"{{{', '.join(parts)}}}"


def _table(operator: Operator, tensors: tuple[Tensor, ...]) -> list[Tensor]:
    """All tensors that stand for `tensors` in some format."""
    return [part for tensor in tensors for part in parts_in_formats(operator, tensor)]


def _tensors(operator: Operator, tensors: tuple[Tensor, ...]) -> str:
    inputs = [one.name for one in _table(operator, operator.inputs)]
    return "".join(
        _tensor(part, element, inputs)
        for tensor in tensors
        for part, element in zip(parts_in_formats(operator, tensor), _elements(operator, tensor), strict=True)
    )


def _elements(operator: Operator, tensor: Tensor) -> tuple[str, ...]:
    """The enumerators that say what a tensor holds, and what its scales and minima do."""
    if operator.stores and tensor.stored == "keys":
        return "kKeys", "kKeyScales", "kKeyMinima"
    if operator.stores and tensor.stored == "values":
        return "kValues", "kValueScales", "kValueMinima"
    return ({CACHE: "kCache", BOUND: "kBound", INT64: "kInt64"}.get(tensor.element, "kInt32"),)


def _tensor(tensor: Tensor, element: str, inputs: list[str]) -> str:
    alias = f", {inputs.index(tensor.alias)}" if tensor.alias else ""
    return f'{{"{tensor.name}", {element}, {{{", ".join(map(_dimension, tensor.shape))}}}{alias}}},'


def _formulas(operator: Operator) -> Iterator[str]:
    """C++ that computes every derived size once the sizes in its formula are known."""
    attributes = {one.name for one in operator.attributes}
    formulas = dict(operator.all_formulas())
    read = dict.fromkeys(name for formula in formulas.values() for name in names_in(formula) if name in attributes)
    yield from (f'const int64_t {name} = fields.get("{name}");' for name in read)
    for symbol, formula in formulas.items():
        fixed = f'sizes.fix({_dimension(symbol)}, {expression(formula)}, "{operator.origin_of(symbol)}");'
        needed = [name for name in names_in(formula) if name not in attributes]
        if needed:
            known = " && ".join(f"sizes.known({_dimension(name)})" for name in needed)
            values = " ".join(f"const int64_t {name} = sizes.get({_dimension(name)});" for name in needed)
            yield f"if ({known}) {{ {values}\n{fixed} }}"
        else:
            yield fixed


def _number(member: Member) -> str:
    match member.source:
        case Attribute(name=name):
            return f'call.fields.get("{name}")'
        case Stride(contiguous=symbols):
            return f"call.sizes.product({{{', '.join(map(_dimension, symbols))}}})"
        case str(symbol):
            return f"call.sizes.get({_dimension(symbol)})"
    raise ValueError(f"{member.name} is no number")


def _addresses(operator: Operator) -> Iterator[str]:
    """C++ that passes the addresses of tensors. A tensor that is updated in place is passed as the output, which shares
    the input's buffer."""
    inputs, outputs = _table(operator, operator.inputs), _table(operator, operator.outputs)
    updated = {tensor.alias: number for number, tensor in enumerate(outputs) if tensor.alias}
    for member in members(operator):
        if isinstance(member.source, Tensor):
            name = member.source.name
            if member.source in outputs:
                place = f"buffers.outputs[{outputs.index(member.source)}]"
            elif name in updated:
                place = f"buffers.outputs[{updated[name]}]"
            else:
                place = f"buffers.inputs[{inputs.index(member.source)}]"
            yield f"params.{name} = {place if 'void' in member.type else f'static_cast<{member.type}>({place})'};"

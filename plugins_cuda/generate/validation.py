"""Generates the checks of numbers and tensors that follow from an operation's schema."""

from __future__ import annotations

from collections.abc import Iterator

from kvc_trt.kernels.parameters import RESERVED, kernel_of, members, size_members
from kvc_trt.kernels.rotated import LIBRARY_OPERATORS
from kvc_trt.operators.dimensions import ELEMENT_BYTES, INT32_MAX, SIZES, Size, names_in
from kvc_trt.operators.schema import BOUND, CACHE, Attribute, Operator, Tensor
from plugins_cuda.generate.formulas import expression


def rules_header() -> str:
    """The text of parameter_rules.h: a function for the numbers and one for the tensors of each parameter struct."""
    functions = "".join(map(_functions, LIBRARY_OPERATORS))
    return f"""// Checks of every operation's numbers and tensors; src/validate.cpp adds the rules that involve several.
#pragma once

#include <algorithm>
#include <vector>

#include "kernels/stored_pages.h"
#include "kvc/parameters.h"
#include "src/checks.h"

namespace kvc::checks {{

{functions}
}}  // namespace kvc::checks
"""


def _functions(operator: Operator) -> str:
    operator = operator.whole
    struct = kernel_of(operator).struct
    tensors = _contiguous(operator)
    derived = [operator.formulas[symbol] for symbol, _ in _sizes(operator) if symbol in operator.formulas]
    formulas = dict(operator.all_formulas())
    held = size_members(operator)
    shapes = [tensor.shape for tensor in tensors if "groups" not in tensor.shape]
    extents = [formulas[one] for one in formulas if one not in held and any(one in shape for shape in shapes)]
    sizes, attributes = ", ".join(_size_ranges(operator)), ", ".join(_attribute_ranges(operator))
    multiples = "\n".join(_multiples(operator))
    odd = "\n".join(f'check_odd("{one.name}", p.{one.name});' for one in _attributes(operator) if one.odd)
    listed = ", ".join(_tensor(operator, tensor) for tensor in tensors)
    name = "contiguous_tensors_of" if kernel_of(operator).strides else "tensors_of"
    return f"""// ---- {operator.name}

inline void check_numbers(const {struct}& p) {{
{_locals(operator, derived)}
check_ranges({{{{"dtype", p.dtype, KVC_FLOAT32, KVC_BFLOAT16}}, {sizes}}});
{f"check_ranges({{{attributes}}});" if attributes else ""}
{multiples}
{"check_group(p);" if "H" in held else ""}
{odd}
}}

inline std::vector<Tensor> {name}(const {struct}& p) {{
const TensorMaker make = maker(p);
{_locals(operator, extents)}
return {{{listed}}};
}}

"""


def _attributes(operator: Operator) -> list[Attribute]:
    """The attributes that the struct holds."""
    return [member.source for member in members(operator) if isinstance(member.source, Attribute)]


def _sizes(operator: Operator) -> list[tuple[str, Size]]:
    """The sizes that the struct holds and that are not attributes, by symbol."""
    return [(one.source, SIZES[one.source]) for one in members(operator) if isinstance(one.source, str)]


def _size_ranges(operator: Operator) -> Iterator[str]:
    """Ranges of the sizes that do not follow from others, also where an attribute holds the size."""
    held, attributes = size_members(operator), {one.name: one for one in _attributes(operator)}
    for symbol, field in held.items():
        size = SIZES[symbol]
        if field in attributes:
            yield _range(operator, field, attributes[field].least, attributes[field].most, attributes[field].at_most)
        elif symbol not in operator.formulas:
            yield _range(operator, field, size.least, size.most, size.at_most if size.at_most in held else None)


def _attribute_ranges(operator: Operator) -> Iterator[str]:
    """Ranges of attributes: limits come before the values that they limit, derived values come last."""
    others = [one for one in _attributes(operator) if one.name not in size_members(operator).values()]
    limits = {one.name: one.at_most for one in _attributes(operator)}

    def depth(name: str | None) -> int:
        return 0 if name is None else 1 + depth(limits.get(name))

    for one in sorted(others, key=lambda attribute: depth(attribute.at_most)):
        yield _range(operator, one.name, one.least, one.most, one.at_most)
    for symbol, size in _sizes(operator):
        if symbol in operator.formulas:
            formula = operator.formulas[symbol]
            value = expression(formula)
            yield f'{{"{size.field}", p.{size.field}, {value}, {value}, "{formula}"}}'
    if any(one.name == RESERVED for one in members(operator)):
        yield f'{{"{RESERVED}", p.{RESERVED}, 0, 0}}'


def _range(operator: Operator, field: str, least: int, most: int, at_most: str | None) -> str:
    if at_most is None:
        return f'{{"{field}", p.{field}, {least}, {"kLargestInt32" if most == INT32_MAX else most}}}'
    limit = size_members(operator).get(at_most, at_most)
    return f'{{"{field}", p.{field}, {least}, p.{limit}, "{limit}"}}'


def _multiples(operator: Operator) -> Iterator[str]:
    held = size_members(operator)
    for size in (SIZES[symbol] for symbol in held):
        if isinstance(size.multiple_of, int):
            yield f'check_multiple("{size.field}", p.{size.field}, {size.multiple_of});'
        elif size.multiple_of is not None and size.multiple_of in held:
            divisor = SIZES[size.multiple_of].field
            yield f'check_multiple("{size.field}", p.{size.field}, p.{divisor}, "{divisor}");'


def _contiguous(operator: Operator) -> list[Tensor]:
    """The tensors of the struct, except those that its strides describe."""
    held = [member.source for member in members(operator) if isinstance(member.source, Tensor)]
    return [tensor for tensor in held if tensor.name not in kernel_of(operator).strided or tensor in operator.outputs]


def _tensor(operator: Operator, tensor: Tensor) -> str:
    if operator.stores and tensor.stored in ("keys", "values"):
        return _part(operator, tensor)
    written = tensor in operator.outputs or tensor in operator.state
    kinds = {CACHE: "output" if written else "input", BOUND: "stored_bounds" if written else "given_bounds"}
    kind = kinds.get(tensor.element, "numbers")
    shape = ", ".join(_extent(operator, symbol) for symbol in tensor.shape)
    made = f'make.{kind}("{tensor.name}", p.{tensor.name}, {{{shape}}})'
    return f"make.optional({made})" if tensor.optional else made


def _part(operator: Operator, tensor: Tensor) -> str:
    """Stored vectors, their scales or their minima: their sizes depend on the call's format."""
    kind = next((kind for kind in ("scale", "minimum") if tensor.name.endswith(f"_{kind}")), "codes")
    kinds = {"codes": "codes", "scale": "scales", "minimum": "minima"}
    shape = ", ".join(_extent(operator, symbol) for symbol in (*tensor.shape[:-1], "D"))
    return f'make.{kinds[kind]}(make.formats.{tensor.stored}, "{tensor.name}", p.{tensor.name}, {{{shape}}})'


def _extent(operator: Operator, symbol: str) -> str:
    field = size_members(operator).get(symbol)
    if field is not None:
        return f"p.{field}"
    return expression(dict(operator.all_formulas())[symbol])


def _locals(operator: Operator, formulas: list[str]) -> str:
    """C++ variables for the names that the formulas read."""
    names = dict.fromkeys(name for formula in formulas for name in names_in(formula))
    fields = size_members(operator)
    values = {name: "make.element_bytes" if name == ELEMENT_BYTES else f"p.{fields.get(name, name)}" for name in names}
    return "\n".join(f"const int64_t {name} = {value};" for name, value in values.items())

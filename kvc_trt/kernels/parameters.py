"""The parameter struct of each operation of the C ABI, member by member, derived from the operator's schema.

The C header (plugins_cuda/include/kvc/parameters.h) and the ctypes mirrors both come from these members.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from functools import cache

from kvc_trt.models.cache_formats import CACHE_FORMATS, INT4
from kvc_trt.operators.dimensions import INT32_MAX, MAX_TOKENS, SIZES, Size
from kvc_trt.operators.schema import (
    BOUND,
    CACHE,
    CACHE_FORMAT,
    FLOAT,
    FLOAT16,
    INT64,
    Attribute,
    Kernel,
    Operator,
    Stride,
    Tensor,
    parts_of,
)

_NUMBER_SUMMARIES = ("fp16 or bytes of exponents, in formats", "fp16, in int4; groups is 1 in other formats")
"""The scales and the minima of stored vectors."""
RESERVED = "reserved"
"""The member that makes the 32-bit numbers even in number, so that a struct has no padding; it is 0."""


@dataclass(frozen=True)
class Member:
    """One member of a parameter struct."""

    name: str
    type: str
    """Its type in C."""
    comment: str
    source: str | Attribute | Stride | Tensor | None = None
    """The source of the parameter's value, a size by its symbol; None for the struct's own size."""


def kernel_of(operator: Operator) -> Kernel:
    """Return the operation that computes an operator; ValueError if there is none."""
    if operator.kernel is None:
        raise ValueError(f"{operator.name} has no kernel")
    return operator.kernel


@cache
def members(operator: Operator) -> tuple[Member, ...]:
    """Return all members in order: 32-bit numbers, 64-bit numbers, addresses of inputs, addresses of outputs.

    A struct serves calls in every format: it has the parts of a stored tensor in all of them. `operator` has none."""
    kernel, operator = kernel_of(operator), (operator.exact or operator).whole
    numbers = list(_numbers(operator, kernel))
    narrow = [Member("dtype", "int32_t", "KvcDtype"), *(member for member in numbers if member.type == "int32_t")]
    if len(narrow) % 2:
        narrow.append(Member(RESERVED, "int32_t", "0"))
    tensors = (*operator.inputs, *(tensor for tensor in operator.outputs if tensor.alias is None))
    return (
        Member("struct_bytes", "uint64_t", f"sizeof({kernel.struct}) of the caller"),
        *narrow,
        *(member for member in numbers if member.type == "int64_t"),
        *(Member(stride.name, "int64_t", stride.summary, stride) for stride in kernel.strides),
        *(_address(operator, part, tensor) for tensor in tensors for part in parts_in_formats(operator, tensor)),
    )


def parts_in_formats(operator: Operator, tensor: Tensor) -> tuple[Tensor, ...]:
    """Return one of an operator's tensors, followed by its scales and its minima if it has them in some format."""
    if not operator.stores or tensor.stored not in ("keys", "values"):
        return (tensor,)
    _, *numbers = parts_of(tensor, CACHE_FORMATS[INT4.name])
    return tensor, *(replace(part, summary=text) for part, text in zip(numbers, _NUMBER_SUMMARIES, strict=True))


@cache
def size_members(operator: Operator) -> dict[str, str]:
    """Return the member that holds each size of an operator's tensors, by symbol."""
    sizes = _sizes(operator.exact or operator)
    return {symbol: SIZES[symbol].field or "" for symbol in sizes if SIZES[symbol].field}


def _sizes(operator: Operator) -> list[str]:
    """Return the symbols of an operator's tensors, without those that a common formula derives from others."""
    named = {symbol for tensor in operator.tensors for symbol in tensor.shape}
    derived = {symbol for symbol, _ in operator.all_formulas() if symbol not in operator.formulas}
    return [symbol for symbol in SIZES if symbol in named - derived]


def _numbers(operator: Operator, kernel: Kernel) -> Iterator[Member]:
    """Yield the sizes of the inputs, the attributes, and the sizes derived from attributes."""
    attributes = {attribute.name for attribute in operator.attributes}
    sizes = {symbol: SIZES[symbol] for symbol in _sizes(operator) if SIZES[symbol].field not in (None, *attributes)}
    for symbol, size in sizes.items():
        if symbol not in operator.formulas:
            most = size.at_most if size.at_most in size_members(operator) else _number(size.most)
            yield _size(symbol, size, f"{symbol} in {size.least}..{most}", sizes)
    own = [attribute for attribute in operator.attributes if attribute.name not in kernel.ignored]
    later = [attribute for attribute in own if attribute.name in kernel.later]
    formats = [CACHE_FORMAT] if operator.stores else []
    for attribute in (*(one for one in own if one not in later), *formats, *later):
        yield Member(attribute.name, f"int{attribute.bits}_t", _range(operator, attribute), attribute)
    for symbol, size in sizes.items():
        if symbol in operator.formulas:
            yield _size(symbol, size, operator.formulas[symbol], sizes)


def _size(symbol: str, size: Size, comment: str, others: Collection[str]) -> Member:
    rules = [comment]
    if isinstance(size.multiple_of, int) or size.multiple_of in others:
        divisor = SIZES[size.multiple_of].field if isinstance(size.multiple_of, str) else size.multiple_of
        rules.append(f"a multiple of {divisor}")
    return Member(size.field or "", f"int{size.bits}_t", ", ".join([*rules, *filter(None, [size.rule])]), symbol)


def _range(operator: Operator, attribute: Attribute) -> str:
    symbols = [symbol for symbol, formula in operator.formulas.items() if formula == attribute.name]
    most = _number(attribute.most)
    if attribute.at_most is not None:
        most = size_members(operator).get(attribute.at_most, attribute.at_most)
    words = [
        *(f"{symbol} in" for symbol in symbols),
        *(["odd, in"] if attribute.odd else []),
        f"{attribute.least}..{most}",
    ]
    return " ".join(words) + (f": {attribute.summary}" if attribute.summary else "")


def _number(value: int) -> str:
    return {INT32_MAX: "2^31-1", MAX_TOKENS: "2^20"}.get(value, str(value))


def _address(operator: Operator, tensor: Tensor, whole: Tensor) -> Member:
    """Return the address of a tensor, a part of `whole`."""
    elements = {CACHE: "void", BOUND: "void", FLOAT16: "void", FLOAT: "float", INT64: "int64_t"}
    element = elements.get(tensor.element, "int32_t")
    written = whole in operator.outputs or whole in operator.state
    comment = f"[{','.join(tensor.shape)}]{_summary(tensor)}"
    return Member(tensor.name, f"{element}*" if written else f"const {element}*", comment, tensor)


def _summary(tensor: Tensor) -> str:
    return (f", {tensor.summary}" if tensor.summary else "") + ("; or null" if tensor.optional else "")

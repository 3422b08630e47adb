"""The symbols of tensor shapes: their names and ranges, formulas over them, and the sizes of one call.

Symbols: B batch, H query heads, G KV heads, D head size, W observation window, S prompt length, C slots of a cache,
P pages (`stored_pages`), K width of a list of selected tokens, M new tokens of a turn.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache

from kvc_trt.models.cache_formats import INT4

INT32_MAX = 2**31 - 1
MAX_TOKENS = 2**20
MAX_HEAD_SIZE = 256
MAX_GROUP = 16
"""The largest number of query heads that share a KV head."""


class Refusal(ValueError):
    """Invalid attributes or shapes; the message names the field or tensor, what was expected and what was found."""


@dataclass(frozen=True)
class Size:
    """The meaning of a symbol and the range that the kernels accept."""

    words: str
    """The size in words, for messages."""
    field: str | None = None
    """Name of its field in the parameter structs of the C ABI, which have no field for a size that follows from others;
    None if it always does."""
    bits: int = 32
    """Width of that field."""
    least: int = 1
    most: int = INT32_MAX
    multiple_of: int | str | None = None
    """A divisor of the size: a number or the symbol of another size."""
    at_most: str | None = None
    """Symbol of another size that this one may not exceed."""
    rule: str = ""
    """A further condition, for readers of the C header."""


ELEMENT_BYTES = "element_bytes"
"""Symbol of the size of the cache's elements in bytes. No shape has it; it follows from the type of the tensors."""

SIZES: Mapping[str, Size] = {
    "B": Size("batch", "batch", most=65535),
    "H": Size("heads", "heads", most=65535, multiple_of="G", rule=f"H / G in 1..{MAX_GROUP}"),
    "G": Size("kv heads", "kv_heads", most=65535, at_most="H"),
    "D": Size("head size", "head_size", least=16, most=MAX_HEAD_SIZE, multiple_of=8),
    "W": Size("window", "window", most=1024, rule="at most prompt_budget if any prompt can exceed the budget"),
    "S": Size("prompt length", "prompt_length", bits=64, most=MAX_TOKENS),
    "C": Size("capacity", "capacity", bits=64, most=MAX_TOKENS),
    "M": Size("block", "block", bits=64, most=MAX_TOKENS),
    "C+M": Size("capacity + block"),
    "P": Size(
        "pages",
        "pages",
        bits=64,
        most=MAX_TOKENS,
        rule="ceil(C / page_size), in 16 bit rounded up to a multiple of 8, in fp8 of 16",
    ),
    "2D": Size("2 x head size", "channels", least=32, most=2 * MAX_HEAD_SIZE, multiple_of=16),
    "K": Size("selected width", "selected_width", bits=64),
    "D/2": Size("half head size"),
    "groups": Size("groups"),
    "1": Size("one"),
    ELEMENT_BYTES: Size("bytes per element"),
}
"""Symbols that the kernels know. An operator's shapes may also use symbols of its own."""

COMMON_FORMULAS: Mapping[str, str] = {
    "P": f"stored_pages(C, page_size, {ELEMENT_BYTES}, fp8_bounds)",
    "2D": "2 * D",
    "C+M": "C + M",
    "D/2": "D // 2",
    "groups": "groups_of(D)",
    "1": "1",
}
"""Derived sizes, the same in every operator whose shapes use them."""


def page_multiple(bound_bytes: int) -> int:
    """Return the number of which P is a multiple: rows of 16-bit and 8-bit bounds start at a multiple of 16 bytes."""
    return {1: 16, 2: 8}.get(bound_bytes, 1)


def stored_pages(capacity: int, page_size: int, element_bytes: int, fp8_bounds: int) -> int:
    """Return P, the pages that the bounds of `capacity` slots have room for; those past the last slot stay empty.

    `element_bytes` are those of the cache's type, which bounds have too unless they are fp8."""
    multiple = page_multiple(1 if fp8_bounds else element_bytes)
    return -(-capacity // (page_size * multiple)) * multiple


def groups_of(head_size: int) -> int:
    """Return the groups of channels of a vector in 4 bits, each with a scale and a minimum."""
    return INT4.groups(head_size)


class Dimensions:
    """The sizes known so far in one call; tensors and attributes add sizes, contradictions are refused."""

    def __init__(self, element_bytes: int | None = None) -> None:
        """Start with the size of the cache's elements; None where it is not known yet, and no P can be derived."""
        self._values: dict[str, int] = {} if element_bytes is None else {ELEMENT_BYTES: element_bytes}

    def __contains__(self, symbol: str) -> bool:
        return symbol in self._values

    def __getitem__(self, symbol: str) -> int:
        return self._values[symbol]

    def fix(self, symbol: str, size: int, where: str) -> None:
        """Set a size; Refusal unless it is in 0..2^31-1 and agrees with what is known. `where` is its source."""
        words = SIZES[symbol].words if symbol in SIZES else symbol
        if not 0 <= size <= INT32_MAX:
            raise Refusal(f"{where}: expected {words} in 0..{INT32_MAX}, found {size}")
        if self._values.setdefault(symbol, size) != size:
            raise Refusal(f"{where}: expected {words} = {self._values[symbol]}, found {size}")

    def bind(self, name: str, symbols: tuple[str, ...], shape: Iterable[int]) -> None:
        """Set the symbols of a tensor's shape to its sizes."""
        found = tuple(shape)
        check_rank(name, symbols, len(found))
        for symbol, size in zip(symbols, found, strict=True):
            self.fix(symbol, size, name)

    def shape(self, symbols: tuple[str, ...]) -> tuple[int, ...]:
        """Return the sizes of the symbols; KeyError for an unknown one."""
        return tuple(self._values[symbol] for symbol in symbols)


def check_rank(name: str, symbols: tuple[str, ...], found: int) -> None:
    """Raise Refusal unless a tensor has as many dimensions as it has symbols."""
    if found != len(symbols):
        raise Refusal(f"{name}: expected {len(symbols)} dimensions, found {found}")


_FUNCTIONS: Mapping[str, Callable[..., int]] = {
    "max": max,
    "min": min,
    "stored_pages": stored_pages,
    "groups_of": groups_of,
}
_OPERATORS: Mapping[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: lambda left, right: left + right,
    ast.Sub: lambda left, right: left - right,
    ast.Mult: lambda left, right: left * right,
    ast.FloorDiv: lambda left, right: left // right,
}


@cache
def names_in(formula: str) -> tuple[str, ...]:
    """Return the symbols and attributes that a formula reads, in order."""
    nodes = (node for node in ast.walk(_parsed(formula)) if isinstance(node, ast.Name))
    ordered = sorted(nodes, key=lambda node: node.col_offset)
    return tuple(dict.fromkeys(node.id for node in ordered if node.id not in _FUNCTIONS))


def evaluate(formula: str, values: Mapping[str, int]) -> int:
    """Evaluate a formula such as "max(top_k + 1, token_budget)": whole numbers, names, + - * // and functions."""
    return _compiled(formula)(values)


@cache
def _compiled(formula: str) -> Callable[[Mapping[str, int]], int]:
    """Compile a formula to a function, since every layer evaluates it in every decode step."""

    def made(node: ast.expr) -> Callable[[Mapping[str, int]], int]:
        match node:
            case ast.Constant(value=int(number)):
                return lambda values: number
            case ast.Name(id=name):
                return lambda values: values[name]
            case ast.BinOp(left=left, op=sign, right=right) if type(sign) in _OPERATORS:
                operation, one, other = _OPERATORS[type(sign)], made(left), made(right)
                return lambda values: operation(one(values), other(values))
            case ast.Call(func=ast.Name(id=name), args=arguments) if name in _FUNCTIONS:
                function, parts = _FUNCTIONS[name], [made(argument) for argument in arguments]
                return lambda values: function(*(part(values) for part in parts))
        raise ValueError(f"formula {formula!r}: expected whole numbers, names, + - * //, {', '.join(_FUNCTIONS)}")

    return made(_parsed(formula))


@cache
def _parsed(formula: str) -> ast.expr:
    return ast.parse(formula, mode="eval").body

"""Formulas of the schemas as C++ expressions."""

from __future__ import annotations

import ast

_OPERATORS: dict[type[ast.operator], tuple[str, int]] = {
    ast.Add: ("+", 1),
    ast.Sub: ("-", 1),
    ast.Mult: ("*", 2),
    ast.FloorDiv: ("/", 2),
}
"""The C++ sign of each Python operator, and how strongly it binds."""


def expression(formula: str) -> str:
    """A formula of `dimensions.evaluate` in C++, over int64_t variables named as its symbols and attributes.

    `stored_pages` and `groups_of` are functions of kernels/stored_pages.h and kernels/vector_formats.h."""

    def text(node: ast.expr, binding: int) -> str:
        match node:
            case ast.Constant(value=int(number)):
                return str(number)
            case ast.Name(id=name):
                return name
            case ast.BinOp(left=left, op=operation, right=right):
                sign, strength = _OPERATORS[type(operation)]
                written = f"{text(left, strength)} {sign} {text(right, strength + 1)}"
                return f"({written})" if strength < binding else written
            case ast.Call(func=ast.Name(id=name), args=arguments) if name in ("max", "min"):
                return f"std::{name}({{{', '.join(text(one, 0) for one in arguments)}}})"
            case ast.Call(func=ast.Name(id=name), args=arguments) if name in ("stored_pages", "groups_of"):
                return f"{name}({', '.join(text(one, 0) for one in arguments)})"
        raise ValueError(f"formula {formula!r}: cannot be written in C++")

    return text(ast.parse(formula, mode="eval").body, 0)

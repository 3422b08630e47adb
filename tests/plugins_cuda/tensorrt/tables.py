"""The tables at the top of each plugin's source, read as text: what the C++ says without compiling it."""

from __future__ import annotations

import re
from dataclasses import dataclass

from tests.plugins_cuda.tensorrt.toolchain import SOURCES

FILES = {
    "KvcCompact": "compact.cpp",
    "KvcHybridAttention": "hybrid_attention.cpp",
    "KvcDenseAttention": "dense_attention.cpp",
}
DIMENSIONS = {
    "kBatch": "B", "kHeads": "H", "kKvHeads": "G", "kHeadSize": "D", "kWindow": "W", "kPrompt": "S", "kCapacity": "C",
    "kPages": "P", "kBoundRows": "2D", "kSelected": "K",
}  # fmt: skip


@dataclass(frozen=True)
class TensorRow:
    """One line of kInputs or kOutputs."""

    name: str
    element: str
    """kCache, kInt64 or kInt32"""
    shape: tuple[str, ...]
    alias: int | None


@dataclass(frozen=True)
class Table:
    """What one plugin declares."""

    name: str
    fields: tuple[tuple[str, int, int], ...]
    """(attribute, minimum, maximum)"""
    inputs: tuple[TensorRow, ...]
    outputs: tuple[TensorRow, ...]


def read_table(operator: str) -> Table:
    """The table of one operator; AssertionError where its source does not look as expected."""
    source = (SOURCES / FILES[operator]).read_text()
    named = re.findall(r'const Operator \w+\{"(\w+)"', source)
    assert named == [operator], f"{FILES[operator]} defines {named}"
    fields = re.findall(r'\{"(\w+)", (\w+), (\w+)\},', _lines(source, "FieldSpec kFields"))
    inputs, outputs = (_tensors(_lines(source, f"TensorSpec {kind}")) for kind in ("kInputs", "kOutputs"))
    limits = tuple((name, _number(low), _number(high)) for name, low, high in fields)
    return Table(operator, limits, inputs, outputs)


def _number(word: str) -> int:
    if word == "INT32_MAX":
        return 2**31 - 1
    if not word.startswith("k"):
        return int(word)
    found = re.findall(rf"constexpr int32_t {word} = (\d+)(?: << (\d+))?;", (SOURCES / "fields.h").read_text())
    assert len(found) == 1, f"{word}: defined {len(found)} times"
    base, shift = found[0]
    return int(base) << int(shift or 0)


def _lines(source: str, name: str) -> str:
    found = re.findall(rf"constexpr {name}\[\] = {{\n(.*?)\n}};", source, re.DOTALL)
    assert len(found) == 1, f"{name}: found {len(found)} tables"
    return str(found[0])


def _tensors(lines: str) -> tuple[TensorRow, ...]:
    rows = []
    for line in lines.splitlines():
        match = re.fullmatch(r'\s*\{"(\w+)", (\w+), \{([\w, ]+)\}(?:, (\d+))?\},', line)
        assert match, f"not a row of a table: {line}"
        name, element, shape, alias = match.groups()
        dimensions = tuple(DIMENSIONS[word] for word in shape.split(", "))
        rows.append(TensorRow(name, element, dimensions, None if alias is None else int(alias)))
    return tuple(rows)

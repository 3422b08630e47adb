"""DuoAttention's pattern files: one line per layer, one score per KV head, separated by tabs, commas or spaces."""

from __future__ import annotations

from pathlib import Path

from kvc_trt.errors import InputError, describe
from kvc_trt.files.inputs import read_text_input

LARGEST_PATTERN = 1 << 20
"""Bytes; a table of 128 layers of 128 heads has some 300 KiB."""
_EXPECTED = "--set head_pattern=FILE.tsv: one line per layer, one score in 0..1 per KV head"


def read_head_pattern(path: Path) -> tuple[tuple[float, ...], ...]:
    """Read scores by layer and KV head, clipped to 0..1 (published patterns slightly exceed that range)."""
    lines = read_text_input(path, LARGEST_PATTERN, hint=_EXPECTED).splitlines()
    rows = [line.replace(",", " ").split() for line in lines if line.strip()]
    return tuple(tuple(_score(path, number, text) for text in row) for number, row in enumerate(rows, start=1))


def _score(path: Path, line: int, text: str) -> float:
    try:
        score = float(text)
    except ValueError:
        score = float("nan")
    if score != score:
        raise InputError(f"head_pattern: {path}, line {line}: {describe(text)}; expected a number", hint=_EXPECTED)
    return min(max(score, 0.0), 1.0)

"""DuoAttention's pattern files: one line per layer, one score per KV head, separated by tabs, commas or spaces."""

from __future__ import annotations

from pathlib import Path

from kvc_trt.errors import InputError

_LARGEST_BYTES = 1 << 20
_EXPECTED = "--set head_pattern=FILE.tsv: one line per layer, one score in 0..1 per KV head"


def read_head_pattern(path: Path) -> tuple[tuple[float, ...], ...]:
    """Read scores by layer and KV head, clipped to 0..1 (published patterns slightly exceed that range)."""
    try:
        if path.stat().st_size > _LARGEST_BYTES:
            raise InputError(f"head_pattern: {path} has {path.stat().st_size} bytes; expected a table of a few KB")
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or error
        raise InputError(f"head_pattern: {path} cannot be read: {reason}", hint=_EXPECTED) from error
    rows = [line.replace(",", " ").split() for line in lines if line.strip()]
    return tuple(tuple(_score(path, number, text) for text in row) for number, row in enumerate(rows, start=1))


def _score(path: Path, line: int, text: str) -> float:
    try:
        score = float(text)
    except ValueError:
        score = float("nan")
    if score != score:
        raise InputError(f"head_pattern: {path}, line {line}: {text!r}; expected a number", hint=_EXPECTED)
    return min(max(score, 0.0), 1.0)

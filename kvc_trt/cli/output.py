"""What commands print: JSON alone on stdout, aligned tables; progress goes to stderr."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import click

from kvc_trt.progress import Progress, progress_on

Function = TypeVar("Function", bound=Callable[..., Any])


def json_option(function: Function) -> Function:
    """Add `--json` (parameter name `as_json`) to a command."""
    return click.option("--json", "as_json", is_flag=True, help="Print JSON alone on stdout.")(function)


_FLAT_LIST = re.compile(r'\[\n\s*([^\[\]{}"]*?)\n\s*\]')  # no string contains a line break in JSON


def print_json(value: object) -> None:
    """Print one JSON document; NaN and infinities are refused (they are not JSON).

    Lists of numbers stand on one line each: a prompt's token ids would fill a screen otherwise.
    """
    document = json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False)
    click.echo(_FLAT_LIST.sub(lambda found: "[" + re.sub(r"\s+", " ", found[1]) + "]", document))


def table(headers: Sequence[str], rows: Iterable[Sequence[object]], *, right: Sequence[int] = ()) -> str:
    """Return an aligned text table; columns whose index is in `right` are right-aligned."""
    lines = [[str(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(headers, *lines, strict=True)]

    def line(cells: Sequence[str]) -> str:
        aligned = (
            cell.rjust(width) if index in right else cell.ljust(width)
            for index, (cell, width) in enumerate(zip(cells, widths, strict=True))
        )
        return "  ".join(aligned).rstrip()

    return "\n".join([line(headers), line(["-" * width for width in widths]), *map(line, lines)])


def progress() -> Progress:
    """Return the progress display for this terminal: animated on a terminal, plain lines elsewhere."""
    return progress_on()

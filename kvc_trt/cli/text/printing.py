"""How commands print: JSON alone on stdout, ranges of numbers; progress goes to stderr.

Printed text may quote a stranger's. Characters that a terminal obeys are escaped everywhere: in texts as `\\x1b`, in
JSON as `\\u001b`. A model's answer is the product: it goes into a pipe or a file as it is, and only a terminal gets it
with its control characters escaped.
"""

from __future__ import annotations

import json
import re
import sys
import unicodedata
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import click

from kvc_trt.errors import escaped
from kvc_trt.progress import Progress, progress_on
from kvc_trt.tables import text_table

Function = TypeVar("Function", bound=Callable[..., Any])


def json_option(function: Function) -> Function:
    """Add `--json` (parameter name `as_json`) to a command."""
    return click.option("--json", "as_json", is_flag=True, help="Print only JSON on stdout.")(function)


_BEYOND_ASCII = re.compile(r"[^\n -~]")
_FLAT_LIST = re.compile(r'\[\n\s*([^\[\]{}"]*?)\n\s*\]')  # no string contains a line break in JSON


def print_json(value: object) -> None:
    """Print one JSON document; NaN and infinities are refused (they are not JSON).

    A list of numbers takes one line: a prompt's token ids would fill a screen otherwise.
    """
    document = json_text(value, indent=2)
    click.echo(_FLAT_LIST.sub(lambda found: "[" + re.sub(r"\s+", " ", found[1]) + "]", document))


def json_text(value: object, *, indent: int | None = None) -> str:
    """Return a JSON document whose characters can all be seen; ValueError for NaN and infinities."""
    document = json.dumps(value, indent=indent, ensure_ascii=False, allow_nan=False)
    return _BEYOND_ASCII.sub(lambda found: found[0] if found[0].isprintable() else json.dumps(found[0])[1:-1], document)


def show(text: str, *, err: bool = False) -> None:
    """Print lines for people, on stdout or on stderr."""
    click.echo(escaped(text, keep="\n"), err=err)


def answer_text(text: str) -> str:
    """Return a model's text as stdout gets it.

    On a terminal its control characters become visible, but for line breaks and tabs; text that is written from right
    to left, and the marks in it, stay as they are.
    """
    if not sys.stdout.isatty():
        return text
    return "".join(escaped(one, "\n\t") if unicodedata.category(one) in ("Cc", "Cs") else one for one in text)


def section(
    heading: str,
    headers: Sequence[str],
    rows: Iterable[Sequence[object]],
    right: Iterable[int] = (),
    *,
    left: Sequence[int] | None = None,
) -> str:
    """Return a table under its heading; columns of `right` are aligned to the right, or all but those of `left`."""
    if left is not None:
        right = (index for index in range(len(headers)) if index not in left)
    return f"{heading}\n{text_table(headers, rows, right=tuple(right))}"


def number(value: object) -> str:
    """Write a count with its thousands marked, and a switch as a word."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:,}" if isinstance(value, int) else str(value)


def ranges(numbers: Iterable[int]) -> str:
    """Write [0, 1, 2, 5] as `0-2, 5`."""
    spans: list[list[int]] = []
    for one in numbers:
        if spans and one == spans[-1][1] + 1:
            spans[-1][1] = one
        else:
            spans.append([one, one])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in spans)


def progress() -> Progress:
    """Return the progress display for this terminal: animated on a terminal, plain lines elsewhere."""
    return progress_on()

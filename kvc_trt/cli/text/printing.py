"""How commands print: JSON alone on stdout, ranges of numbers; progress goes to stderr."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
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

    A list of numbers takes one line: a prompt's token ids would fill a screen otherwise.
    """
    document = json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False)
    click.echo(_FLAT_LIST.sub(lambda found: "[" + re.sub(r"\s+", " ", found[1]) + "]", document))


def ranges(numbers: Iterable[int]) -> str:
    """Write [0, 1, 2, 5] as `0-2, 5`."""
    spans: list[list[int]] = []
    for number in numbers:
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in spans)


def progress() -> Progress:
    """Return the progress display for this terminal: animated on a terminal, plain lines elsewhere."""
    return progress_on()

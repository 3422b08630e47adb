"""Tables in plain text, for a terminal, a pipe or a log: no colours, and no cell is ever cut short.

A cell may hold a stranger's text; characters that a terminal obeys are escaped in it.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Collection, Iterable, Sequence
from io import StringIO

from kvc_trt.errors import escaped

WIDEST = 10_000
"""Columns that a table may take where no terminal bounds it."""
_RULED = "    \n    \n -- \n    \n    \n    \n    \n    \n"
"""Rich's notation of a box that is a line of dashes below the headers."""


def text_table(
    headers: Sequence[str],
    rows: Iterable[Sequence[object]],
    *,
    right: Collection[int] = (),
    widest: int = WIDEST,
    even: bool = False,
) -> str:
    """Return an aligned table; columns whose index is in `right` are right-aligned. `even` makes all equally wide.

    Cells wrap where the table is wider than the terminal, or than `widest`; a table that goes to a pipe keeps one line
    per row.
    """
    shown = [[escaped(str(cell)) for cell in row] for row in (headers, *rows)]
    columns = min(widest, terminal_columns())
    plain = None if even else _aligned(shown, right, columns)
    return _wrapped(shown, right, columns, even=even) if plain is None else plain


def _aligned(cells: Sequence[Sequence[str]], right: Collection[int], columns: int) -> str | None:
    """Return the table of a header and rows that need no wrapping; None for others, and for unusual characters.

    Rich draws the same, but `plan` would wait for its import and its layout.
    """
    if len({len(row) for row in cells}) > 1:
        return None
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    width = sum(widths) + 2 * (len(widths) - 1)
    ordinary = all(cell.isascii() and "\n" not in cell and cell == cell.strip() for row in cells for cell in row)
    if width > columns or 0 in widths or not ordinary:
        return None
    lines = [
        "  ".join(
            cell.rjust(widths[index]) if index in right else cell.ljust(widths[index]) for index, cell in enumerate(row)
        ).rstrip()
        for row in cells
    ]
    return "\n".join([lines[0], "-" * width, *lines[1:]])


def _wrapped(cells: Sequence[Sequence[str]], right: Collection[int], columns: int, *, even: bool) -> str:
    from rich.box import Box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(
        box=Box(_RULED, ascii=True), show_edge=False, pad_edge=False, padding=(0, 1, 0, 0), header_style="", expand=even
    )
    for index, header in enumerate(cells[0]):
        table.add_column(
            Text(header),
            justify="right" if index in right else "left",
            overflow="fold",
            ratio=int(even) or None,
        )
    for row in cells[1:]:
        table.add_row(*map(Text, row))
    buffer = StringIO()
    Console(file=buffer, width=columns, color_system=None).print(table)
    return "\n".join(line.rstrip() for line in buffer.getvalue().splitlines())


def terminal_columns() -> int:
    """Columns of the terminal that stdout is; `WIDEST` where it is none."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else WIDEST

"""Paths that commands write to."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import click

from kvc_trt.errors import InputError


class OutputPath(click.Path):
    """A file or directory to write, outside every engine. With `engine`, it may replace an engine as a whole."""

    def __init__(self, *, engine: bool = False, **options: Any) -> None:
        super().__init__(path_type=Path, **options)
        self._engine = engine

    def convert(self, value: Any, parameter: click.Parameter | None, context: click.Context | None) -> Path:
        """The path; InputError for one inside an engine."""
        path = Path(os.fsdecode(super().convert(value, parameter, context)))
        refuse_inside_engine(path, itself=not self._engine)
        return path


def refuse_inside_engine(path: Path, *, itself: bool = True) -> None:
    """Raise InputError for a path inside an engine, or for that of an engine: with another file in it, it is refused.

    Without `itself`, the path may be that of an engine.
    """
    from kvc_trt.engine.manifest import MANIFEST_FILE

    whole = path.resolve()
    for place in (whole, *whole.parents) if itself else whole.parents:
        if (place / MANIFEST_FILE).is_file() and (place / "config.json").is_file():
            raise InputError(
                f"{path} is in the engine {place}, which another file would make invalid",
                hint="choose another path for the output",
            )

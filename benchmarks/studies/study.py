"""One study: how it is measured, and how its page is written from its records."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.page import DOCS, IMAGES
from benchmarks.studies.records import Record, Records, recorded
from kvc_trt.files.atomic import write_whole
from kvc_trt.progress import progress_on

FOLDER = "studies"
"""The folder of the pages within docs/results, and of the plots within docs/images."""
MODEL = "smollm2-135m-instruct"


@dataclass(frozen=True)
class Run:
    """Options of one run."""

    model: str = MODEL
    checkpoint: str | None = None
    until: float | None = None
    """The time (of `time.monotonic`) from which on nothing new begins."""
    count: int | None = None
    """Documents or prompts of each kind; None is the study's own number."""
    long: bool = False
    """True for lengths like the paper's, for a machine with time."""

    @property
    def over(self) -> bool:
        """True if nothing new may begin."""
        return self.until is not None and time.monotonic() >= self.until


@dataclass(frozen=True)
class Written:
    """A page, and its plots by their paths."""

    text: str
    images: Mapping[Path, bytes]


@dataclass(frozen=True)
class Study:
    """A study under its name, which its records and its page have too."""

    name: str
    measure: Callable[[Run, Records], None]
    """Adds the missing records."""
    page: Callable[[Sequence[Record]], Written]
    """Writes the page of some records; equal records give an equal page."""

    @property
    def path(self) -> Path:
        """The path of the page."""
        return DOCS / FOLDER / f"{self.name.replace('_', '-')}.md"


def write_page(study: Study) -> str:
    """Write the page of the records in the tree, and its plots."""
    written = study.page(recorded(study.name))
    for path, content in written.images.items():
        write_whole(path, content)
    write_whole(study.path, written.text.encode())
    return str(study.path)


def measure_lacking(
    run: Run, kept: Records, keys: Iterable[Mapping[str, Any]], of_key: Callable[[Mapping[str, Any]], Mapping[str, Any]]
) -> None:
    """Measure the keys that the records lack, in their order, until nothing new may begin."""
    wanted = list(keys)
    with progress_on().task("measurements", len(wanted)) as advance:
        for key in wanted:
            if run.over:
                return
            if kept.lacks(key):
                kept.add(key, of_key(key))
            advance(1)


def image(study: str, name: str) -> Path:
    """Return the path of a plot of a study."""
    return IMAGES / FOLDER / f"{study.replace('_', '-')}-{name}.png"

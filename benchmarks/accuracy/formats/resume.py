"""Puts the committed answers of caches in formats back into build/accuracy, so that asking goes on from them.

    python -m benchmarks.accuracy.formats.resume

For a machine that did not measure them. Answers that are there stay as they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks import store
from benchmarks.accuracy.formats.answers import FOLDER, NAME, OneDraw, settings_of
from benchmarks.accuracy.smollm2.resume import restore_ours
from benchmarks.accuracy.smollm2.stages import LONGEST_ANSWERS

DESCRIBED = ("model", "checkpoint", "weights", "backend")


def main() -> None:
    """Write the cells where there are none."""
    print(restored(store.recorded(NAME, "make bench-accuracy-formats"), FOLDER))


def restored(result: Mapping[str, Any], directory: Path) -> Path:
    """Write the cells of a committed result under the settings by which `answers` goes on; return their file."""
    known = result["settings"]
    draw = OneDraw(known["samples"], known["seed"], LONGEST_ANSWERS)
    return restore_ours(result, directory, settings_of({name: known[name] for name in DESCRIBED}, draw))


if __name__ == "__main__":
    main()

"""Time that a grid of questions takes over all of its runs, and the commits that it was measured at."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks import machine, store
from kvc_trt.accuracy.run import RESULTS_FILE
from kvc_trt.files.atomic import write_whole

SPENT = "spent.json"


class Spent:
    """Measures a run from `with` to its end, also where it fails; `total` is then the time of all runs together."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.total: dict[str, Any] = {}

    def __enter__(self) -> Spent:
        self._cells, self._seconds, self._processor = self._known(), time.monotonic(), time.process_time()
        return self

    def __exit__(self, *_: object) -> None:
        """Add this run's time to those that it went on from, and its commit if it measured any cell."""
        seconds, processor = time.monotonic() - self._seconds, time.process_time() - self._processor
        self.total = total_spent(self.directory, seconds, processor, machine.commit() if self._new() else None)

    def _new(self) -> int:
        return self._known() - self._cells

    def _known(self) -> int:
        """Lines of the cells' file: the measurements so far, and their head."""
        path = self.directory / RESULTS_FILE
        return len(path.read_text(encoding="utf-8").splitlines()) if path.is_file() else 0


def total_spent(directory: Path, seconds: float, processor: float, commit: str | None) -> dict[str, Any]:
    """Time of this run and of those that it went on from, and the commits at which they measured cells, in their order:
    `commit` is this run's, if it measured any."""
    path = directory / SPENT
    before: dict[str, Any] = store.read(path) if path.is_file() else {"seconds": 0, "processor_seconds": 0}
    spent = {
        "seconds": before["seconds"] + round(seconds),
        "processor_seconds": before["processor_seconds"] + round(processor),
        "commits": list(dict.fromkeys([*before.get("commits", []), *([commit] if commit else [])])),
    }
    write_whole(path, json.dumps(spent).encode())
    return spent


def record_of(spent: Mapping[str, Any]) -> dict[str, Any]:
    """Return the machine, and the commits of all cells: one changed tree among them makes all uncommitted."""
    commits = spent["commits"]
    changed = [commit for commit in commits if commit.endswith("-dirty")]
    return {**machine.record(), "commit": ", ".join([*(one for one in commits if one not in changed), *changed])}

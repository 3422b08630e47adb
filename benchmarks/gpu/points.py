"""Results that are written point by point: one that fails, hangs or takes the GPU with it is an entry, not the end.

    results = Results("kernels", {"device": ...}, gpu, resume=options.resume)
    results.measure("results", ((identity, lambda: figures) for ...))
    return results.status

An entry is written before its point begins, as one that did not end, so that a crash leaves the truth behind. Where a
process cannot go on (the device is lost, or a point does not return) it exits with GO_ON: the same command with
`--resume` keeps the points of the file and goes on with the next one. benchmarks/gpu_day.sh calls it so, also after a
crash.
"""

from __future__ import annotations

import argparse
import os
import sys
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from benchmarks import machine, store
from benchmarks.gpu.device import Gpu

GO_ON = 75
"""Exit status: not all points were measured, and this process cannot measure the others."""
FAILED = 1
"""Exit status: some point failed."""
OTHER_RESULTS = 2
"""Exit status: the file to go on with is another sweep's."""
POINT_SECONDS = 120.0
Identity = dict[str, Any]
Said = Callable[[Mapping[str, Any]], str]
Point = tuple[Identity, Callable[[], Mapping[str, Any]]]
"""The identity of an entry, and a function that measures its figures or returns the reason for having none."""


class Results:
    """A result file that grows."""

    def __init__(self, name: str, head: Mapping[str, Any], gpu: Gpu, *, resume: bool, seconds: float) -> None:
        record = machine.record()
        self._gpu, self._seconds = gpu, seconds
        self.path = store.emulated_path(name) if gpu.emulated else store.result_path(name, record)
        self.document: dict[str, Any] = {"machine": record, **head}
        if resume and self.path.is_file():
            self.document = store.read(self.path)

    @property
    def status(self) -> int:
        """Exit status: 0, or FAILED where an entry of any part failed."""
        parts = (part for part in self.document.values() if isinstance(part, list))
        return FAILED if any("failed" in entry for part in parts for entry in part) else 0

    def entries(self, part: str) -> list[dict[str, Any]]:
        """Return the entries of a part, as they grow."""
        entries: list[dict[str, Any]] = self.document.setdefault(part, [])
        return entries

    def measure(self, part: str, points: Iterable[Point], said: Said = lambda entry: "done") -> None:
        """Measure every point that the file does not have yet, and print a line of each: `said` words its figures.

        Raises SystemExit with GO_ON or OTHER_RESULTS.
        """
        entries = self.entries(part)
        there = len(entries)
        for number, (identity, figures) in enumerate(points):
            if number < there:
                if not identity.items() <= entries[number].items():
                    print(f"error: {self.path}: entry {number} of {part} is not {label(identity)}", file=sys.stderr)
                    raise SystemExit(OTHER_RESULTS)
                continue
            entries.append({**identity, "failed": "the process ended within this point"})
            self._write()
            entries[-1] = {**identity, **self._watched(entries, figures)}
            self._write()
            print(f"{label(identity)}: {_without_figures(entries[-1]) or said(entries[-1])}", flush=True)
            if not self._gpu.usable():
                print("the GPU cannot be used by this process any more", file=sys.stderr)
                raise SystemExit(GO_ON)
            self._gpu.release()

    def _watched(self, entries: list[dict[str, Any]], figures: Callable[[], Mapping[str, Any]]) -> Mapping[str, Any]:
        """Return the figures, or how the point failed; a point that does not return ends the process."""
        alarm = threading.Timer(self._seconds, self._give_up, [entries])
        alarm.daemon = True
        alarm.start()
        try:
            return figures()
        except Exception as error:
            return {"failed": first_line(error)}
        finally:
            alarm.cancel()

    def _give_up(self, entries: list[dict[str, Any]]) -> None:
        entries[-1]["failed"] = f"it did not return within {self._seconds:.0f} s"
        self._write()
        print(f"{entries[-1]}", file=sys.stderr, flush=True)
        os._exit(GO_ON)

    def _write(self) -> None:
        store.write(self.path, self.document)


def label(identity: Mapping[str, Any]) -> str:
    """Return a point in a line of text."""
    return " ".join(f"{value}" if key == "name" else f"{key} {value}" for key, value in identity.items())


def _without_figures(entry: Mapping[str, Any]) -> str | None:
    """Return the reason why an entry has no figures; None if it has them."""
    return next((f"{key.replace('_', ' ')}: {entry[key]}" for key in ("failed", "not_measured") if key in entry), None)


def first_line(error: Exception) -> str:
    """Return an error in one line."""
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"


def add_arguments(parser: argparse.ArgumentParser, seconds: float = POINT_SECONDS) -> None:
    """Add the arguments of a sweep that is written point by point."""
    parser.add_argument("--resume", action="store_true", help="go on behind the last entry of the result's file")
    parser.add_argument("--point-seconds", type=float, default=seconds, help="what takes longer has failed")

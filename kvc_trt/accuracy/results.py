"""The results file: a line that says what is measured, then one line per cell, written as cells are finished.

Cells that are being asked stand in a second file beside it, `results.partial.jsonl`, answer by answer: in one file, a
cell of a hundred slow questions would have a hundred lines, each with all answers before.

A measurement that was interrupted goes on where it stopped: cells that are in the file are not asked again. A last
line that was cut short is dropped, and its cell asked again; anything else that is wrong is an error, and the file
stays as it is.
"""

from __future__ import annotations

import fcntl
import json
import os
import threading
from collections.abc import Mapping
from dataclasses import asdict
from io import BufferedRandom
from pathlib import Path
from typing import Any

from kvc_trt.accuracy.cell import Cell, CellKey
from kvc_trt.errors import InputError, UnsupportedEnvironment, describe
from kvc_trt.files.atomic import disk_error
from kvc_trt.files.inputs import open_appended

FORMAT = "kvc-trt accuracy 1"
LARGEST_RESULTS = 1 << 30
"""Bytes. A line has some 40 for each question that its cell asked, and a cell of long prompts has a line a question:
1 MB for 200 of them."""
_ANOTHER = "--output-dir another directory"


class Results:
    """Use as `with Results(path, settings) as results`; one process at a time."""

    def __init__(self, path: Path, settings: Mapping[str, Any]) -> None:
        self.path = path
        self.cells: dict[CellKey, Cell] = {}
        self.dropped = False
        """True if the file's last line was cut short and dropped."""
        self._settings = {"format": FORMAT, **settings}
        self._file: BufferedRandom | None = None
        self._partial: BufferedRandom | None = None
        self._kept = False
        """True if the second file holds cells."""
        self._writing = threading.Lock()

    def __enter__(self) -> Results:
        """Open the file, or make it. InputError for another file, or results under other settings."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            message = f"cannot write the results file {self.path}: {error.strerror}"
            raise InputError(message, hint=_ANOTHER) from error
        self._file = open_appended(self.path, LARGEST_RESULTS, hint=_ANOTHER)
        try:
            self._lock()
            self._read()
            self._partial = open_appended(self.path.with_suffix(".partial.jsonl"), LARGEST_RESULTS, hint=_ANOTHER)
            self._read_partial(self._partial)
        except BaseException:
            self._file.close()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        """Close the files, the second of which stays only while it holds cells; everything is on the disk already."""
        assert self._file is not None
        assert self._partial is not None
        with self._writing:
            self._file.close()
            self._partial.close()
            if not self._kept:
                self.path.with_suffix(".partial.jsonl").unlink(missing_ok=True)

    def append(self, cell: Cell) -> None:
        """Write one cell, whole and to the disk. UnsupportedEnvironment where the disk is full. Any thread may."""
        with self._writing:
            self._write(cell.to_json())
            self.cells[cell.key] = cell

    def keep(self, cell: Cell) -> None:
        """Write one cell that will have more answers soon, to the disk as well; otherwise like `append`.

        Figures that follow from its answers are left out: of every answer anew, intervals would take longer than it.
        """
        assert self._partial is not None
        with self._writing:
            self._kept = True
            self._write_to(self._partial, {**asdict(cell), "samples": cell.samples})
            self.cells[cell.key] = cell

    def settle(self) -> None:
        """Empty the partial file: each of its cells has been appended to the results since."""
        assert self._partial is not None
        with self._writing:
            self._kept = False
            self._partial.truncate(0)
            self._write_to(self._partial, self._settings)

    def _read_partial(self, file: BufferedRandom) -> None:
        """Take the cells that have more answers there. Lines of other settings, and lines cut short, are ignored."""
        file.seek(0)
        lines = file.read().split(b"\n")[:-1]
        try:
            if not lines or json.loads(lines[0]) != json.loads(json.dumps(self._settings)):
                lines = []
            for line in lines[1:]:
                cell = Cell.from_json(json.loads(line))
                if (known := self.cells.get(cell.key)) is None or known.samples < cell.samples:
                    self.cells[cell.key] = cell
        except (ValueError, RecursionError, InputError):
            lines = []
        self._kept = bool(lines[1:])
        if not lines:
            self.settle()

    def _lock(self) -> None:
        assert self._file is not None
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            message = f"another process is writing {self.path}"
            raise UnsupportedEnvironment(message, hint="wait for it, or give another --output-dir") from error

    def _read(self) -> None:
        assert self._file is not None
        self._file.seek(0)
        whole, newline, rest = self._file.read().rpartition(b"\n")
        lines = whole.split(b"\n") if newline else []
        if rest and (lines or self._begins_header(rest)):
            self._file.truncate(len(whole) + len(newline))
            self.dropped = True
        elif rest:
            raise self._not_ours()
        if not lines:
            self._write(self._settings)
            return
        header = self._header(lines[0])
        if len(lines) == 1:  # of a run that was refused before it asked anything
            self._file.truncate(0)
            self._write(self._settings)
            return
        self._check_settings(header)
        for number, line in enumerate(lines[1:], 2):
            try:
                cell = Cell.from_json(json.loads(line))
            except (ValueError, RecursionError, InputError) as error:
                raise InputError(
                    f"{self.path}, line {number}: expected a cell of results ({error})",
                    hint="give another --output-dir, or remove that line: its cell is then asked again",
                ) from error
            self.cells[cell.key] = cell

    def _begins_header(self, rest: bytes) -> bool:
        """True if a file of one line without an end is our first line, cut short."""
        return json.dumps(self._settings).encode().startswith(rest)

    def _header(self, line: bytes) -> dict[str, Any]:
        """The settings that a first line says. InputError for a file of something else."""
        try:
            found = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise self._not_ours() from error
        if not isinstance(found, dict) or found.get("format") != FORMAT:
            raise self._not_ours()
        return found

    def _check_settings(self, found: Mapping[str, Any]) -> None:
        expected = json.loads(json.dumps(self._settings))
        for name in sorted(expected.keys() | found.keys()):
            if found.get(name) != expected.get(name):
                there, here = describe(found.get(name)), describe(expected.get(name))
                raise InputError(
                    f"{self.path} holds results of other settings: {name[:60]} is {there} there, {here} here",
                    hint="give another --output-dir",
                )

    def _not_ours(self) -> InputError:
        return InputError(f"{self.path} is not a file of accuracy results", hint="give another --output-dir")

    def _write(self, value: Mapping[str, Any]) -> None:
        assert self._file is not None
        self._write_to(self._file, value)

    def _write_to(self, file: BufferedRandom, value: Mapping[str, Any]) -> None:
        line = json.dumps(value, allow_nan=False).encode() + b"\n"
        end = file.seek(0, os.SEEK_END)
        try:
            file.write(line)
            file.flush()
            os.fsync(file.fileno())
        except OSError as error:
            raise disk_error(error, f"appending to {self.path}; {end} bytes of results are kept") from error

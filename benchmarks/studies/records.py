"""Measurements of studies: one JSON object per line, each with its machine and commit.

A line is {"key", "measured", "machine"}. The key names everything that decides the measurement, so a run that was
stopped goes on with the missing keys, on any commit; the page names all commits.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import machine, store
from benchmarks.page import measured_by
from kvc_trt.files.atomic import write_whole

FOLDER = "studies"
DIGITS = 4
"""Decimal places of every number that is kept."""
Record = dict[str, Any]


class Records:
    """The measurements of one study, in a file that is written whole after each."""

    def __init__(self, path: Path, record: Mapping[str, Any]) -> None:
        """Read the file if it exists. `record` is this machine's."""
        self.path, self._machine = path, dict(record)
        self.all = read(path) if path.exists() else []
        self._known = {_digest(one["key"]) for one in self.all}

    @classmethod
    def of(cls, study: str) -> Records:
        """Return the records that a run on this machine adds to: of changed code, those that git ignores."""
        record = machine.record()
        kept = store.result_path(f"{FOLDER}/{study}", record).with_suffix(".jsonl")
        return cls(kept, record)

    def lacks(self, key: Mapping[str, Any]) -> bool:
        """True if this has not been measured."""
        return _digest(key) not in self._known

    def add(self, key: Mapping[str, Any], measured: Mapping[str, Any]) -> None:
        """Write one measurement; the file is there whole or as it was."""
        one = {"key": dict(key), "measured": rounded(measured), "machine": self._machine}
        self.all.append(one)
        self._known.add(_digest(key))
        lines = "".join(json.dumps(each, allow_nan=False) + "\n" for each in self.all)
        write_whole(self.path, lines.encode())


def read(path: Path) -> list[Record]:
    """Return all records of a file."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def recorded(study: str) -> list[Record]:
    """Return the records in the tree, of the model that was measured last. SystemExit where there are none."""
    path = (store.RESULTS / FOLDER / study).with_suffix(".jsonl")
    if not path.exists():
        raise SystemExit(f"error: no {path}; python -m benchmarks.studies {study} measures")
    found = read(path)
    last = found[-1]["key"]
    return of_kind(found, model=last["model"], checkpoint=last["checkpoint"])


def of_kind(records: Iterable[Record], **wanted: Any) -> list[Record]:
    """Return the records whose keys have these values."""
    return [one for one in records if all(one["key"].get(name) == value for name, value in wanted.items())]


def measured_on(records: Sequence[Record], study: str, command: str | None = None) -> str:
    """Return the command, that of the study by default, all commits and all machines of some records, as a sentence."""
    last = records[-1]["machine"]
    commits = ", ".join(dict.fromkeys(one["machine"]["commit"] for one in records))
    devices = ", ".join(dict.fromkeys(one["machine"]["device"] for one in records))
    command = command or f"python -m benchmarks.studies {study}"
    return measured_by(command, {**last, "commit": commits, "device": devices}, f"torch {last['versions']['torch']}")


def rounded(value: Any) -> Any:
    """Return every number with DIGITS behind the point; NaN is None."""
    if isinstance(value, Mapping):
        return {name: rounded(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(one) for one in value]
    if isinstance(value, float):
        return None if value != value else round(value, DIGITS)
    return value


def _digest(key: Mapping[str, Any]) -> str:
    return json.dumps(key, sort_keys=True)

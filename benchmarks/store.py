"""Result files of benchmarks: reading, writing with one record per line, and going on where a run stopped.

A result is a JSON object. `text` lays it out so that each record (a point, a cell, a run) stands on a line of its own:
a diff then shows which records changed, and any JSON reader can read the file.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any, TypeVar

from benchmarks import machine
from kvc_trt.files.atomic import write_whole

RESULTS = machine.ROOT / "benchmarks" / "results"
UNCOMMITTED = RESULTS / "uncommitted"
"""The folder for results of changed code; git ignores it."""
EMULATED = machine.ROOT / "build" / "emulated"
"""The folder for results of emulated kernels: they are no measurements, and lie apart from them."""
SAME_RUN = ("commit", "device", "usable_cores")
"""Fields of a machine's record that must equal a result's for a run to go on from it."""
Opened = TypeVar("Opened", bound="Growing")


def text(document: Mapping[str, Any]) -> str:
    """Return the document as JSON with one record per line; NaN and infinities are refused (they are not JSON)."""
    return _opened(document, "") + "\n"


def _laid_out(value: Any, indent: str) -> str:
    """Return a value behind its key: in one line, unless it is a table of records or holds one."""
    if isinstance(value, list) and _are_records(value):
        return _lines("[", [f"{indent}  {_line(one)}" for one in value], f"{indent}]")
    if isinstance(value, dict) and _are_records(list(value.values())):
        return _lines("{", [f"{indent}  {_line(key)}: {_line(one)}" for key, one in value.items()], f"{indent}}}")
    if isinstance(value, dict) and _holds_records(value):
        return _opened(value, indent)
    return _line(value)


def _opened(document: Mapping[str, Any], indent: str) -> str:
    """Return each value of an object behind its key, on lines of its own."""
    if not document:
        return "{}"
    inner = f"{indent}  "
    parts = [f"{inner}{_line(key)}: {_laid_out(one, inner)}" for key, one in document.items()]
    return _lines("{", parts, f"{indent}}}")


def _lines(opening: str, lines: list[str], closing: str) -> str:
    return "\n".join([opening, ",\n".join(lines), closing])


def _are_records(values: list[Any]) -> bool:
    return bool(values) and all(isinstance(one, dict) for one in values)


def _holds_records(value: Any) -> bool:
    """Return True if a list of records is anywhere in a value."""
    if isinstance(value, list):
        return _are_records(value)
    return isinstance(value, dict) and any(_holds_records(one) for one in value.values())


def _line(value: Any) -> str:
    return json.dumps(value, allow_nan=False)


def write(path: Path, document: Mapping[str, Any]) -> Path:
    """Write a result, whole or not at all."""
    write_whole(path, text(document).encode())
    return path


def read(path: Path) -> dict[str, Any]:
    """Return a result as it was written."""
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def recorded_path(name: str) -> Path:
    """Return the path of NAME's result in the tree."""
    return RESULTS / f"{name}.json"


def recorded(name: str, command: str) -> dict[str, Any]:
    """Return the result in the tree, of any commit and machine; where there is none, `command` measures it."""
    path = recorded_path(name)
    if not path.exists():
        raise SystemExit(f"error: no {path}; {command} measures")
    return read(path)


def cells_of(path: Path) -> list[dict[str, Any]]:
    """Return the cells of a result; none where there is no such file."""
    return list(read(path)["cells"]) if path.exists() else []


def result_path(name: str, record: Mapping[str, Any]) -> Path:
    """Return the path for NAME.json of this machine's record.

    Figures of code that no commit holds cannot be repeated: from a changed tree they go to `uncommitted/`, and that is
    said.
    """
    if not str(record["commit"]).endswith("-dirty"):
        return recorded_path(name)
    path = UNCOMMITTED / f"{name}.json"
    print(f"tracked files differ from commit {record['commit']}: result in {path}", file=sys.stderr)
    return path


def emulated_path(name: str) -> Path:
    """Return the path for NAME's result of emulated kernels; its name says so too, wherever it is copied to."""
    return EMULATED / f"{name}-emulated.json"


def write_result(name: str, result: Mapping[str, Any]) -> Path:
    """Write NAME.json = {machine, **result} where it belongs; a machine that the result has stays."""
    document = {"machine": machine.record(), **result} if "machine" not in result else result
    return write(result_path(name, document["machine"]), document)


class Growing:
    """A result that is written after every measurement, so that a run can go on later."""

    def __init__(self, path: Path, data: dict[str, Any]) -> None:
        self.path, self.data = path, data

    @classmethod
    def open(
        cls: type[Opened], name: str, empty: Mapping[str, Any], *, fresh: bool, path: Path | None = None
    ) -> Opened:
        """Go on with the result of this commit and machine; start with `empty` where there is none, or where asked."""
        record = machine.record()
        path = path or result_path(name, record)
        if not fresh and path.exists():
            data = read(path)
            if all(data["machine"][field] == record[field] for field in SAME_RUN):
                return cls(path, data)
        return cls(path, {"machine": record, **deepcopy(dict(empty))})

    def write(self) -> None:
        write(self.path, self.data)

"""The result file: written after every point, so that a run can go on later."""

from __future__ import annotations

import json
import platform
import subprocess
from pathlib import Path
from typing import Any

from benchmarks import machine
from benchmarks.serving.place import Place
from kvc_trt.atomic_files import write_json

NAME = "serving"


class Store:
    """Figures by point, and what they have in common."""

    def __init__(self, path: Path, data: dict[str, Any]) -> None:
        self.path, self.data = path, data

    @classmethod
    def open(cls, *, fresh: bool, quick: bool) -> Store:
        """Go on with the results of this commit and machine; start anew where there are none, or where asked.

        Those of a quick run are nobody's results, and lie with those of changed code.
        """
        record = machine.record()
        path = machine.UNCOMMITTED / f"{NAME}-quick.json" if quick else machine.result_path(NAME, record)
        if not fresh and path.exists():
            data = json.loads(path.read_text(encoding="utf-8"))
            if all(data["machine"][field] == record[field] for field in ("commit", "device", "usable_cores")):
                return cls(path, data)
        return cls(path, {"machine": record, "command": "", "versions": {}, "points": {}})

    @staticmethod
    def recorded() -> dict[str, Any]:
        """Return the results that are in the tree, of whatever commit and machine."""
        path = machine.RESULTS / f"{NAME}.json"
        if not path.exists():
            raise SystemExit(f"error: no {path}; make bench-serving measures")
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return found

    def add(self, name: str, figures: dict[str, Any]) -> None:
        """Keep the figures of one point and write the file."""
        self.data["points"][name] = figures
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_json(self.path, self.data)


def versions(place: Place) -> dict[str, str]:
    """Return the versions of the servers and the tools, as their environments have them."""
    wanted = {
        place.triton: ("nvidia-pytriton", "tritonclient"),
        place.dynamo: ("ai-dynamo", "nixl-cu12"),
        place.aiperf: ("aiperf",),
    }
    found = {"python": platform.python_version()}
    for environment, packages in wanted.items():
        asked = f"from importlib.metadata import version\nfor name in {packages!r}: print(name, version(name))"
        said = subprocess.check_output([environment / "bin" / "python", "-c", asked], text=True)
        found |= dict(line.split() for line in said.splitlines())
    return found

"""The result file: what was measured so far, written after every measurement so that a run can go on later."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks import machine
from benchmarks.machine import RESULTS
from benchmarks.peers.artefacts import disk_bytes
from benchmarks.peers.points import Measurement
from kvc_trt.atomic_files import write_json

NAME = "peers"


class Store:
    """Runs by measurement, and what they have in common."""

    def __init__(self, path: Path, data: dict[str, Any]) -> None:
        self.path = path
        self.data = data

    @classmethod
    def open(cls, *, fresh: bool) -> Store:
        """Go on with the results of this commit and machine; start anew where there are none, or where asked."""
        record = machine.record()
        path = machine.result_path(NAME, record)
        if not fresh and path.exists():
            data = json.loads(path.read_text(encoding="utf-8"))
            if all(data["machine"][field] == record[field] for field in ("commit", "device", "usable_cores")):
                return cls(path, data)
        return cls(path, {"machine": record, "threads": 2, "bandwidth": {}, "versions": {}, "measurements": {}})

    @staticmethod
    def recorded() -> dict[str, Any]:
        """Return the results that are in the tree, of whatever commit and machine."""
        path = RESULTS / f"{NAME}.json"
        if not path.exists():
            raise SystemExit(f"error: no {path}; make bench-peers measures")
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return found

    def runs(self, measurement: Measurement) -> list[dict[str, Any]]:
        """Return the runs of one measurement, in the order of the rounds."""
        entry = self.data["measurements"].get(measurement.key)
        return [] if entry is None else entry["runs"]

    def add(self, measurement: Measurement, artefact: Path, run: dict[str, Any], floor_ms: float) -> None:
        """Keep one run and write the file."""
        self.data["versions"].update(run.pop("versions"))
        point, contender = measurement.point, measurement.contender
        entry = self.data["measurements"].setdefault(
            measurement.key,
            {
                "shape": point.shape.name, "weights": point.weights, "context": point.context, "batch": point.batch,
                "contender": contender.name, "runner": contender.runner, "full_precision": contender.full_precision,
                "reads": contender.reads,
                "cache_bytes_per_number": contender.cache_bytes, "disk_bytes": disk_bytes(artefact),
                "floor_ms": floor_ms, "runs": [],
            },
        )  # fmt: skip
        entry["runs"].append(run)
        self.write()

    def fail(self, measurement: Measurement, reason: str) -> None:
        """Note why a contender could not be measured."""
        self.data.setdefault("failed", {})[measurement.key] = reason
        self.write()

    def write(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_json(self.path, self.data)

"""The runs of every measurement, written after each so that the benchmark can go on later."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.peers.artefacts import disk_bytes
from benchmarks.peers.points import Measurement
from benchmarks.store import Growing

NAME = "peers"
"""The record of the comparison of engines."""
FORMATS_NAMES = {"AVX-512": "peers-formats-avx512", "AVX2": "peers-formats-avx2"}
"""The records of the comparison of caches of 8 bits, by the widest vectors of the processor."""
EMPTY: dict[str, Any] = {"threads": 2, "bandwidth": {}, "versions": {}, "measurements": {}}


def formats_name(machine: Mapping[str, Any]) -> str:
    """Return the name of the record of caches of 8 bits for a machine's own record."""
    return FORMATS_NAMES["AVX-512" if "avx512f" in machine["vector_extensions"] else "AVX2"]


class Runs(Growing):
    """Runs by measurement, and the fields that they share."""

    def of(self, measurement: Measurement) -> list[dict[str, Any]]:
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
                "reads": contender.reads, "cache": contender.cache,
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

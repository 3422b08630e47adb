"""What every benchmark result carries: the machine, the versions, the commit; and how a result is written."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

from kvc_trt.atomic_files import write_json
from kvc_trt.machine import machine_record

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"


def commit() -> str | None:
    """The commit the code was run from, with `-dirty` where tracked files differ from it; None outside a checkout."""
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def record() -> dict[str, Any]:
    return {**machine_record(), "commit": commit()}


def write_result(name: str, result: dict[str, Any]) -> Path:
    """Writes `benchmarks/results/NAME.json` = {machine, **result}; whole or not at all."""
    target = RESULTS / f"{name}.json"
    write_json(target, {"machine": record(), **result})
    return target

"""What every benchmark result carries: the machine, the versions, the commit; and how a result is written."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

from kvc_trt.atomic_files import write_json
from kvc_trt.machine import machine_record

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
UNCOMMITTED = RESULTS / "uncommitted"
"""Where results of changed code go: git ignores it."""
EMULATED = ROOT / "build" / "emulated"
"""Where results of emulated kernels go: they are no measurements, and lie apart from them."""
COMMIT = ROOT / "COMMIT"
"""Holds the commit where the code was copied from a checkout without its history: in the bundle of a GPU's day."""
WRITTEN = ("benchmarks/results", "docs/results", "docs/images")
"""What benchmarks themselves write: a change there does not change the code."""


def commit() -> str | None:
    """The commit the code was run from, with `-dirty` where tracked files differ from it; None where nothing tells."""
    if COMMIT.is_file():
        return COMMIT.read_text(encoding="ascii").strip()
    found = git("rev-parse", "--short=12", "HEAD")
    if found is None:
        return None
    others = [f":!{path}" for path in WRITTEN]
    changed = git("status", "--porcelain", "--untracked-files=no", "--", ".", *others)
    return f"{found}-dirty" if changed else found


def record() -> dict[str, Any]:
    return {**machine_record(), "commit": commit()}


def result_path(name: str, machine: dict[str, Any]) -> Path:
    """Where NAME.json of this `record()` belongs.

    Figures of code that no commit holds cannot be repeated: from a changed tree they go to `uncommitted/`, and that is
    said.
    """
    if not str(machine["commit"]).endswith("-dirty"):
        return RESULTS / f"{name}.json"
    UNCOMMITTED.mkdir(parents=True, exist_ok=True)
    path = UNCOMMITTED / f"{name}.json"
    print(f"tracked files differ from commit {machine['commit']}: result in {path}", file=sys.stderr)
    return path


def emulated_path(name: str) -> Path:
    """Where NAME's result of emulated kernels belongs; its name says it too, wherever it is copied to."""
    EMULATED.mkdir(parents=True, exist_ok=True)
    return EMULATED / f"{name}-emulated.json"


def write_result(name: str, result: dict[str, Any]) -> Path:
    """Writes NAME.json = {machine, **result} where it belongs; whole or not at all."""
    machine = record()
    target = result_path(name, machine)
    write_json(target, {"machine": machine, **result})
    return target


def git(*arguments: str) -> str | None:
    """What git prints in the repository; None where there is no git or no checkout."""
    try:
        done = subprocess.run(
            ["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=True, timeout=10
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()

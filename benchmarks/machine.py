"""The machine, the versions and the commit, which every benchmark result carries."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

from kvc_trt.machine import machine_record

ROOT = Path(__file__).resolve().parent.parent
COMMIT = ROOT / "COMMIT"
"""Holds the commit where the code was copied from a checkout without its history: in the bundle of a GPU's day."""
WRITTEN = ("benchmarks/results", "docs/results", "docs/images")
"""Paths that benchmarks themselves write: a change there does not change the code."""


def commit() -> str | None:
    """Return the commit the code was run from, with `-dirty` if tracked files differ from it; None if unknown."""
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


def git(*arguments: str) -> str | None:
    """Return git's output in the repository; None without git or a checkout."""
    try:
        done = subprocess.run(
            ["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=True, timeout=10
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()

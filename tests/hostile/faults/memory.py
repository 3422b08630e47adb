"""Too little address space (ulimit -v): one line and exit code 3, or the answer."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from collections.abc import Iterator

from tests.hostile.faults.outcomes import Outcome
from tests.hostile.faults.subjects import READERS, SUBJECTS, Inputs
from tests.hostile.faults.trials import LONGEST_SECONDS, Folders

LOWEST, HIGHEST = 32, 1600
"""Limits in MiB: nothing can be loaded, and everything can."""
COMMANDS = ("build", "context save", "run", "verify", "accuracy", "profile -o")


def low_memory(inputs: Inputs, folders: Folders, wanted: int) -> Iterator[Outcome]:
    """Run commands under about `wanted` limits, spread evenly, in processes of their own."""
    each = max(2, wanted // len(COMMANDS))
    for name in COMMANDS:
        for step in range(each):
            yield _limited(name, inputs, folders, LOWEST + step * (HIGHEST - LOWEST) // (each - 1))


def _limited(name: str, inputs: Inputs, folders: Folders, mebibytes: int) -> Outcome:
    subject = (SUBJECTS | READERS)[name]
    limit = mebibytes << 20
    done = subprocess.run(
        [sys.executable, "-m", "kvc_trt", *subject.begin(inputs, folders)],
        env={**os.environ, "KVC_TRT_CACHE": str(folders.cache), "TMPDIR": str(folders.temporary)},
        capture_output=True, text=True, errors="replace", timeout=LONGEST_SECONDS, check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (limit, limit)),
    )  # fmt: skip
    problems = []
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    if done.returncode not in (0, 3):
        problems.append(f"ended with {done.returncode}: {done.stderr[-300:]}")
    elif done.returncode == 3 and (len(errors) != 1 or "bug" in done.stderr):
        problems.append(f"said {done.stderr[-300:]}")
    target = folders.output / subject.target
    if subject.target and target.exists() and (problem := subject.problem(target)) is not None:
        problems.append(f"half-written: {problem}")
    return Outcome(name, f"{mebibytes} MiB", problems, {"code": done.returncode})

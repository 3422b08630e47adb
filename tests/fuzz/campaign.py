"""A campaign: every kind gets its share of the time, in a process that may crash or hang without ending the rest."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from tests.fuzz.board import Board, mapped
from tests.fuzz.kind import Kind
from tests.fuzz.minimise import crash_key
from tests.fuzz.verdict import KILL_AFTER, waited

ROOT = Path(__file__).resolve().parents[2]
REGRESSIONS = Path(__file__).parent / "regressions"
_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error", "TOKENIZERS_PARALLELISM": "false", "RUST_BACKTRACE": "0",
    "OMP_NUM_THREADS": "1", "KVC_TRT_CPU_KERNELS": "none",
}  # fmt: skip
_STARTS_WITHIN = 300.0
"""Seconds in which a kind has made its seeds."""
_RECORDS_WITHIN = 300.0


@dataclass
class Result:
    """The results of the inputs of one kind."""

    kind: str
    inputs: int = 0
    accepted: int = 0
    refused: int = 0
    bad: int = 0
    slowest_seconds: float = 0.0
    slowest_number: int = 0
    peak_bytes: int = 0
    peak_number: int = 0
    seconds: float = 0.0
    compared: int = 0
    only_ours: dict[str, int] = field(default_factory=dict)
    """Reasons why another reader refuses inputs that ours accepts, with their counts."""
    findings: list[dict[str, Any]] = field(default_factory=list)
    left_out: str | None = None
    """The reason why the kind was not tried."""

    def as_json(self) -> dict[str, Any]:
        found = {name: value for name, value in asdict(self).items() if value not in (None, [], {})}
        found["findings"] = [{name: one[name] for name in ("number", "key", "message")} for one in self.findings]
        return found


@dataclass(frozen=True)
class Plan:
    """The time for each kind, and the first input."""

    seconds: float
    seed: int
    folder: Path
    first: int = 0
    most: int = 1 << 62
    """Inputs of one kind."""
    minimising: float = 5.0
    """Seconds for each kind of bad input."""


def run_kind(kind: type[Kind], plan: Plan, progress: Callable[[Result], object] = lambda result: None) -> Result:
    """Try inputs of one kind; start a new process where one crashes or has to be ended."""
    folder = plan.folder / kind.name
    folder.mkdir(parents=True)
    board, result = mapped(folder / "board"), Result(kind.name)
    started, until = time.monotonic(), time.monotonic() + plan.seconds
    first, ended_by = plan.first, None
    while first < plan.first + plan.most and (ended_by or time.monotonic() < until):
        board.ready, board.started = 0, 0.0
        process = _start(kind, plan, first, max(0.0, until - time.monotonic()), ended_by)
        try:
            key = _watched(process, kind, board, lambda: progress(_filled(result, board, started)))
        finally:
            process.kill()
            process.wait()
        if not board.ready:
            result.left_out = kind.needs if process.returncode == 0 else _why(folder)
            break
        if key is None:
            break
        if board.started == 0.0:  # not while it read an input: a defect of these tests
            result.left_out = f"its worker ended by itself ({key}): {_why(folder)}"
            break
        first, ended_by = board.number + 1, key
    _filled(result, board, started)
    result.findings = _lines(folder / "findings.jsonl")
    refusals = folder / "only_ours.json"
    result.only_ours = json.loads(refusals.read_text()) if refusals.exists() else {}
    return result


def write_regressions(findings: Iterable[dict[str, Any]], folder: Path = REGRESSIONS) -> list[Path]:
    """Write each finding as a file that `test_regressions.py` reads from now on; returns the files."""
    written = []
    for finding in findings:
        if finding["key"] == "took too long once":
            continue
        content = bytes.fromhex(finding["content"])
        name = re.sub(r":\d+|[^\w.]+", "-", finding["key"]).strip("-")[:80]
        path = folder / finding["kind"] / f"{name}-{hashlib.sha256(content).hexdigest()[:6]}"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        written.append(path)
    return written


def _start(kind: type[Kind], plan: Plan, first: int, seconds: float, ended_by: str | None) -> subprocess.Popen[bytes]:
    place = f"{kind.__module__}:{kind.__name__}"
    command = [sys.executable, "-m", "tests.fuzz.worker", place, str(plan.folder / kind.name)]
    command += ["--seed", str(plan.seed), "--first", str(first), "--last", str(plan.first + plan.most)]
    command += ["--seconds", str(seconds), "--minimising", str(plan.minimising)]
    command += ["--ended-by", ended_by] if ended_by else []
    environment = {**os.environ, **_ENVIRONMENT, "KVC_TRT_CACHE": str(plan.folder / "cache")}
    with (plan.folder / kind.name / "stderr.log").open("wb") as log:
        return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=log)


def _watched(
    process: subprocess.Popen[bytes], kind: type[Kind], board: Board, report: Callable[[], object]
) -> str | None:
    """Wait until the worker is done; how it ended, if it did not exit on its own."""
    began = recording = time.monotonic()
    input_at, waited_before, is_stuck = 0.0, 0.0, False
    while process.poll() is None:
        time.sleep(0.1)
        now, started = time.monotonic(), board.started
        recording = now if started or not board.ready else recording
        with contextlib.suppress(OSError):  # it may just have ended
            if started != input_at:
                input_at, waited_before = started, waited(process.pid)
            limit = started + kind.seconds * KILL_AFTER
            # Waiting for a processor is asked for only where it matters.
            is_stuck = started > 0 and now > limit and now > limit + waited(process.pid) - waited_before
        if is_stuck or (not board.ready and now - began > _STARTS_WITHIN) or now - recording > _RECORDS_WITHIN:
            process.kill()
            process.wait()
            return "takes too long"
        report()
    if process.returncode == 0:
        return None
    return crash_key(-process.returncode) if process.returncode < 0 else f"exit {process.returncode}"


def _filled(result: Result, board: Board, started: float) -> Result:
    for name in ("inputs", "accepted", "refused", "bad", "compared", "slowest_number", "peak_number"):
        setattr(result, name, getattr(board, name))
    result.slowest_seconds, result.peak_bytes = round(board.slowest, 3), board.peak
    result.seconds = round(time.monotonic() - started, 1)
    return result


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def _why(folder: Path) -> str:
    """Return the end of what the worker said."""
    return (folder / "stderr.log").read_text(errors="replace").strip()[-2000:]


def run(
    chosen: Sequence[type[Kind]],
    plan: Plan,
    progress: Callable[[Result], object] = lambda result: None,
    done: Callable[[Result], object] = lambda result: None,
) -> list[Result]:
    """Try each kind for an equal share of the time; `done` is called with what became of each."""
    results = []
    for kind in chosen:
        share = replace(plan, seconds=plan.seconds / len(chosen))
        results.append(run_kind(kind, share, progress))
        done(results[-1])
    return results

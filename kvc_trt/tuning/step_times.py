"""The time of one decode step of each candidate: measured on this machine, or the floor of a GPU's bandwidth."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvc_trt.backends.benchmark import LARGEST_SHARE_OF_MEMORY
from kvc_trt.backends.registry import program_backend
from kvc_trt.backends.run_options import RunOptions
from kvc_trt.files.atomic import write_json
from kvc_trt.machine import machine_record
from kvc_trt.profile.accelerators import accelerator
from kvc_trt.profile.planning.placement import on_one_gpu
from kvc_trt.profile.profiled_engine import BLOCK, LEAST_BLOCKS, DecodeRun, open_profiled, time_decode
from kvc_trt.runtime.executor import threads_for
from kvc_trt.tuning.candidates import Candidate

if TYPE_CHECKING:
    from kvc_trt.accuracy.under_test.model_under_test import Room
    from kvc_trt.accuracy.under_test.policy_engines import ChosenModel, PolicyEngines
    from kvc_trt.progress import Progress

STEP_SECONDS = 2.0
"""Time limit of one candidate's steps, after the least number of blocks."""
TIMES_FILE = "steps.json"


@dataclass(frozen=True)
class StepTimes:
    """Seconds of a step of `rows` rows at their longest, by candidate, and how they were found."""

    how: str
    """A sentence for a report."""
    rows: int
    seconds: Mapping[Candidate, float]

    def of(self, candidate: Candidate) -> float | None:
        """The seconds of one candidate's step; None if it was not timed."""
        return self.seconds.get(candidate)


def floor_times(chosen: ChosenModel, candidates: Iterable[Candidate], room: Room, rows: int, gpu: str) -> StepTimes:
    """The floors on a GPU: bytes that a step moves, over the published bandwidth. Nothing is run."""
    figures, seconds = accelerator(gpu), {}
    for one in candidates:
        parameters = chosen.resolved(one.variant, room).parameters
        place = on_one_gpu(chosen.config, parameters, chosen.weights, turns=True)
        seconds[one] = place.step_seconds("compressed", figures, rows)
    how = f"modelled, not measured: bytes that a step moves over the bandwidth of an {figures.name}"
    return StepTimes(f"{how}, {_rows(rows)}", rows, seconds)


def measured_times(
    model: PolicyEngines, candidates: Iterable[Candidate], room: Room, rows: int, directory: Path, progress: Progress
) -> StepTimes:
    """The medians of steps on this machine, over caches that are filled without a prompt, as `kvc-trt profile` times.

    Times that the directory has of the same model, machine, room and rows are not measured again. Rows are as many as
    were asked for, or as half of the free memory takes, the same for all.
    """
    candidates = list(candidates)
    benchmark = program_backend().program_benchmark(model.config, RunOptions(threads=threads_for(model.config)))
    fit = int(LARGEST_SHARE_OF_MEMORY * benchmark.free_bytes() / max(one.row_bytes for one in candidates))
    machine = machine_record()
    path = directory / TIMES_FILE
    given = {**model.describe(), "device": machine["device"], "room": vars(room), "rows_asked": rows}
    known = _known(path, given)
    rows = known["rows"] or max(1, min(rows, fit))
    times: dict[str, float] = dict(known["seconds"])
    missing = [one for one in candidates if str(one) not in times]
    with progress.task("timing steps", len(missing)) as advance:
        for one in missing:
            side = open_profiled(str(one), model.program(one.variant, room), benchmark)
            run = DecodeRun(side, rows, room.max_input_len)
            (found,) = time_decode([run], LEAST_BLOCKS * BLOCK, STEP_SECONDS)
            times[str(one)] = found.steps.median
            side.executor.allocate(1)
            write_json(path, {**given, "rows": rows, "seconds": times})
            advance(1)
    how = f"measured on this machine ({machine['device']}, {machine['usable_cores']} cores), {_rows(rows)}"
    return StepTimes(how, rows, {one: times[str(one)] for one in candidates})


def _known(path: Path, given: Mapping[str, Any]) -> dict[str, Any]:
    """The rows and times of an earlier run; 0 rows for another model, machine, room or number of rows, or no file."""
    nothing: dict[str, Any] = {"rows": 0, "seconds": {}}
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return nothing
    if not isinstance(found, dict) or any(found.get(name) != value for name, value in given.items()):
        return nothing
    rows, seconds = found.get("rows"), found.get("seconds")
    if not isinstance(rows, int) or rows < 1 or not isinstance(seconds, dict):
        return nothing
    return found if all(isinstance(one, float) for one in seconds.values()) else nothing


def _rows(rows: int) -> str:
    return "one row" if rows == 1 else f"{rows} rows together"

"""Round after round over all measurements, each in a process of its own, until rounds or minutes are used up."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Sequence
from statistics import median
from typing import Any

from benchmarks.idle import Others
from benchmarks.machine import ROOT
from benchmarks.peers.artefacts import Workplace, make
from benchmarks.peers.contenders import NEW_TOKENS
from benchmarks.peers.floors import floor_ms
from benchmarks.peers.points import Measurement
from benchmarks.peers.runs import Runs
from kvc_trt.profile.model_size import token_cache_bytes

BUSY = 0.05
"""Share of the processor that others may have during a run that counts."""


def expected_seconds(measurement: Measurement, runs: Runs) -> float:
    """Return the seconds that one more run takes, estimated from earlier runs or from the operations of its prefill."""
    walls = [run["wall_seconds"] for run in runs.of(measurement)]
    return median(walls) if walls else measurement.expected_seconds()


def estimate(measurements: Sequence[Measurement], runs: Runs, rounds: int) -> float:
    """Return the seconds of all runs that are still missing."""
    return sum(
        max(0, rounds - len(runs.of(measurement))) * expected_seconds(measurement, runs) for measurement in measurements
    )


def measure_all(
    measurements: Sequence[Measurement], runs: Runs, place: Workplace, *, rounds: int, minutes: float
) -> bool:
    """Run every measurement up to `rounds` times; return whether all of it fitted into the minutes.

    A run with a busy machine is made once more where time is left; both stay in the results.
    """
    deadline = time.monotonic() + 60 * minutes
    complete = True
    for turn in range(rounds):
        # Who begins changes from round to round, so that a machine that warms up favours nobody.
        begins = turn % max(1, len(measurements))
        for measurement in [*measurements[begins:], *measurements[:begins]]:
            if len(runs.of(measurement)) > turn or measurement.key in runs.data.get("failed", {}):
                continue
            if time.monotonic() + expected_seconds(measurement, runs) > deadline:
                complete = False
                continue
            found = _measure(measurement, runs, place)
            again = time.monotonic() + expected_seconds(measurement, runs) <= deadline
            if found is not None and found["others_share"] > BUSY and again:
                _measure(measurement, runs, place)
    return complete


def _measure(measurement: Measurement, runs: Runs, place: Workplace) -> dict[str, Any] | None:
    """Run one measurement and keep it; None where the contender cannot do it, which is kept as well."""
    point, contender = measurement.point, measurement.contender
    target = make(measurement, place)
    model = point.shape.model
    request = {
        "runner": contender.runner, "artefact": str(target), "options": dict(contender.options),
        "context": point.context, "batch": point.batch, "new_tokens": NEW_TOKENS, "threads": place.threads,
        "vocab_size": model.vocab_size, "cache_bytes_per_token": model.num_hidden_layers * token_cache_bytes(model, 4),
    }  # fmt: skip
    others, started = Others(), time.monotonic()
    done = subprocess.run(
        [place.python(ours=contender.ours), "-m", "benchmarks.peers.worker"],
        input=json.dumps(request), cwd=ROOT, env={**place.environment(), **contender.environment},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    share, wall = others.share(), time.monotonic() - started
    if done.returncode:
        reason = (done.stderr.strip() or f"exit code {done.returncode}").splitlines()[-1][:300]
        runs.fail(measurement, reason)
        print(f"{measurement.key}: failed: {reason}", flush=True)
        return None
    run = {**json.loads(done.stdout.strip().splitlines()[-1]), "others_share": share, "wall_seconds": wall}
    runs.add(measurement, target, run, floor_ms(measurement, runs.data["bandwidth"]))
    print(
        f"{measurement.key}: first token {run['first_token_seconds']:.2f} s, {median(run['token_ms']):.2f} ms per "
        f"token, {run['peak_resident_bytes'] / 2**30:.2f} GiB, others {share:.0%}",
        flush=True,
    )
    return run

"""Measure a load on an engine and on its dense twin in the same memory, run by run in turns."""

from __future__ import annotations

import contextlib
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kvc_trt.backends.opening import benchmark_for
from kvc_trt.backends.run_options import DEFAULTS, RunOptions
from kvc_trt.machine import machine_record
from kvc_trt.profile.pages.findings import measured_on
from kvc_trt.profile.requests.client import ask_all
from kvc_trt.profile.requests.figures import figures, over_repeats
from kvc_trt.profile.requests.load import Asking, Load, asking
from kvc_trt.profile.requests.sides import LoadSide, check_fits, open_scheduler, sides_of
from kvc_trt.profile.run import engine_record
from kvc_trt.sizes import readable_size

if TYPE_CHECKING:
    from kvc_trt.engine import EngineDirectory
    from kvc_trt.progress import Progress
    from kvc_trt.runtime.scheduler.scheduler import Scheduler

SCHEMA_VERSION = 1


def profile_requests(
    engine: EngineDirectory, load: Load, progress: Progress, options: RunOptions = DEFAULTS
) -> dict[str, Any]:
    """Answer a load with the engine and with its dense twin in the same memory; return JSON-compatible data.

    Sizes are in bytes, `duration` in seconds, other times in milliseconds, rates per second. `rows` has each side's
    medians over the repeats, `runs` every run. Raises InputError for a load that the engine cannot take,
    UnsupportedEnvironment where the caches do not fit, and the exception of a request that fails.
    """
    asked = asking(load, engine)
    concurrency = load.concurrency or engine.build.max_batch_size
    sides = sides_of(engine, asked, load.rows or concurrency, concurrency)
    benchmark = benchmark_for(engine, options)
    check_fits(sides, benchmark.free_bytes())
    with contextlib.ExitStack() as stack:
        schedulers = [
            stack.enter_context(open_scheduler(side, benchmark, engine, concurrency, progress)) for side in sides
        ]
        runs = _runs(sides, schedulers, asked, load, concurrency, progress)
    rows = [{**side.as_json(), **over_repeats([run for run in runs if run["side"] == side.name])} for side in sides]
    result: dict[str, Any] = {
        "schema_version": SCHEMA_VERSION,
        "engine": engine_record(engine),
        "machine": {**machine_record(), **benchmark.describe()},
        "request_info": _request_info(load, asked, concurrency),
        "rows": rows,
        "runs": runs,
    }
    result["findings"] = list(_findings(result))
    return result


def _runs(
    sides: Sequence[LoadSide],
    schedulers: Sequence[Scheduler],
    asked: Asking,
    load: Load,
    concurrency: int,
    progress: Progress,
) -> list[dict[str, Any]]:
    """Return the figures of every run. Who begins a round alternates, so that a drift of the machine affects both."""
    found = []
    both = list(zip(sides, schedulers, strict=True))
    total = len(both) * (load.warmup + load.repeats * load.requests)
    with progress.task("answering requests", total) as advance:
        if load.warmup:
            places = [place % load.requests for place in range(load.warmup)]
            first = Asking(tuple(asked.requests[place] for place in places), (0.0,) * load.warmup, asked.source)
            for _, scheduler in both:
                ask_all(scheduler, first, concurrency, advance)
        for repeat in range(load.repeats):
            for side, scheduler in both if repeat % 2 == 0 else reversed(both):
                run = ask_all(scheduler, asked, concurrency, advance)
                found.append({"side": side.name, "repeat": repeat, **figures(run)})
    return found


def _request_info(load: Load, asked: Asking, concurrency: int) -> dict[str, Any]:
    inputs, outputs = asked.longest
    return {
        "num_prompts": load.requests,
        "max_concurrency": concurrency,
        "request_rate": "inf" if math.isinf(load.request_rate) else load.request_rate,
        "input_len": None if load.input_len is None else load.input_len.text,
        "output_len": None if load.output_len is None else load.output_len.text,
        "longest_input_len": inputs,
        "longest_output_len": outputs,
        "mean_tokens": asked.mean_tokens,
        "warmup": load.warmup,
        "repeats": load.repeats,
        "seed": load.seed,
        "prompts": asked.source,
        "ignore_eos": True,
        "dense": "twin of the engine (same weights, policy full) with the rows that fit into the engine's bytes",
    }


def _findings(result: Mapping[str, Any]) -> Iterator[str]:
    """Yield the findings that follow from the figures."""
    yield from measured_on(result["machine"])
    engine, dense = result["rows"]
    ratios = [
        one["request_throughput"] / other["request_throughput"]
        for one, other in zip(_of(result, "engine"), _of(result, "dense"), strict=True)
    ]
    low, high = min(ratios), max(ratios)
    rounds = "" if len(ratios) == 1 else f" ({low:.2f} to {high:.2f} in {len(ratios)} rounds)"
    unsure = " and cannot be told apart from it" if low <= 1 <= high and len(ratios) > 1 else ""
    yield (
        f"the engine with {_rows(engine)} answers {statistics.median(ratios):.2f}x{rounds} as many requests per second "
        f"as its dense twin with {_rows(dense)}{unsure}"
    )
    if dense["cache_bytes"] > engine["cache_bytes"]:
        yield (
            f"not the same memory: one dense row takes {readable_size(dense['row_bytes'])}, and all rows of the engine "
            f"take {readable_size(engine['cache_bytes'])}; the twin was given one row nevertheless"
        )
    elif dense["rows"] == result["request_info"]["max_concurrency"]:
        yield (
            "the twin has a row for every concurrent request: a higher concurrency would show the value of the saved "
            "memory"
        )


def _of(result: Mapping[str, Any], side: str) -> list[Mapping[str, Any]]:
    return sorted((run for run in result["runs"] if run["side"] == side), key=lambda run: run["repeat"])


def _rows(row: Mapping[str, Any]) -> str:
    return f"{row['rows']} row{'s' * (row['rows'] != 1)} ({readable_size(row['cache_bytes'])})"

"""Rows that decode while a long prompt joins: the worst gap between two of their tokens, with slices and without.

    python -m benchmarks.prefill.slices ENGINE_DIR                       # SmolLM2 as in docs/scheduler.md; some minutes
    python -m benchmarks.prefill.slices ENGINE_DIR --limits 50,100,200 --prompt 4096 --rows 8

Both sides do the same work, in turns: the prefill of one prompt, and `--steps` steps of the rows. The cost of slices is
the time that they add to it, the median over the rounds (bar: 5%). Wall-clock figures count only on an idle machine, so
the share of the processors that others took is written beside each of them; processor time is nearly free of it.
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks import store
from benchmarks.idle import Others
from kvc_trt.backends.opening import open_engine, session_of
from kvc_trt.profile.profiled_engine import random_prompts
from kvc_trt.runtime import Request, Scheduler, Session
from kvc_trt.runtime.executor import SlicingExecutor

COST_BAR = 0.05
WHOLE = float("inf")
"""The limit of a prefill in one piece."""
SHORT_PROMPT = 64
QUIET = 0.05
"""Share of the processors that others may take in a figure that counts."""


@dataclass(frozen=True)
class Run:
    """One prompt that joins and the steps around it."""

    slices: int
    seconds: float
    processor_seconds: float
    worst_gap_seconds: float
    seconds_to_join: float
    """Time from the prompt's arrival to its row."""
    others_share: float
    """Processor time of other processes, of all there was."""


def run(session: Session, limit_ms: float, prompt: list[int], short: list[list[int]], steps: int) -> Run:
    """Let the `short` prompts decode, let the long one join and leave at once, and stop after `steps` steps."""
    scheduler = Scheduler(session, prefill_slice_ms=limit_ms)
    for ids in short:
        scheduler.submit(Request(ids, max_new_tokens=steps + 2 * len(short), ignore_eos=True))
    while len(session.rows) < len(short):
        scheduler.advance()
    first = scheduler.metrics()
    ticket = scheduler.submit(Request(prompt, max_new_tokens=2, ignore_eos=True))
    others, own, started = Others(), time.process_time(), time.perf_counter()
    worst, before, joined = 0.0, started, None
    while scheduler.metrics()["steps"] - first["steps"] < steps:
        scheduler.advance()
        now = time.perf_counter()
        worst, before = max(worst, now - before), now
        if joined is None and ticket.token_times:
            joined = now - started
            ticket.cancel()
    seconds, own, share = time.perf_counter() - started, time.process_time() - own, others.share()
    slices = scheduler.metrics()["slices"] - first["slices"]
    scheduler.close()
    if joined is None:
        raise SystemExit(f"the prompt took {slices} slices and has not joined after {steps} steps: give more --steps")
    return Run(slices, seconds, own, worst, joined, share)


def measure(engine: Path, limits: list[float], tokens: int, rows: int, steps: int, repeats: int) -> dict[str, Any]:
    directory = open_engine(engine)
    session = session_of(directory, max_batch_size=rows + 1)
    if isinstance(session.executor, SlicingExecutor):
        session.executor.prepare_slices()
    vocabulary = directory.model.vocab_size
    prompt, short = (random_prompts(*shape, vocabulary).tolist() for shape in ((1, tokens), (rows, SHORT_PROMPT)))
    runs: dict[float, list[Run]] = {limit: [] for limit in (WHOLE, *limits)}
    run(session, WHOLE, prompt[0], short, steps)  # warms up
    for _ in range(repeats):
        for limit, found in runs.items():
            found.append(run(session, limit, prompt[0], short, steps))
    return {
        "engine": {"model": directory.model.architecture, "policy": directory.parameters.policy},
        "prompt_tokens": tokens,
        "rows": rows,
        "steps": steps,
        "repeats": repeats,
        "cost_bar": COST_BAR,
        "figures": [_figure(limit, found, runs[WHOLE]) for limit, found in runs.items()],
        "runs": {_name(limit): [asdict(one) for one in found] for limit, found in runs.items()},
    }


def _figure(limit: float, runs: list[Run], whole: list[Run]) -> dict[str, Any]:
    """Return the medians and ranges of a limit's runs, and their cost beside the `whole` run of the same round."""
    costs = [one.seconds / other.seconds - 1 for one, other in zip(runs, whole, strict=True)]
    gaps, seconds = [1000 * one.worst_gap_seconds for one in runs], [one.seconds for one in runs]
    return {
        "prefill_slice_ms": _name(limit),
        "slices": runs[0].slices,
        "worst_gap_ms": statistics.median(gaps),
        "worst_gap_ms_range": [min(gaps), max(gaps)],
        "seconds_to_join": statistics.median(one.seconds_to_join for one in runs),
        "seconds": statistics.median(seconds),
        "seconds_range": [min(seconds), max(seconds)],
        "processor_seconds": statistics.median(one.processor_seconds for one in runs),
        "cost": statistics.median(costs),
        "cost_range": [min(costs), max(costs)],
        "others_share": max(one.others_share for one in runs),
        "measured_under_load": any(one.others_share > QUIET for one in runs),
    }


def _name(limit: float) -> str:
    return "whole" if limit == WHOLE else f"{limit:g}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine", type=Path)
    parser.add_argument("--limits", default="50,100,200", help="milliseconds per slice")
    parser.add_argument("--prompt", type=int, default=4096, metavar="TOKENS")
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--repeats", type=int, default=5)
    given = parser.parse_args()
    limits = [float(limit) for limit in given.limits.split(",")]
    result = measure(given.engine, limits, given.prompt, given.rows, given.steps, given.repeats)
    for one in result["figures"]:
        print(
            f"{one['prefill_slice_ms']:>6} ms: {one['slices']} slices, worst gap {one['worst_gap_ms']:.0f} ms "
            f"({one['worst_gap_ms_range'][0]:.0f} to {one['worst_gap_ms_range'][1]:.0f}), "
            f"joined after {one['seconds_to_join']:.1f} s, {one['seconds']:.1f} s in all ({one['cost']:+.1%}), "
            f"{one['processor_seconds']:.1f} s of processor, others {one['others_share']:.0%}"
        )
    print(store.write_result("slices", {"slices": result}))


if __name__ == "__main__":
    main()

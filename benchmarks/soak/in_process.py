"""The part of a soak that needs no server: callers of one scheduler, and the resources left afterwards."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import psutil

from benchmarks.soak.callers import Caller, tasks
from benchmarks.soak.memory import MemoryWatch
from benchmarks.soak.outcomes import DIFFERENT, LOST, UNEXPLAINED, Outcomes
from kvc_trt import Engine

ROWS, CALLERS = 4, 6
_PAUSE_SECONDS = 0.05
_WARM_UP = 0.25
"""The share of the time after which memory is fitted."""


def soak(engine: Path, seconds: float, seed: int, *, distinct: int = 28) -> dict[str, Any]:
    """Load a scheduler that makes drafts; return the outcomes of the requests, the leftovers, and the memory.

    There are `distinct` different prompts, which come again in any order.
    """
    with Engine.open(engine, threads=1, speculate="ngram") as opened:
        tokenizer = opened.directory.tokenizer
        assert tokenizer is not None, "it is a chat model"
        scheduler = opened.scheduler(ROWS, queue_limit=16)
        with scheduler:
            asked = tasks(lambda text: list(tokenizer.encode(text).ids), seed, distinct)
            quiet = [(task, task.run(scheduler)) for task in asked]
            outcomes, ends = Outcomes(), time.monotonic() + seconds
            threads = [
                Caller(scheduler, quiet, outcomes, seed + place, ends=ends, pause_seconds=_PAUSE_SECONDS)
                for place in range(CALLERS)
            ]
            watch = MemoryWatch(lambda: {"scheduler": psutil.Process()})
            for thread in (*threads, watch):
                thread.start()
            for thread in threads:
                thread.join()
            watch.ending.set()
            lives = any(one.name == "kvc-trt scheduler" for one in threading.enumerate())
            again = [task for task, expected in quiet if task.run(scheduler) != expected]
        metrics, session = scheduler.metrics(), scheduler.session
        return {
            "requests": {kind: dict(counted) for kind, counted in sorted(outcomes.counts.items())},
            "wrong": outcomes.total(DIFFERENT, LOST, UNEXPLAINED) + len(again),
            "examples": outcomes.examples,
            "thread_lives": lives,
            "rows_free": session.free,
            "rows": session.max_batch_size,
            "without_an_end": metrics["submitted"] - sum(metrics["ended"].values()),
            "drafted_tokens": session.timings.drafted_tokens,
            "accepted_tokens": session.timings.accepted_tokens,
            "steps": metrics["steps"], "turns": metrics["turns"], "slices": metrics["slices"],
            "memory": watch.figures(_WARM_UP * seconds),
        }  # fmt: skip

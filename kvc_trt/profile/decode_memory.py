"""Memory that decode steps need beside the weights: measured on caches of a prompt's length, and modelled.

RocketKV (arXiv 2502.14051v1, section 4.3) reports the peak memory of decode beside that of the whole cache.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from kvc_trt.profile.profiled_engine import DecodeRun

if TYPE_CHECKING:
    from kvc_trt.profile.profiled_engine import ProfiledEngine

STEPS = 8
"""Steps in which the peak is looked for; the first one allocates the memory that all of them work in."""


@dataclass(frozen=True)
class DecodePeak:
    """Peak memory of decode steps above rest: caches and the working memory of a step, without the weights."""

    bytes: int
    how: str
    """The method by which the figure was measured."""


def decode_peak(side: ProfiledEngine, rows: int, context: int) -> DecodePeak:
    """Measure steps of `rows` rows with prompts of `context` tokens, in an executor that held no caches before."""
    benchmark = side.benchmark
    resting = replace(side, executor=benchmark.at_rest(side.executor))
    with benchmark.watch_steps(resting.executor) as rest:
        pass
    run = DecodeRun(resting, rows, context)
    with benchmark.watch_steps(resting.executor) as peak:
        for _ in range(STEPS):
            run.step_seconds()
    return DecodePeak(max(0, peak.highest - rest.before), peak.how)


def share(part: float | None, whole: float | None) -> float | None:
    """Return `part` over `whole`; None where either was not measured or there is no whole."""
    return part / whole if part is not None and whole else None

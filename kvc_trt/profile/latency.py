"""Timing of decode steps and prefills, the sides interleaved so that a drift of the machine hits all of them alike."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvc_trt.profile.memory import Peak
from kvc_trt.profile.statistics import Summary, summarise
from kvc_trt.profile.subject import DecodeRun, Subject

BLOCK = 10
"""Steps of one side before the other has its turn; the one in front of them warms the caches and is not counted."""
LEAST_BLOCKS = 2


@dataclass(frozen=True)
class DecodeTimes:
    """Steps of one side, seconds."""

    steps: Summary
    """Every counted step: inter-token latency."""
    blocks: Summary
    """Means of blocks of steps: time per output token as a request sees it."""


def time_decode(runs: Sequence[DecodeRun], steps: int, seconds: float) -> list[DecodeTimes]:
    """Time at least `steps` steps of every run, block by block in turn, or as many as fit `seconds` for all together.

    Two blocks of every run are timed whatever they take.
    """
    samples: list[list[list[float]]] = [[] for _ in runs]
    size = min(BLOCK, steps)
    started = time.perf_counter()
    for block in range(max(LEAST_BLOCKS, -(-steps // size))):
        if block >= LEAST_BLOCKS and time.perf_counter() - started > seconds:
            break
        for run, blocks in zip(runs, samples, strict=True):
            run.step_seconds()
            blocks.append([run.step_seconds() for _ in range(size)])
    return [_decode_times(blocks) for blocks in samples]


def _decode_times(blocks: list[list[float]]) -> DecodeTimes:
    means = [sum(block) / len(block) for block in blocks]
    return DecodeTimes(summarise([sample for block in blocks for sample in block]), summarise(means))


@dataclass(frozen=True)
class PrefillTimes:
    """Prefills of one side."""

    seconds: Summary
    peak: Peak
    """Memory of the first prefill, which is not timed."""


def time_prefill(subjects: Sequence[Subject], prompts: NDArray[np.int64], repeats: int) -> list[PrefillTimes]:
    """One prefill of each side to warm up and to watch its memory, then `repeats` timed ones of each in turn."""
    peaks = []
    for subject in subjects:
        subject.executor.load()  # before the memory is watched
        with subject.bench.watch(subject.executor) as peak:
            subject.prefill_seconds(prompts)
        peaks.append(peak)
    samples: list[list[float]] = [[] for _ in subjects]
    for _ in range(repeats):
        for subject, seconds in zip(subjects, samples, strict=True):
            seconds.append(subject.prefill_seconds(prompts))
    return [PrefillTimes(summarise(seconds), peak) for seconds, peak in zip(samples, peaks, strict=True)]

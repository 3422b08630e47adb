"""One side of a measurement, an engine or its dense twin, ready to be timed."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from kvc_trt.profile.bench import Bench, HostBench
from kvc_trt.profile.synthetic import cache_rows
from kvc_trt.profile.traffic import entries_by_cache
from kvc_trt.runtime.executor import GreedyExecutor

if TYPE_CHECKING:
    from kvc_trt.engine.program import Program
    from kvc_trt.methods.parameters import PolicyParameters


@dataclass(frozen=True)
class Subject:
    """What is measured, and under which name it is reported (`engine`, `dense`)."""

    name: str
    program: Program
    executor: Any
    threads: int
    bench: Bench

    @property
    def parameters(self) -> PolicyParameters:
        """The constants its graphs were built with."""
        return self.program.parameters

    def prefill_seconds(self, prompts: NDArray[np.int64]) -> float:
        """One prefill of `prompts` [B, S] (all S tokens real), timed; its result is dropped."""
        rows, length = prompts.shape
        block = self.executor.limits.prompt_block
        padded = np.zeros((rows, -(-length // block) * block), np.int64)
        padded[:, :length] = prompts
        lengths = np.full(rows, length, np.int64)
        started = time.perf_counter()
        self.executor.prefill(padded, lengths)
        return time.perf_counter() - started


def open_subject(name: str, program: Program, threads: int, bench: Bench | None = None) -> Subject:
    """A program with an executor of its own at `bench` (None: this machine's processor)."""
    bench = bench or HostBench(threads)
    return Subject(name, program, bench.open(program), threads, bench)


def twin_for(program: Program, context: int) -> Program:
    """The dense twin for prompts of `context` tokens.

    Its caches are no longer than they need to be, as those of a dense engine built for that length: it never reads
    slots that only a longer prompt would fill.
    """
    from kvc_trt.engine.program import twin_program

    return twin_program(replace(program, parameters=replace(program.parameters, max_input_len=context)))


class DecodeRun:
    """Decode steps of `rows` rows whose prompts had `context` tokens; the caches were filled synthetically."""

    def __init__(self, subject: Subject, rows: int, context: int) -> None:
        self.subject = subject
        self._context = context
        self._tokens = np.zeros(rows, np.int64)
        self._generated = 0
        entries = entries_by_cache(subject.program.model, subject.parameters, context)
        self._lengths = np.tile(np.array(entries, np.int64)[:, None], (1, rows))
        executor = subject.executor
        self._decode = executor.decode_greedy if isinstance(executor, GreedyExecutor) else executor.decode
        executor.allocate(rows)
        rows_of = cache_rows(subject.program.state, entries, subject.parameters.page_size)
        subject.bench.fill(subject.executor, rows_of)

    def step_seconds(self) -> float:
        """One step, timed. After max_output_len steps the rows start again behind their prompts.

        A step is what a greedy session asks for: an executor that finds the best tokens itself hands out nothing else.
        """
        positions = np.full(len(self._tokens), self._context + self._generated, np.int64)
        lengths = self._lengths + self._generated
        started = time.perf_counter()
        self._decode(self._tokens, positions, lengths)
        seconds = time.perf_counter() - started
        self._generated = (self._generated + 1) % self.subject.parameters.max_output_len
        return seconds


def random_prompts(rows: int, length: int, vocab_size: int, seed: int = 0) -> NDArray[np.int64]:
    """Seeded token ids [rows, length]: what they say does not change how long a prefill takes."""
    return np.random.default_rng(seed).integers(0, vocab_size, (rows, length), np.int64)

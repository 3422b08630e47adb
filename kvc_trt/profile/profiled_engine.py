"""Time an engine and its dense twin in turn, so that a drift of the machine affects both alike.

Caches are filled without a prefill, so that decode can be timed at lengths whose prefill would take minutes.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from kvc_trt.backends.benchmark import Benchmark, Peak, prefill_seconds
from kvc_trt.engine.program import twin_program
from kvc_trt.graph.state import cache_sites
from kvc_trt.models.cache_formats import FP8, INT8
from kvc_trt.models.dtypes import numpy_dtype
from kvc_trt.operators.cached_vectors import cached_vectors
from kvc_trt.operators.schema import part_names, vector_of
from kvc_trt.operators.tensors import K_CACHE, V_CACHE
from kvc_trt.profile.statistics import Summary, summarise
from kvc_trt.profile.traffic import entries_by_cache
from kvc_trt.runtime.executor import GreedyExecutor

if TYPE_CHECKING:
    from kvc_trt.engine.program import Program
    from kvc_trt.graph.state import CacheSite, StateTensor
    from kvc_trt.methods.base.parameters import PolicyParameters
    from kvc_trt.models.cache_formats import VectorFormat

Array = NDArray[Any]


def cache_rows(sites: Sequence[CacheSite], state: Sequence[StateTensor], entries: Sequence[int]) -> dict[str, Array]:
    """Return one row of every state tensor of a step: `entries[cache]` random keys and values, and further state.

    Layers and rows of one shape hold the same numbers: a step's time does not depend on the values. Further state is
    computed from keys and values, so that pages and tokens differ in score.
    """
    made: dict[tuple[object, ...], dict[str, Array]] = {}
    rows: dict[str, Array] = {}
    for site in sites:
        in_step = (tensor for tensor in state if tensor.cache == site.cache and tensor.in_step)
        tensors = {tensor.name.partition(".")[0]: tensor for tensor in in_step}
        count = entries[site.cache]
        identity = (tensors["k_cache"].shape, count, site.parameters)
        if identity not in made:
            made[identity] = _row(tensors, count, site.parameters)
        rows.update({tensor.name: made[identity][kind] for kind, tensor in tensors.items()})
    return rows


def _row(tensors: Mapping[str, StateTensor], count: int, rule: PolicyParameters) -> dict[str, Array]:
    """Return the tensors of one cache, by their kind."""
    rows: dict[str, Array] = {}
    more_vectors = (tensor for tensor in rule.selection.state if tensor.stored in ("keys", "values"))
    for seed, tensor in enumerate((K_CACHE, V_CACHE, *more_vectors)):
        vector = vector_of(tensor, rule.cache_format)
        parts = [tensors[name] for name in part_names(tensor, vector)]
        rows |= zip(part_names(tensor, vector), _random_parts(parts, vector, count, seed), strict=True)
    keys, values = (cached_vectors(rows, tensor, rule.cache_format) for tensor in (K_CACHE, V_CACHE))
    lengths = np.array([count])
    others = rule.selection.state_of(keys.values()[None], values.values()[None], lengths, rule)
    batch = keys.map(lambda part: part[None])
    for kind, make in rule.selection.rebuilt.items():
        others[kind] = make(batch, lengths, rule, numpy_dtype(tensors[kind].dtype))
    return {kind: made[0] for kind, made in others.items()} | rows


def _random_parts(parts: Sequence[StateTensor], form: VectorFormat | None, count: int, seed: int) -> list[Array]:
    """Return the first `count` of random vectors of about unit variance, in their format; the other slots hold 0."""
    (heads, slots), size = parts[0].shape[:2], (parts[0].shape[0], count, parts[0].shape[2])
    random = np.random.default_rng(seed)
    content: list[Any]
    if form is None:
        content = [random.standard_normal(size, np.float32)]
    elif form == FP8:
        codes = (random.standard_normal(size, np.float32) * 64).astype(numpy_dtype("float8_e4m3fn"))
        content = [codes.view(np.int8), 127 - 6]
    elif form == INT8:
        content = [np.clip(np.rint(random.standard_normal(size, np.float32) * 32), -127, 127), 1 / 32]
    else:
        content = [random.integers(-128, 128, size), 1 / 4, -15 / 8]
    made = [np.zeros((heads, slots, *part.shape[2:]), numpy_dtype(part.dtype)) for part in parts]
    for table, part in zip(made, content, strict=True):
        table[:, :count] = part
    return made


BLOCK = 10
"""Steps of one side before the other has its turn; the one before them warms the caches and is not counted."""
LEAST_BLOCKS = 2


@dataclass(frozen=True)
class ProfiledEngine:
    """One side of a measurement and its name in the result (`engine`, `dense`)."""

    name: str
    program: Program
    executor: Any
    benchmark: Benchmark

    @property
    def parameters(self) -> PolicyParameters:
        """The policy parameters of its graphs."""
        return self.program.parameters

    def prefill_seconds(self, prompts: NDArray[np.int64]) -> float:
        """Time one prefill of `prompts` [B, S] (all S tokens real) in seconds; its result is dropped."""
        return prefill_seconds(self.executor, prompts)


def open_profiled(name: str, program: Program, benchmark: Benchmark) -> ProfiledEngine:
    """Open an executor of a program on the benchmark's device."""
    return ProfiledEngine(name, program, benchmark.open(program), benchmark)


def twin_for(program: Program, context: int) -> Program:
    """Return the dense twin for prompts of `context` tokens.

    Its caches have the length of a dense engine built for that context, so it never reads slots that only a longer
    prompt would fill.
    """
    return twin_program(replace(program, parameters=replace(program.parameters, max_input_len=context)))


class DecodeRun:
    """Decode steps of `rows` rows with prompts of `context` tokens and synthetic caches."""

    def __init__(self, profiled: ProfiledEngine, rows: int, context: int) -> None:
        self.profiled = profiled
        self._context = context
        self._tokens = np.zeros(rows, np.int64)
        self._generated = 0
        entries = entries_by_cache(profiled.program.model, profiled.parameters, context)
        self._lengths = np.tile(np.array(entries, np.int64)[:, None], (1, rows))
        executor = profiled.executor
        self._decode = executor.decode_greedy if isinstance(executor, GreedyExecutor) else executor.decode
        executor.allocate(rows)
        sites = cache_sites(profiled.program.model, profiled.parameters)
        rows_of = cache_rows(sites, profiled.program.state, entries)
        profiled.benchmark.fill(profiled.executor, rows_of)

    def step_seconds(self) -> float:
        """Time one step in seconds. After max_output_len steps the rows start again after their prompts.

        A step is that of a greedy session: an executor that finds the best tokens itself returns nothing else.
        """
        positions = np.full(len(self._tokens), self._context + self._generated, np.int64)
        lengths = self._lengths + self._generated
        started = time.perf_counter()
        self._decode(self._tokens, positions, lengths)
        seconds = time.perf_counter() - started
        self._generated = (self._generated + 1) % self.profiled.parameters.max_output_len
        return seconds


def random_prompts(rows: int, length: int, vocab_size: int, seed: int = 0) -> NDArray[np.int64]:
    """Return seeded token ids [rows, length]; their values do not change the time of a prefill."""
    return np.random.default_rng(seed).integers(0, vocab_size, (rows, length), np.int64)


@dataclass(frozen=True)
class DecodeTimes:
    """Times of the steps of one side, in seconds."""

    steps: Summary
    """Every counted step: inter-token latency."""
    blocks: Summary
    """Means of blocks of steps: time per output token."""


def time_decode(runs: Sequence[DecodeRun], steps: int, seconds: float) -> list[DecodeTimes]:
    """Time at least `steps` steps of every run in alternating blocks, or as many as fit in `seconds` altogether.

    At least two blocks of every run are timed.
    """
    samples: list[list[list[float]]] = [[] for _ in runs]
    size = min(BLOCK, steps)
    started = time.perf_counter()
    for block in range(max(LEAST_BLOCKS, -(-steps // size))):
        if block >= LEAST_BLOCKS and time.perf_counter() - started > seconds:
            break
        for run, blocks in zip(runs, samples, strict=True):
            blocks.append(time_block(run, size))
    return [_decode_times(blocks) for blocks in samples]


def time_block(run: DecodeRun, steps: int = BLOCK) -> list[float]:
    """Return the seconds of each of `steps` steps, after one more that is not counted."""
    run.step_seconds()
    return [run.step_seconds() for _ in range(steps)]


def _decode_times(blocks: list[list[float]]) -> DecodeTimes:
    means = [sum(block) / len(block) for block in blocks]
    return DecodeTimes(summarise([sample for block in blocks for sample in block]), summarise(means))


@dataclass(frozen=True)
class PrefillTimes:
    """Times of the prefills of one side."""

    seconds: Summary
    peak: Peak
    """Peak memory of the first prefill, which is not timed."""


def time_prefill(sides: Sequence[ProfiledEngine], prompts: NDArray[np.int64], repeats: int) -> list[PrefillTimes]:
    """Run one prefill of each side to warm up and measure memory, then time `repeats` of each in turn."""
    peaks = []
    for side in sides:
        side.executor.load()  # before memory is measured
        with side.benchmark.watch(side.executor) as peak:
            side.prefill_seconds(prompts)
        peaks.append(peak)
    samples: list[list[float]] = [[] for _ in sides]
    for _ in range(repeats):
        for side, seconds in zip(sides, samples, strict=True):
            seconds.append(side.prefill_seconds(prompts))
    return [PrefillTimes(summarise(seconds), peak) for seconds, peak in zip(samples, peaks, strict=True)]

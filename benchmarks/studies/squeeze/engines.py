"""Speed, memory and cost of SqueezeAttention in engines on ONNX Runtime: its tables 3, 4, 5 and 9 (arXiv 2404.04793).

Sides are StreamingLLM with the paper's budgets for equal answers, 20 % of the prompt divided between layers and 30 %
undivided, and the whole cache. Steps run on caches of a real prompt, in turns, so that a drift of the machine affects
all sides alike. Times are those of the processor, which other work on the machine changes little.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch

from benchmarks.accuracy.formats.divergence import plain_text
from benchmarks.studies.layer_importance.measure import cosines
from benchmarks.studies.records import Records
from benchmarks.studies.study import Run, measure_lacking
from benchmarks.studies.watched import StudyModel
from kvc_trt.accuracy.grid import Variant
from kvc_trt.accuracy.under_test.model_under_test import Room
from kvc_trt.accuracy.under_test.policy_engines import PolicyEngines, open_model
from kvc_trt.backends.onnxruntime.benchmark import function_times
from kvc_trt.backends.onnxruntime.executor import OnnxRuntimeExecutor
from kvc_trt.backends.run_options import RunOptions
from kvc_trt.files.cache import scratch_directory
from kvc_trt.operators.compaction.layer_budgets import LAYER_BUDGETS
from kvc_trt.policies import BASELINE
from kvc_trt.profile.engine_weights import engine_weight_bytes
from kvc_trt.profile.model_size import cache_itemsize, token_cache_bytes
from kvc_trt.reference.model.squeeze import squeeze
from kvc_trt.runtime.session.batch import batch_of

STEPS, MEMORY, COST = "steps", "memory", "cost"
"""Parts of the study that need engines."""
POLICY = "streaming-llm"
ONLINE = f"{POLICY}:layer_budget=squeeze-online"
PROMPT, ANSWER = 512, 1024
"""Tokens of the paper's prompts and answers."""
HALFWAY = PROMPT + ANSWER // 2
"""Tokens that the whole cache holds in the middle of an answer: those of the prompt whose steps are timed."""
NEW = 64
"""Tokens for which engines whose steps are timed have room, behind HALFWAY."""
SIDES: dict[str, tuple[str, float]] = {
    "whole cache": (BASELINE, 1.0),
    "uniform 30 %": (POLICY, 0.3),
    "uniform 20 %": (POLICY, 0.2),
    "squeeze-online 20 %": (ONLINE, 0.2),
}
"""Policies, and the shares of PROMPT that a layer keeps on average."""
BATCHES = (1, 4, 16, 32)
BLOCK, BLOCKS = 5, 4
"""Steps of one side before the next has its turn, and turns; the step before them warms caches and is not counted."""
COST_TOKENS = (512, 1024)
PAIRS = 20
"""Prefills with and without budgets by layer that are compared."""
REPEATS = 5


@dataclass
class Engines:
    """Programs of all sides, over weights that are written when they are first needed."""

    run: Run
    stack: ExitStack

    @cached_property
    def _opened(self) -> PolicyEngines:
        model = open_model(self.run.model, checkpoint=self.run.checkpoint, weights="fp32")
        return self.stack.enter_context(model)

    def program(self, side: str, room: Room) -> Any:
        """Return the graphs of a side whose budget is a share of PROMPT tokens."""
        policy, share = SIDES[side]
        return self._opened.program(Variant.of(policy, int(share * PROMPT)), room)

    def executor(self, side: str, room: Room, **options: Any) -> OnnxRuntimeExecutor:
        """Return an executor of a side with one thread, or as many as PyTorch has."""
        return OnnxRuntimeExecutor(self.program(side, room), RunOptions(threads=torch.get_num_threads()), **options)


class Side:
    """One side after a real prompt, in as many rows as a batch has."""

    def __init__(self, engines: Engines, name: str, prompt: Sequence[int]) -> None:
        self._executor = engines.executor(name, Room(len(prompt), NEW))
        padded = batch_of([prompt], self._executor.limits.prompt_block)
        self._prefilled = self._executor.prefill(padded.input_ids, padded.prompt_lengths)
        self._prompt = len(prompt)

    def fill(self, rows: int) -> None:
        """Take the prompt's caches in every row."""
        self._executor.allocate(rows)
        for row in range(rows):
            self._executor.insert(self._prefilled, 0, row)
        self._rows, self._generated = rows, 0

    def step(self) -> float:
        """Run one step of all rows; return seconds of the processor."""
        positions = np.full(self._rows, self._prompt + self._generated, np.int64)
        lengths = np.tile(self._prefilled.cache_lengths[:, :1], (1, self._rows)) + self._generated
        tokens = np.zeros(self._rows, np.int64)
        self._generated += 1
        return _seconds(lambda: self._executor.decode(tokens, positions, lengths))

    def free(self) -> None:
        """Give back the memory of all rows but one."""
        self._executor.allocate(1)


def in_turns(steps: Mapping[str, Callable[[], float]]) -> dict[str, list[float]]:
    """Time all sides in blocks, by turns; return milliseconds of a side's steps."""
    found: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(BLOCKS):
        for name, step in steps.items():
            step()
            found[name] += [1000 * step() for _ in range(BLOCK)]
    return found


def timed(engines: Engines, opened: dict[str, Side], prompt: Sequence[int], batch: int) -> dict[str, Any]:
    """Time steps of a batch on every side."""
    for name in SIDES:
        if name not in opened:
            opened[name] = Side(engines, name, prompt)
        opened[name].fill(batch)
    found = in_turns({name: opened[name].step for name in SIDES})
    for side in opened.values():
        side.free()
    return {"milliseconds": found}


def counted(engines: Engines) -> dict[str, Any]:
    """Count the bytes of weights and of a row, as `kvc-trt plan` does, for the paper's prompts and answers.

    `row` is the bytes that an engine allocates, `used` the part that the budgets of a prompt fill.
    """
    room, weights, row, used = Room(PROMPT, ANSWER), 0, {}, {}
    for name in SIDES:
        program = engines.program(name, room)
        itemsize = cache_itemsize(program.weight_format)
        weights = round(engine_weight_bytes(program, program.weight_format).resident)
        row[name] = sum(tensor.bytes_per_row() for tensor in program.state)
        token = program.model.num_hidden_layers * token_cache_bytes(program.model, itemsize)
        used[name] = token * program.parameters.in_the_mean.capacity
    return {"weights": weights, "row": row, "used": used}


def costs(engines: Engines, prompt: Sequence[int], layers: Sequence[float]) -> dict[str, Any]:
    """Time prefills with and without budgets by layer in turns, and the cosines and the division alone."""
    room = Room(len(prompt), NEW)
    sides = {kind: engines.executor(f"{kind} 20 %", room) for kind in ("uniform", "squeeze-online")}

    def prefill(executor: OnnxRuntimeExecutor) -> float:
        padded = batch_of([prompt], executor.limits.prompt_block)
        return _seconds(lambda: executor.prefill(padded.input_ids, padded.prompt_lengths))

    for executor in sides.values():
        prefill(executor)
    pairs: dict[str, list[float]] = {kind: [] for kind in sides}
    for pair in range(PAIRS):
        for kind in sides if pair % 2 == 0 else reversed(sides):
            pairs[kind].append(prefill(sides[kind]))
    program = engines.program("squeeze-online 20 %", room)
    rule = program.parameters.division
    assert rule is not None
    size = 2, len(prompt), program.model.hidden_size
    before, after = torch.randn(size, generator=torch.Generator().manual_seed(0))
    cosine = [_seconds(lambda: torch.cosine_similarity(before, after, dim=-1).mean()) for _ in range(REPEATS * 4)]
    limits = {"share": rule.share, "minimum": rule.least, "maximum": rule.most}
    division = [_seconds(lambda: squeeze(layers, rule.budget, **limits)) for _ in range(REPEATS)]
    return {
        "prefill_seconds": pairs,
        "cosine_milliseconds_of_a_layer": 1000 * statistics.median(cosine),
        "division_milliseconds": 1000 * statistics.median(division),
        "division_in_the_graph_milliseconds": 1000 * _division_in_the_graph(engines, prompt, room),
    }


def _division_in_the_graph(engines: Engines, prompt: Sequence[int], room: Room) -> float:
    """Return the seconds of the operator that divides, in ONNX Runtime's own profile of a second prefill."""
    with scratch_directory("study") as directory:
        executor = engines.executor("squeeze-online 20 %", room, profile=directory)
        padded = batch_of([prompt], executor.limits.prompt_block)
        for _ in range(2):
            executor.prefill(padded.input_ids, padded.prompt_lengths)
        return function_times(executor.end_profiling()["prefill"], LAYER_BUDGETS.name)[1].part


def _seconds(work: Callable[[], object]) -> float:
    started = time.process_time()
    work()
    return time.process_time() - started


def measure(run: Run, kept: Records, model: StudyModel) -> None:
    """Measure the missing records."""
    text = model.tokenizer.encode(plain_text())
    opened: dict[str, Side] = {}
    with ExitStack() as stack:
        engines = Engines(run, stack)

        def of_key(key: Mapping[str, Any]) -> dict[str, Any]:
            if key["part"] == STEPS:
                return timed(engines, opened, text[:HALFWAY], key["batch"])
            if key["part"] == MEMORY:
                return counted(engines)
            prompt = text[: key["tokens"]]
            return costs(engines, prompt, cosines(model, prompt).mean(dim=1).tolist())

        measure_lacking(run, kept, keys(model), of_key)


def keys(model: StudyModel) -> Iterator[Mapping[str, Any]]:
    """Yield the keys of all measurements."""
    head = {"model": model.name, "checkpoint": model.fingerprint, "sides": list(SIDES)}
    yield {**head, "part": MEMORY, "prompt": PROMPT, "answer": ANSWER}
    for batch in BATCHES:
        yield {**head, "part": STEPS, "prompt": HALFWAY, "batch": batch, "threads": torch.get_num_threads()}
    for tokens in COST_TOKENS:
        yield {**head, "part": COST, "tokens": tokens, "pairs": PAIRS, "threads": torch.get_num_threads()}

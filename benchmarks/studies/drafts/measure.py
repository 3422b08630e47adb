"""Drafts under SnapKV over the length of a prompt, in the place of its Medusa study (arXiv 2404.14469, appendix A).

    python -m benchmarks.studies drafts [--minutes 60] [--count 2] [--long]

Medusa's heads have to be trained; drafts come from repeated text here (docs/speculation.md). Each prompt is answered
greedily four times: under SnapKV and the whole cache, step by step and with drafts, from one prefill. Times are from an
answer's first token to its last.
"""

from __future__ import annotations

import dataclasses
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch

from benchmarks.accuracy.formats.divergence import plain_text
from benchmarks.speculate import COPIES
from benchmarks.studies.records import Records
from benchmarks.studies.study import Run, measure_lacking
from benchmarks.studies.texts import Document
from kvc_trt.accuracy.grid import Variant
from kvc_trt.accuracy.under_test.model_under_test import Room
from kvc_trt.accuracy.under_test.policy_engines import ChosenModel, choose
from kvc_trt.backends.base import ProgramRunner
from kvc_trt.backends.registry import program_backend
from kvc_trt.backends.run_options import RunOptions
from kvc_trt.engine.format import WEIGHTS_FILE
from kvc_trt.engine.program import policy_program
from kvc_trt.files.cache import scratch_directory
from kvc_trt.files.held import HeldFile
from kvc_trt.graph.build import build_draft
from kvc_trt.graph.weights import GraphWeights
from kvc_trt.policies import BASELINE
from kvc_trt.runtime import Request
from kvc_trt.runtime.session.session import Session
from kvc_trt.runtime.speculation.settings import Speculation
from kvc_trt.tasks import framing

NAME = "drafts"
CAPACITY = 1024
"""Tokens of a prompt that SnapKV keeps for each query head, as in the paper's study of speed-ups."""
TOKENS = 128
"""Tokens of an answer, as in the paper."""
DRAFT = 4
SIDES = {"snapkv": f"snapkv:prompt_budget={CAPACITY}", "full": BASELINE}
LENGTHS = {False: (2048, 4096), True: (2048, 4096, 8000)}
"""Tokens of prompt and answer, without and with --long."""
COPY, SUMMARY = TASKS = ("repeat a text", "summarise")
SUMMARISE = "Summarise the text in three sentences."
PROMPTS = 2
"""Prompts of each task and length that are answered unless asked otherwise."""
PLAIN, SPECULATING = WAYS = ("step by step", "with drafts")
WARM_UP = 8
"""Tokens of an answer that is not counted: passes are timed, and memory is touched."""


def asked(chosen: ChosenModel, task: str, index: int, length: int) -> list[int]:
    """Return a prompt: a piece of Python's documentation, followed by the instruction.

    The piece is the longest with which prompt and answer have at most `length` tokens.
    """
    assert chosen.tokenizer is not None
    inner = chosen.tokenizer.tokenizer
    framed = framing.plain(inner) if chosen.template is None else framing.chat(inner, chosen.template)
    instruction = COPIES[index % len(COPIES)] if task == COPY else SUMMARISE
    ids = chosen.tokenizer.encode(plain_text())
    start, room = index * max(length, len(ids) // 101) % (len(ids) - length), length - TOKENS

    def prompt(size: int) -> list[int]:
        return Document(str(inner.decode(list(ids[start : start + size]))), ()).prompt(framed, instruction)

    return prompt(bisect_right(range(4 * length), room, key=lambda size: len(prompt(size))) - 1)


def opened(
    chosen: ChosenModel, runner: ProgramRunner, weights: HeldFile, policy: str, way: str, length: int
) -> Session:
    """Return a session of one row under a policy, for prompt and answer of a length together."""
    variant, room = Variant.of(policy, None), Room(length - TOKENS, TOKENS)
    parameters = chosen.resolved(variant, room).parameters
    program = policy_program(chosen.config, parameters, weights, turns=False)

    def draft() -> Any:
        return build_draft(chosen.config, parameters, weights=GraphWeights(weights), tokens=1 + DRAFT)

    program = dataclasses.replace(program, draft=draft, draft_tokens=DRAFT)
    return Session(runner.open(program), None, 1, speculation=Speculation(DRAFT) if way == SPECULATING else None)


def answer(session: Session, prompt: Sequence[int], tokens: int) -> dict[str, Any]:
    """Answer a prompt greedily; count from the first token to the last."""
    before, began, own = dataclasses.asdict(session.timings), 0.0, 0.0
    found: list[int] = []
    for _, event in session.stream([Request(list(prompt), max_new_tokens=tokens, ignore_eos=True)]):
        if not found:
            began, own = time.perf_counter(), time.process_time()
        found.append(event.token_id)
    seconds, processor = time.perf_counter() - began, time.process_time() - own
    after = dataclasses.asdict(session.timings)
    counted = {
        name: after[field] - before[field]
        for name, field in (("passes", "draft_runs"), ("drafted", "drafted_tokens"), ("accepted", "accepted_tokens"))
    }
    return {"tokens": found, "seconds": seconds, "processor_seconds": processor, **counted}


def answered(open_session: Callable[[str, str], Session], prompt: Sequence[int]) -> dict[str, Any]:
    """Answer one prompt on both sides in both ways; return the counts, without the tokens."""
    measured: dict[str, Any] = {"prompt_tokens": len(prompt)}
    sessions = {
        (side, way): open_session(side, way) for side in SIDES for way in WAYS
    }  # all, so that one prefill serves
    for side in SIDES:
        found = {}
        for way in WAYS:
            answer(sessions[side, way], prompt, WARM_UP)
            found[way] = answer(sessions[side, way], prompt, TOKENS)
        tokens = [found[way].pop("tokens") for way in WAYS]
        measured[side] = {**found, "same_tokens": sum(one == other for one, other in zip(*tokens, strict=True))}
    return measured


def measure(run: Run, kept: Records) -> None:
    """Measure the missing records, prompt by prompt."""
    chosen = choose(run.model, checkpoint=run.checkpoint, weights="fp32")
    wanted = list(keys(chosen, run))
    with ExitStack() as stack:
        directory = stack.enter_context(scratch_directory("study"))
        if any(kept.lacks(key) for key in wanted):
            chosen.write(directory / WEIGHTS_FILE, max(LENGTHS[True]))
        weights = HeldFile(directory / WEIGHTS_FILE)

        def of_key(key: Mapping[str, Any]) -> dict[str, Any]:
            options = RunOptions(threads=torch.get_num_threads())
            runner = program_backend().program_runner(directory, options, share_prefill=True)
            length = key["length"]

            def open_session(side: str, way: str) -> Session:
                return opened(chosen, runner, weights, SIDES[side], way, length)

            return answered(open_session, asked(chosen, key["task"], key["index"], length))

        measure_lacking(run, kept, wanted, of_key)


def keys(chosen: ChosenModel, run: Run) -> Iterator[Mapping[str, Any]]:
    """Yield the keys of all measurements, in an order that leaves a stopped run with about as many of each kind."""
    head = {
        "model": chosen.choice.name, "checkpoint": chosen.source.weights.fingerprint(), "capacity": CAPACITY,
        "tokens": TOKENS, "draft": DRAFT, "threads": torch.get_num_threads(),
    }  # fmt: skip
    for index in range(run.count or PROMPTS):
        for length in LENGTHS[run.long]:
            for task in TASKS:
                yield {**head, "length": length, "task": task, "index": index}

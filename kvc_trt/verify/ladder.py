"""Verification of an engine: a ladder of evidence, from single operators up to a task, and two controls.

    report = verify(Engine.open("engines/tiny"), level="quick")
    print(report.as_text()); sys.exit(not report.passed)

Each rung answers what the one below it cannot: operators may be right and wired wrongly, logits may be close and tokens
differ, tokens may match and the task be lost to the budget.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from kvc_trt.errors import InputError, VerificationFailed
from kvc_trt.graph.weights import GraphWeights
from kvc_trt.kernels import use_library
from kvc_trt.progress import NullProgress, Progress
from kvc_trt.verify.controls import check_activity, check_dense_twin
from kvc_trt.verify.logits import check_logits
from kvc_trt.verify.near_ties import IndexComparison
from kvc_trt.verify.ops import check_operators, index_check
from kvc_trt.verify.plan import CONTROLS, RUNGS, Plan, make_plan
from kvc_trt.verify.report import Check, Report, Rung, at_most
from kvc_trt.verify.retrieval import check_retrieval
from kvc_trt.verify.subject import Subject
from kvc_trt.verify.target import target_for
from kvc_trt.verify.thresholds import thresholds_for
from kvc_trt.verify.tokens import check_tokens

if TYPE_CHECKING:
    from kvc_trt.engine import Engine


def verify(
    engine: Engine,
    *,
    level: str = "quick",
    backend: str = "onnxruntime",
    kernels: str | Path | None = None,
    steps: int | None = None,
    samples: int | None = None,
    checkpoint: str | Path | None = None,
    seed: int = 0,
    progress: Progress | None = None,
) -> Report:
    """Check an opened engine against the PyTorch reference and say what was found.

    `level` is quick, full, or one rung (ops, logits, tokens, retrieval); `steps` and `samples` override its sizes;
    `checkpoint` is a Hugging Face directory with the unquantised weights. `backend` runs the engine: onnxruntime its
    graphs, torch its weights with the kernels of library `kernels` (None: KVC_TRT_KERNELS, the package's own, or the
    reference on the CPU). A failed check is in the report, not raised. Raises InputError for a request that cannot be
    right.
    """
    if kernels is not None and backend != "torch":
        raise InputError(f"--kernels {kernels}: --backend {backend} does not call it", hint="--backend torch")
    started = time.monotonic()
    plan = make_plan(level, engine.model, engine.parameters, steps=steps, samples=samples)
    bars = thresholds_for(GraphWeights(engine.weights_path).precision)
    directory = None if checkpoint is None else Path(checkpoint)
    with contextlib.nullcontext() if kernels is None else use_library(kernels):
        target = target_for(backend, engine, plan.threads)
        subject = Subject(
            engine, target, plan, bars, progress or NullProgress(), seed=seed, checkpoint_directory=directory
        )
        report = _empty_report(subject)
        with _torch_threads(plan.threads):
            for name in (*RUNGS, *CONTROLS):
                if name in (*plan.rungs, *plan.controls):
                    report.rungs.append(_climb(name, subject))
                elif level in ("quick", "full"):
                    report.left_out.append(_left_out(name, plan))
    report.seconds = time.monotonic() - started
    return report


def _empty_report(subject: Subject) -> Report:
    """What is verified, and the figures that the rungs will fill in."""
    engine, parameters = subject.engine, subject.engine.parameters
    return Report(
        engine=str(engine.path),
        level=subject.plan.level,
        description={
            "model": engine.build.model,
            "policy": parameters.policy,
            "weights": GraphWeights(engine.weights_path).precision,
            "token_budget": parameters.token_budget,
            "max_input_len": parameters.max_input_len,
            "max_output_len": parameters.max_output_len,
            "seed": subject.seed,
            **subject.target.describe(),
        },
        thresholds=subject.thresholds.to_json(),
        halves=subject.halves,
        near_ties=subject.near_ties,
        memory=subject.memory,
        findings=subject.findings,
    )


@contextlib.contextmanager
def _torch_threads(threads: int | None) -> Iterator[None]:
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(threads or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _climb(name: str, subject: Subject) -> Rung:
    rung = Rung(name)
    started = time.monotonic()
    with subject.progress.task(f"verify: {name}", None):
        try:
            _STEPS[name](subject, rung)
        except VerificationFailed as error:
            rung.checks.append(Check("runs to its end", "the whole rung", "no", "yes", False, error.message))
    rung.seconds = time.monotonic() - started
    return rung


def _operators(subject: Subject, rung: Rung) -> None:
    with subject.phase("operators"):
        checks, compared = check_operators(subject.engine, subject.target, subject.thresholds, seed=subject.seed)
    rung.checks += checks
    observed = subject.observed
    seen, expected = observed.kept.keys() | observed.read.keys(), subject.choosing_caches()
    if expected:
        missing = at_most("caches without their operator", f"{len(expected)} caches", len(expected - seen), 0)
        rung.checks.append(missing)
    for what, found in (("kept by KvcCompact", observed.compaction), ("read by a step", observed.selection)):
        if found.compared:
            rung.checks.append(index_check(f"tokens {what}, in the engine", found, "on the inputs it really got"))
    if observed.selection.compared:
        bar = subject.thresholds.value_error
        sample = f"{observed.selection.compared} lists"
        rung.checks.append(at_most("values of such a step, in the engine", sample, observed.output_error, bar))
    _count(subject, compared + observed.compaction + observed.selection)


def _count(subject: Subject, found: IndexComparison) -> None:
    ties = subject.near_ties
    ties.lists_compared += found.compared
    ties.lists_admitted += found.near_ties
    ties.tokens_swapped += found.swapped_tokens


def _logits(subject: Subject, rung: Rung) -> None:
    rung.checks += check_logits(subject)


def _tokens(subject: Subject, rung: Rung) -> None:
    rung.checks += check_tokens(subject)


_STEPS: dict[str, Callable[[Subject, Rung], None]] = {
    "ops": _operators,
    "logits": _logits,
    "tokens": _tokens,
    "retrieval": check_retrieval,
    "dense twin": check_dense_twin,
    "activity": check_activity,
}


def _left_out(name: str, plan: Plan) -> str:
    tokens = plan.longest_prompt + plan.steps
    return f"{name}: a model of this size is checked on {tokens} tokens at quick level; --level full runs everything"

"""Verification of an engine: a ladder of evidence, from single operators up to a task, and two controls.

    report = verify(open_engine("engines/tiny"), level="quick")
    print(report.as_text()); sys.exit(not report.passed)

Each rung finds errors that the one below it cannot: operators may be right and wired wrongly, logits may be close while
tokens differ, and tokens may match while the budget is too small for the task.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from kvc_trt.backends import registry
from kvc_trt.backends.opening import harness_for
from kvc_trt.backends.run_options import DEFAULTS, RunOptions
from kvc_trt.errors import InputError, VerificationFailed
from kvc_trt.graph.weights import GraphWeights
from kvc_trt.kernels import use_library
from kvc_trt.models.formats import open_checkpoint, weights_of
from kvc_trt.models.weights import check_weights
from kvc_trt.progress import NullProgress, Progress
from kvc_trt.reference.model.threads import torch_threads
from kvc_trt.verify.checks import Check, Rung, at_most
from kvc_trt.verify.engine_under_test import EngineUnderTest
from kvc_trt.verify.plan import CODES, CONTROLS, RUNGS, Plan, make_plan
from kvc_trt.verify.rankings.index_lists import IndexComparison
from kvc_trt.verify.report import Report
from kvc_trt.verify.rungs.codes import check_codes
from kvc_trt.verify.rungs.controls import check_activity, check_dense_twin
from kvc_trt.verify.rungs.logits import check_logits
from kvc_trt.verify.rungs.operators import check_operators, index_check
from kvc_trt.verify.rungs.retrieval import check_retrieval
from kvc_trt.verify.rungs.tokens import check_tokens
from kvc_trt.verify.thresholds import thresholds_for

if TYPE_CHECKING:
    from kvc_trt.engine import EngineDirectory


def verify(
    engine: EngineDirectory,
    options: RunOptions = DEFAULTS,
    *,
    level: str = "quick",
    kernels: str | Path | None = None,
    steps: int | None = None,
    samples: int | None = None,
    checkpoint: str | Path | None = None,
    seed: int = 0,
    progress: Progress | None = None,
) -> Report:
    """Check an opened engine against the PyTorch reference and return a report.

    `level` is quick, full, or one rung (ops, codes, logits, tokens, retrieval); `steps` and `samples` override its
    sizes; `checkpoint` is a Hugging Face directory or GGUF file with the unquantised weights. A backend that calls
    kernels takes those of library `kernels` (None: KVC_TRT_KERNELS, the package's own, or the reference on the CPU).
    The number of threads follows from the model's size, not from the options; PyTorch's also depends on the machine's
    load. A failed check is in the report, not raised. Raises InputError for a request that cannot be right.
    """
    backend = options.backend or registry.runner(engine.backend)
    if kernels is not None and not registry.backend(backend).calls_kernels:
        able = [f"--backend {name}" for name, each in registry.backends().items() if each.calls_kernels]
        raise InputError(f"--kernels {kernels}: --backend {backend} does not call it", hint=" or ".join(able))
    started = time.monotonic()
    plan = make_plan(level, engine.model, engine.parameters, steps=steps, samples=samples)
    bars = thresholds_for(GraphWeights(engine.weight_file).precision, options.prefill_precision)
    options = replace(options, backend=backend, threads=plan.threads)
    directory = None if checkpoint is None else Path(checkpoint)
    if directory is not None:
        # Its rung comes after seconds or minutes of others: a wrong path is refused before them.
        check_weights(engine.model, weights_of(open_checkpoint(directory)))
    with contextlib.nullcontext() if kernels is None else use_library(kernels):
        target = harness_for(engine, options)
        tested = EngineUnderTest(
            engine,
            target,
            plan,
            bars,
            progress or NullProgress(),
            seed=seed,
            options=options,
            checkpoint_directory=directory,
        )
        report = _empty_report(tested)
        for name in (*RUNGS, *CONTROLS):
            if name in (*plan.rungs, *plan.controls):
                report.rungs.append(_climb(name, tested))
            elif level in ("quick", "full") and (name != CODES or tested.has_codes):
                report.left_out.append(_left_out(name, plan))
    report.seconds = time.monotonic() - started
    return report


def _empty_report(tested: EngineUnderTest) -> Report:
    """Return a report that describes the verification, whose figures the rungs fill in."""
    engine, parameters = tested.engine, tested.engine.parameters
    precision = tested.options.prefill_precision
    return Report(
        engine=str(engine.path),
        level=tested.plan.level,
        description={
            "model": engine.build.model,
            "policy": parameters.policy,
            "weights": GraphWeights(engine.weight_file).precision,
            "token_budget": parameters.token_budget,
            "max_input_len": parameters.max_input_len,
            "max_output_len": parameters.max_output_len,
            "seed": tested.seed,
            "samples": tested.plan.samples,
            "steps": tested.plan.steps,
            **({} if parameters.cache_format.keys is None else {"kv_cache": parameters.kv_cache}),
            **({} if precision == "f32" else {"prefill": precision}),
            **tested.target.describe(),
        },
        thresholds=tested.thresholds.to_json(),
        halves=tested.halves,
        near_ties=tested.near_ties,
        memory=tested.memory,
        findings=tested.findings,
    )


def _climb(name: str, tested: EngineUnderTest) -> Rung:
    rung = Rung(name)
    started = time.monotonic()
    with torch_threads(tested.plan.threads), tested.progress.task(f"verify: {name}", None):
        try:
            _STEPS[name](tested, rung)
        except VerificationFailed as error:
            rung.checks.append(Check("runs to its end", "the whole rung", "no", "yes", False, error.message))
    rung.seconds = time.monotonic() - started
    return rung


def _operators(tested: EngineUnderTest, rung: Rung) -> None:
    with tested.phase("operators"):
        checks, compared = check_operators(
            tested.engine,
            tested.target,
            tested.thresholds,
            seed=tested.seed,
            options=tested.options,
        )
    rung.checks += checks
    observed = tested.observed
    seen, expected = observed.kept.keys() | observed.read.keys(), tested.choosing_caches()
    if expected:
        missing = at_most("caches without their operator", f"{len(expected)} caches", len(expected - seen), 0)
        rung.checks.append(missing)
    for what, found in (("kept by KvcCompact", observed.compaction), ("read by a step", observed.selection)):
        if found.compared:
            rung.checks.append(index_check(f"tokens {what}, in the engine", found, "on the inputs it really got"))
    if observed.selection.compared:
        bar = tested.thresholds.value_error
        sample = f"{observed.selection.compared} lists"
        rung.checks.append(at_most("values of such a step, in the engine", sample, observed.output_error, bar))
    _count(tested, compared + observed.compaction + observed.selection)


def _count(tested: EngineUnderTest, found: IndexComparison) -> None:
    ties = tested.near_ties
    ties.lists_compared += found.compared
    ties.lists_admitted += found.near_ties
    ties.tokens_swapped += found.swapped_tokens


def _logits(tested: EngineUnderTest, rung: Rung) -> None:
    rung.checks += check_logits(tested)


def _tokens(tested: EngineUnderTest, rung: Rung) -> None:
    rung.checks += check_tokens(tested)


_STEPS: dict[str, Callable[[EngineUnderTest, Rung], None]] = {
    "ops": _operators,
    CODES: check_codes,
    "logits": _logits,
    "tokens": _tokens,
    "retrieval": check_retrieval,
    "dense twin": check_dense_twin,
    "activity": check_activity,
}


def _left_out(name: str, plan: Plan) -> str:
    tokens = plan.longest_prompt + plan.steps
    return f"{name}: a model of this size is checked on {tokens} tokens at quick level; --level full runs everything"

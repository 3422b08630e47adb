"""From what a user asked to a report: of an engine, or of a model under many policies and token budgets."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING

from kvc_trt.accuracy.answerers.model_under_test import BuiltEngine, ModelUnderTest
from kvc_trt.accuracy.answerers.policy_engines import open_model
from kvc_trt.accuracy.grid import PLAIN, Variant, budgets_of, grid_for, longest_of, policies_of, variants
from kvc_trt.accuracy.measure import QuestionDraw
from kvc_trt.accuracy.pages.report import AccuracyReport, Bars
from kvc_trt.accuracy.run import evaluate
from kvc_trt.kernels import use_library
from kvc_trt.progress import Progress
from kvc_trt.tasks.registry import task

if TYPE_CHECKING:
    from kvc_trt.engine import EngineDirectory

SAMPLES = 50


@dataclass(frozen=True)
class AccuracyRequest:
    """The tasks to ask and the folder for their answers. None takes the default of the task or the model."""

    tasks: Sequence[str] | None = None
    lengths: Sequence[int] | None = None
    """Tokens of prompt and answer."""
    modes: Sequence[str] | None = None
    """query-aware, query-agnostic, second-question, stored-context (docs/accuracy.md); None is the first two."""
    framing: str = PLAIN
    """plain, or chat: through the model's chat template."""
    samples: int = SAMPLES
    seed: int = 0
    max_new_tokens: int | Mapping[str, int] | None = None
    minimum_accuracy: float | None = None
    """Share that every cell that counts must reach."""
    maximum_loss: float | None = None
    """Share that none may lose against the full cache."""
    directory: str | PathLike[str] | None = None
    """Results, kept cell by cell, and the report; None is accuracy/NAME."""

    def directory_for(self, name: str) -> Path:
        """Return the path of the results of the model or engine with this name."""
        if self.directory is not None:
            return Path(self.directory)
        return Path("accuracy") / re.sub(r"[^A-Za-z0-9._+-]", "-", name)


def measure_engine(
    engine: EngineDirectory, backend: str, asked: AccuracyRequest, *, kernels: Path | None = None, progress: Progress
) -> AccuracyReport:
    """Ask an engine, run by `backend`, and its dense twin. Bars that do not hold are in the report, not raised."""
    _check_names(asked)
    with contextlib.nullcontext() if kernels is None else use_library(kernels):
        built = BuiltEngine(engine, backend)
        longest = engine.parameters.max_input_len
        return _measured(built, built.variants, longest, asked, engine.path.name, progress)


def measure_policies(
    model: str,
    asked: AccuracyRequest,
    *,
    policies: Sequence[str] | None = None,
    budgets: Sequence[int] | None = None,
    weights: str = "auto",
    checkpoint: str | None = None,
    progress: Progress,
) -> AccuracyReport:
    """Ask a model under every policy (None: all) and token budget; its engines are built in memory."""
    _check_names(asked)
    chosen = variants(policies_of(policies), budgets or budgets_of(model))  # names are checked before weights are read
    with open_model(model, checkpoint=checkpoint, weights=weights, progress=progress) as opened:
        return _measured(opened, chosen, longest_of(model), asked, Path(model).name, progress)


def _measured(
    model: ModelUnderTest,
    chosen: Sequence[Variant],
    longest: int,
    asked: AccuracyRequest,
    name: str,
    progress: Progress,
) -> AccuracyReport:
    groups = grid_for(longest, asked.tasks, asked.lengths, asked.modes, asked.framing)
    draw = QuestionDraw(asked.samples, asked.seed, asked.max_new_tokens)
    bars = Bars(asked.minimum_accuracy, asked.maximum_loss)
    return evaluate(model, chosen, groups, draw, asked.directory_for(name), bars=bars, progress=progress)


def _check_names(asked: AccuracyRequest) -> None:
    for name in asked.max_new_tokens if isinstance(asked.max_new_tokens, Mapping) else ():
        task(name)

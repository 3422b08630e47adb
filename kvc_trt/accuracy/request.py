"""From a user's request to a report: of an engine, or of a model under many policies and token budgets."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING

from kvc_trt import policies as registered
from kvc_trt.accuracy.draw import FileDraw, QuestionDraw
from kvc_trt.accuracy.grid import (
    MODES,
    PLAIN,
    QuestionGroup,
    Variant,
    budgets_of,
    grid_for,
    longest_of,
    policies_of,
    question_groups,
    variants,
)
from kvc_trt.accuracy.pages.report import AccuracyReport, Bars
from kvc_trt.accuracy.questions import ModelVocabulary
from kvc_trt.accuracy.run import evaluate
from kvc_trt.accuracy.under_test.model_under_test import BuiltEngine, ModelUnderTest
from kvc_trt.accuracy.under_test.policy_engines import open_model
from kvc_trt.backends.probes import INSTALL_VERIFY, has_torch, require_torch
from kvc_trt.engine.verification import Verification, record_verification
from kvc_trt.errors import InputError
from kvc_trt.kernels import use_library
from kvc_trt.progress import Progress
from kvc_trt.tasks.own.fitting import Truncate
from kvc_trt.tasks.own.reader import read_data_file

if TYPE_CHECKING:
    from kvc_trt.engine import EngineDirectory

SAMPLES = 50
"""Questions of a group that is generated."""


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
    samples: int | None = None
    """Questions of a group; None is SAMPLES generated ones, or all of a file's."""
    seed: int = 0
    """Seed of generated questions; those of a file have none."""
    data: str | PathLike[str] | None = None
    """A file of one's own questions (docs/data.md), in place of generated tasks; `tasks` are then its sets."""
    truncate: Truncate | None = None
    """With `data`: how a prompt that is longer than the questions may be is cut; None refuses it."""
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
    draw = _draw_of(asked)
    with contextlib.nullcontext() if kernels is None else use_library(kernels):
        built = BuiltEngine(engine, backend)
        longest = engine.parameters.max_input_len
        report = _measured(built, built.variants, longest, asked, draw, engine.path.name, progress)
    most = max(cell.samples for cell in report.cells)
    record_verification(
        engine, Verification(level="tasks", passed=report.passed, run_by=backend, seed=asked.seed, samples=most)
    )
    return report


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
    draw = _draw_of(asked)
    names = policies_of(policies) if has_torch() else _without_torch(policies, progress)
    chosen = variants(names, budgets or budgets_of(model))  # names are checked before weights are read
    with open_model(model, checkpoint=checkpoint, weights=weights, progress=progress) as opened:
        longest = longest_of(model) if asked.data is None else opened.config.max_position_embeddings
        return _measured(opened, chosen, longest, asked, draw, Path(model).name, progress)


def _measured(
    model: ModelUnderTest,
    chosen: Sequence[Variant],
    longest: int,
    asked: AccuracyRequest,
    draw: QuestionDraw | FileDraw,
    name: str,
    progress: Progress,
) -> AccuracyReport:
    if isinstance(draw, FileDraw):
        groups = _groups_of_file(model, longest, asked, draw, progress)
    else:
        groups = grid_for(longest, asked.tasks, asked.lengths, asked.modes, asked.framing)
    bars = Bars(asked.minimum_accuracy, asked.maximum_loss)
    return evaluate(model, chosen, groups, draw, asked.directory_for(name), bars=bars, progress=progress)


def _without_torch(named: Sequence[str] | None, progress: Progress) -> list[str]:
    """Return the policies that run without PyTorch: all but the oracles, and none that measures its layers first.

    UnsupportedEnvironment for one that the user names.
    """
    found = policies_of(named)
    needing = [name for name in found if _needs_torch(Variant(name, None))]
    if needing and named is not None:
        require_torch(f"leave {', '.join(needing)} out of --policies", what=f"{needing[0]} needs PyTorch")
    if needing:
        progress.note(f"left out: {', '.join(needing)}, which need PyTorch ({INSTALL_VERIFY})")
    return [name for name in found if name not in needing]


def _needs_torch(variant: Variant) -> bool:
    return registered.named(variant.name).selection.oracle or variant.settings.get("layer_budget") == "squeeze"


def _groups_of_file(
    model: ModelUnderTest, longest: int, asked: AccuracyRequest, draw: FileDraw, progress: Progress
) -> list[QuestionGroup]:
    """The sets that are asked, all at one length unless lengths are given: that of their longest prompt and answer."""
    names = list(asked.tasks or draw.tasks)
    tasks = [draw.task(name) for name in names]
    vocabulary = ModelVocabulary(model.tokenizer, model.config.vocab_size, model.template)
    if vocabulary.tokenizer is None:
        raise InputError(f"{draw.data.path} is text, and the model has no tokenizer")
    lengths = asked.lengths or [draw.length(names, vocabulary, asked.framing, longest, progress)]
    return question_groups(tasks, lengths, asked.modes or MODES, (asked.framing,))


def _draw_of(asked: AccuracyRequest) -> QuestionDraw | FileDraw:
    """Return the source of the questions; names are checked before weights are read."""
    draw: QuestionDraw | FileDraw
    if asked.samples is not None and asked.samples < 1:
        raise InputError(f"samples: expected at least 1, found {asked.samples}")
    if asked.data is None:
        if asked.truncate is not None:
            raise InputError("truncate goes with data: generated tasks have the length asked for")
        draw = QuestionDraw(asked.samples or SAMPLES, asked.seed, asked.max_new_tokens)
    else:
        if asked.seed != 0:
            raise InputError(f"seed {asked.seed} goes with generated tasks: questions of a file are not drawn")
        draw = FileDraw(read_data_file(asked.data), asked.samples, asked.max_new_tokens, asked.truncate)
    named = asked.max_new_tokens if isinstance(asked.max_new_tokens, Mapping) else ()
    for name in (*named, *((asked.tasks or ()) if asked.data is not None else ())):
        draw.task(name)
    return draw

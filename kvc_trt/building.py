"""From a configuration to a verified engine: the whole way from a user's request to the directory."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvc_trt.backends.probes import require_torch
from kvc_trt.backends.registry import ChosenBackend, backends, runners, select_backend
from kvc_trt.backends.run_options import RunOptions
from kvc_trt.config import BuildConfig
from kvc_trt.engine.build import BuildResult, build_engine
from kvc_trt.engine.resolution.calibration import calibrated
from kvc_trt.engine.resolution.model_choice import ModelSource, choose_model, open_source
from kvc_trt.engine.resolution.resolve import for_source, resolve
from kvc_trt.engine.resolution.resolved_build import ResolvedBuild, default_taken
from kvc_trt.engine.verification import is_verified
from kvc_trt.errors import VerificationFailed
from kvc_trt.models.rope import rotary_choice
from kvc_trt.models.sharding import describe_shards
from kvc_trt.progress import Progress
from kvc_trt.verify.recording import record_report

if TYPE_CHECKING:
    from kvc_trt.verify.report import Report


@dataclass(frozen=True)
class Built:
    """The result of a build and of its verification."""

    result: BuildResult
    request: ResolvedBuild
    backend: ChosenBackend
    report: Report | None
    """None where nothing was verified now: that was not asked for, or this very engine has passed before."""
    default_taken: str | None = None
    """A sentence with the policy that was taken because none was named, and the reason; None if one was named."""

    def require_verified(self) -> None:
        """Raise VerificationFailed if verification ran and the engine did not pass it."""
        if self.report is None or self.report.passed:
            return
        path = self.result.engine.path
        reason = self.report.failures[0] if self.report.failures else "nothing could be checked"
        raise VerificationFailed(
            f"{path} was built, but did not pass verification: {reason}", hint=f"kvc-trt verify {path}"
        )


def build_configured(
    config: BuildConfig,
    *,
    recorded: Mapping[str, Any] | None = None,
    output: Path | None = None,
    force: bool = False,
    verify: bool = True,
    progress: Progress,
) -> Built:
    """Build the engine that `config` describes into `output` (None: engines/MODEL-POLICY), or find it there; then
    verify it.

    `recorded` are the numbers of an engine whose configuration is replayed. A failed check is in the result.
    """
    verify = verify and config.verify
    if verify:
        require_torch("build with --no-verify")
    if config.layer_budget == "squeeze" and config.layer_budgets is None and config.layer_cosines is None:
        require_torch("--layer-budget squeeze-online", what="--layer-budget squeeze measures layers with PyTorch")
    backend = select_backend(config.backend, config.stored().keys())
    choice = choose_model(config.model, config.checkpoint, config.revision)
    request = resolve(config, choice, backend.name, backends(), recorded=recorded)
    if verify:  # compiling an engine takes long: too few rows for the check after it are refused before
        backends()[backend.name].check_verifiable(request.config.max_batch_size, "the engine")
    output = output or Path("engines") / default_name(choice.name, request.config.policy)
    choice, source = open_source(choice, request.config)
    request = calibrated(for_source(request, choice, source), source, progress)
    progress.note(f"backend: {backend.name} ({backend.reason})")
    if (choice_of_rotation := rotary_choice(request.model, request.parameters.max_sequence_len)) is not None:
        progress.note(f"rotary: {choice_of_rotation}")
    if request.config.tensor_parallel is not None:
        progress.note(f"tensor parallel: {describe_shards(request.model, request.config.tensor_parallel)}")
    if config.weights == "auto" and request.config.weights == "keep":
        progress.note("weights: the checkpoint's own blocks (keep)")
    if choice.quantised is not None and request.config.weights not in (choice.quantised, "keep"):
        stored, wanted = choice.quantised, request.config.weights
        progress.note(f"weights: the checkpoint's matrices in {stored} are dequantised for {wanted}")
    result = build_engine(request, source, output, backends(), force=force, progress=progress)
    report = verified(result, _checkpoint_beside(request, source), progress) if verify else None
    return Built(result, request, backend, report, default_taken(config, choice))


def default_name(model: str, policy: str) -> str:
    """The directory below engines/ where nothing else is asked for."""
    return re.sub(r"[^A-Za-z0-9._+-]", "-", f"{model}-{policy}").lstrip(".-") or "engine"


def verified(result: BuildResult, checkpoint: Path | None, progress: Progress) -> Report | None:
    """Run the quick ladder, unless this very engine has passed it before."""
    if result.status == "up to date" and is_verified(result.engine):
        progress.note("verification: passed after an earlier build of this engine")
        return None
    from kvc_trt.verify.ladder import verify

    built_for = result.engine.backend
    backend = runners(built_for)[0]
    if backend != built_for:
        progress.note(f"verification: {backend} runs the engine's weights; nothing here runs plans of {built_for}")
    report = verify(result.engine, options=RunOptions(backend), level="quick", checkpoint=checkpoint, progress=progress)
    record_report(result.engine, report)
    return report


def _checkpoint_beside(request: ResolvedBuild, source: ModelSource) -> Path | None:
    """The checkpoint, where its weights were quantised: verify then reports the cost of quantisation."""
    return source.path if request.config.weights in ("int8", "int4") else None

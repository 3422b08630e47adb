"""Resolve a user's options to a complete build: every number derived, every default filled in."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvc_trt import policies
from kvc_trt.config import DERIVED_NUMBERS, BuildConfig
from kvc_trt.engine.backend import BuildBackend
from kvc_trt.engine.parallel import check_parallel, rank_model
from kvc_trt.engine.resolution.model_choice import ModelChoice, ModelSource
from kvc_trt.engine.resolution.resolved_build import ResolvedBuild, compute_dtype, with_defaults
from kvc_trt.engine.supported import check_supported
from kvc_trt.errors import InputError
from kvc_trt.methods.base.parameters import PolicyParameters
from kvc_trt.models.cache_formats import AUTO
from kvc_trt.models.formats import is_path
from kvc_trt.validation import validated


def resolve(
    config: BuildConfig,
    choice: ModelChoice,
    backend: str,
    backends: Mapping[str, BuildBackend],
    *,
    recorded: Mapping[str, Any] | None = None,
) -> ResolvedBuild:
    """Resolve a build for `backend`, a name in `backends`.

    `recorded` are the parameters of an engine whose configuration is replayed unchanged; they take precedence over
    the numbers that this version derives.
    """
    config = with_defaults(config, choice)
    config = config.model_copy(update={"backend": backend})
    draft = ResolvedBuild(config, choice.config)
    parameters = draft.parameters
    check_graphs(config, parameters)
    if config.weights == "auto":
        stored = choice if config.random_weights is None else dataclasses.replace(choice, path=None, blocks=False)
        config = config.model_copy(update={"weights": backends[backend].default_weights(stored)})
    check_backend_settings(config, backends)
    check_exact_bounds(parameters, compute_dtype(config.weights))
    check_supported(parameters, choice.config, backend, backends)
    if config.tensor_parallel is not None:
        check_parallel(config.tensor_parallel, choice.config, parameters)
    config = _pinned(config, parameters, recorded or {})
    if config.dense_until == "auto":
        measured = None
        if parameters.reads_a_part:
            one = rank_model(choice.config, config.tensor_parallel)
            measured = backends[backend].break_even(one, parameters, compute_dtype(config.weights))
        config = config.model_copy(update={"dense_until": measured})
    model = dataclasses.replace(choice.config, dtype=compute_dtype(config.weights))
    resolved = draft.changed(config, model)
    _ = resolved.parameters  # derived here: numbers that do not fit are refused before any weights are fetched
    return resolved


def check_graphs(config: BuildConfig, parameters: PolicyParameters) -> None:
    """Raise InputError for a graph that the configuration asks for and the policy cannot have with this model."""
    if config.draft_tokens is not None and parameters.no_drafts is not None:
        of_model = parameters.layer_windows or parameters.linear_layers
        another = "" if of_model else ", or take another --policy (see `kvc-trt policies --drafts`)"
        raise InputError(
            f"--draft-tokens {config.draft_tokens}: policy {config.policy} checks no drafts: {parameters.no_drafts}",
            hint=f"leave it out{another}",
        )
    if config.all_logits and parameters.no_turn is not None:
        raise InputError(
            f"--all-logits: policy {config.policy} takes no turns: {parameters.no_turn}",
            hint="leave it out, or take another --policy (see `kvc-trt policies --turns`)",
        )


def check_exact_bounds(parameters: PolicyParameters, dtype: str) -> None:
    """Refuse bounds in 16 bits beside codes: rounded to nearest, they might promise less than a page holds."""
    exact = parameters.kv_cache == AUTO or not parameters.has_pages or parameters.fp8_bounds
    if not exact and dtype != "float32":
        raise InputError(
            f"fp8_bounds is false: page bounds of a cache in {parameters.kv_cache} are fp8 or float32, and this engine "
            f"computes in {dtype}",
            hint="leave fp8_bounds out, or --weights fp32",
        )


def for_source(resolved: ResolvedBuild, choice: ModelChoice, source: ModelSource) -> ResolvedBuild:
    """Return the build with the configuration, paths and commit of the weights that were opened."""
    config = resolved.config
    update: dict[str, Any] = {} if source.commit is None else {"revision": source.commit}
    if config.checkpoint is not None:
        update["checkpoint"] = str(choice.path)
    elif choice.hugging_face_id is None and choice.path is not None and is_path(config.model):
        update["model"] = str(choice.path)
    if config.head_pattern is not None:
        update["head_pattern"] = str(Path(config.head_pattern).absolute())
    config = config.model_copy(update=update)
    model = dataclasses.replace(choice.config, dtype=resolved.dtype)
    return resolved.changed(config, model)


def check_backend_settings(config: BuildConfig, backends: Mapping[str, BuildBackend]) -> None:
    """Raise InputError for settings that the build's backend does not use."""
    backend = backends[config.backend]
    if config.weights not in backend.weight_kinds:
        raise InputError(
            f"--weights {config.weights}: {backend.why_no_weights(config.weights)}; "
            f"backend {config.backend} takes {', '.join(backend.weight_kinds)}",
            hint=f"--weights {backend.weight_kinds[0]}",
        )
    for setting in sorted({name for each in backends.values() for name in each.own_settings}):
        value = getattr(config, setting)
        if value is not None and setting not in backend.own_settings:
            takers = " or ".join(name for name, each in backends.items() if setting in each.own_settings)
            raise InputError(f"{setting}: {value} is for --backend {takers}, found {config.backend}")


def _pinned(config: BuildConfig, derived: PolicyParameters, recorded: Mapping[str, Any]) -> BuildConfig:
    """Set the numbers that an engine recorded and this version would derive differently."""
    if not recorded:
        return config
    # An engine that does not record it compresses all prompts alike; one that does, derives its largest budget.
    numbers = {"by_length": False, **recorded}
    own = [name for name in DERIVED_NUMBERS if not (numbers["by_length"] and name == "prompt_budget")]
    known = {name: numbers[name] for name in own if name in numbers}
    different = {name: value for name, value in known.items() if value != getattr(derived, name)}
    pins = policies.applicable(config.policy, different)
    return validated(BuildConfig, {**config.stored(), **pins}, "recorded parameters") if pins else config

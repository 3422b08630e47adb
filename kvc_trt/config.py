"""The schema of a build for YAML files, `--set` and options, and the order in which they override each other."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from kvc_trt.errors import InputError, did_you_mean
from kvc_trt.methods.base.constants import LARGEST_CAP, CacheFormatName, Count, PoolKind, Positive
from kvc_trt.methods.base.inputs import OVERRIDES
from kvc_trt.methods.base.parameters import DEFAULT
from kvc_trt.methods.base.token_budget import PERCENT
from kvc_trt.validation import OwnSchema, parse_assignments, read_mapping, validated

DERIVED_NUMBERS = tuple(name for name in OVERRIDES if name not in ("dense_until", "head_scores"))
"""Constants that a policy derives and a build may set, under the same names; `dense_until` may also be `auto`."""

POLICY_INPUTS = ("policy", "token_budget", "max_input_len", "max_output_len", "split", *DERIVED_NUMBERS)
"""Everything the resolved parameters follow from, besides the model and `dense_until`."""

WEIGHT_SOURCES = frozenset(("checkpoint", "revision", "random_weights"))
"""The sources of weights: a later layer that names one replaces the one named earlier."""

Wanted = Annotated[Literal[True] | None, BeforeValidator(lambda given: None if given is False else given)]
"""A switch; off is the same as not given, so that it makes no other engine."""

Ranks = Annotated[
    Annotated[int, Field(ge=2, le=1024)] | None, BeforeValidator(lambda given: None if given == 1 else given)
]
"""One rank is the same as not given."""


class BuildConfig(OwnSchema):
    """One build. None means the preset's value, or one that the policy derives."""

    model: str = Field(min_length=1)
    """A preset's name, a Hugging Face directory or a GGUF file."""
    policy: str = DEFAULT
    token_budget: Positive | Annotated[str, Field(pattern=PERCENT)] | None = None
    """Tokens, or a share of the longest prompt ("20%"), which SnapKV takes of each prompt."""
    max_input_len: Positive | None = None
    max_output_len: Positive | None = None
    max_batch_size: Positive = 8
    split: Literal["adaptive", "even"] | Annotated[float, Field(ge=0, le=1)] = "adaptive"
    dense_until: Count | Literal["auto"] | None = None
    draft_tokens: Annotated[int, Field(ge=2, le=8)] | None = None
    """Tokens of a draft that one pass checks, for `run --speculate`; None: the engine checks no drafts."""
    all_logits: Wanted = None
    """Let a turn give the logits after each of its tokens, not after the last alone (`Session.turn_logits`)."""
    backend: str = "auto"
    weights: Literal["auto", "fp32", "fp16", "bf16", "fp8", "int8", "int4", "keep"] = "auto"
    tensor_parallel: Ranks = None
    """torch only: how many processes, one per GPU, share the KV heads and every matrix; 1 is the same as None."""
    compatibility: Literal["none", "hardware"] | None = None
    """tensorrt only: `hardware` builds engines that later GPU architectures run too, with kernels that suit all."""
    checkpoint: str | None = None
    revision: str | None = None
    random_weights: Annotated[int, Field(ge=0, le=2**63 - 1)] | None = None
    verify: bool = True
    """Run the quick ladder after the build. Not part of the engine's identity."""

    prompt_budget: Positive | None = None
    page_size: Positive | None = None
    top_r: Positive | None = None
    top_k: Positive | None = None
    pool_kernel: Positive | Literal["auto"] | None = None
    pool_kind: PoolKind | None = None
    window: Positive | None = None
    skip_layers: Count | None = None
    sinks: Count | None = None
    recent: Count | None = None
    future_positions: Positive | None = None
    max_conversation_len: Positive | None = None
    positions: Literal["original", "cache"] | None = None
    reallocate: bool | None = None
    fp8_bounds: bool | None = None
    kv_cache: CacheFormatName | None = None
    by_length: bool | None = None
    head_pattern: str | None = None
    """duo-attention: file with one score per KV head and layer; the best heads keep everything."""
    layer_budget: Literal["uniform", "squeeze", "squeeze-online"] | None = None
    squeeze_share: Annotated[float, Field(gt=0, le=1)] | None = None
    squeeze_cap: Annotated[float, Field(ge=1, le=LARGEST_CAP)] | None = None
    """squeeze-online: the most that a layer keeps of a prompt, in prompt budgets.  [default: 2]"""
    layer_budgets: list[Positive] | None = None
    """The division that a build with `layer_budget: squeeze` made, one number per layer."""
    layer_cosines: list[Annotated[float, Field(ge=-1.01, le=1.01)]] | None = None
    """The measurements that it was made by: the mean cosine around every layer's attention, up to rounding -1 to 1."""
    calibration: str | None = None
    """File with one calibration prompt per line.  [default: questions of the tasks that a shipped model knows]"""

    @model_validator(mode="after")
    def _one_source_of_weights(self) -> BuildConfig:
        if self.random_weights is not None and self.checkpoint is not None:
            raise ValueError("checkpoint and random_weights exclude each other")
        return self

    def overrides(self) -> dict[str, Any]:
        """Return the derived numbers that were set by hand."""
        return {name: value for name in DERIVED_NUMBERS if (value := getattr(self, name)) is not None}

    def stored(self) -> dict[str, Any]:
        """Return the settings that an engine records and a replay reads: every setting given, without `verify`."""
        return self.model_dump(exclude={"verify"}, exclude_none=True)


def parse_settings(settings: Iterable[str]) -> dict[str, Any]:
    """Parse `--set key=value` arguments of a build; values are read as YAML scalars (`8`, `auto`, `0.25`)."""
    parsed = parse_assignments(settings)
    for key in parsed:
        if key not in BuildConfig.model_fields:
            raise InputError(f"--set {key}: unknown key '{key}'{did_you_mean(key, BuildConfig.model_fields)}")
    return parsed


def read_configuration(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Read a build's YAML file or an engine's config.json: (settings, the derived numbers the engine recorded)."""
    mapping = read_mapping(path)
    if "kv_compression" not in mapping:
        return mapping, {}
    recorded = mapping.get("build_config")
    settings = recorded.get("kvc_trt") if isinstance(recorded, dict) else None
    compression = mapping["kv_compression"]
    parameters = compression.get("parameters") if isinstance(compression, dict) else None
    if not isinstance(settings, dict) or not isinstance(parameters, dict):
        raise InputError(f"{path}: expected an engine's config.json with build_config.kvc_trt and kv_compression")
    return dict(settings), dict(parameters)


def configured(file: Path | None, *layers: tuple[str, Mapping[str, Any]]) -> tuple[BuildConfig, dict[str, Any]]:
    """Return the build that a YAML file or an engine's config.json describes with `layers` laid over it.

    The mapping holds the numbers that an engine recorded; it is empty if a layer changes a setting that they follow
    from.
    """
    from_file, recorded = read_configuration(file) if file is not None else ({}, {})
    config = layered([(str(file), from_file), *layers])
    changed = {name for _, settings in layers for name in settings}
    return config, recorded if changed.isdisjoint({"model", *POLICY_INPUTS}) else {}


def layered(layers: Iterable[tuple[str, Mapping[str, Any]]]) -> BuildConfig:
    """Return the build that `layers` of (source, settings) describe, later ones winning.

    Each layer is checked alone first, so that an error names its file or flag.
    """
    merged: dict[str, Any] = {}
    sources: list[str] = []
    for source, settings in layers:
        if settings:
            validated(BuildConfig, {"model": "any", **settings}, source)
            sources.append(source)
        if WEIGHT_SOURCES & settings.keys():
            merged = {name: value for name, value in merged.items() if name not in WEIGHT_SOURCES}
        merged.update(settings)
    if "model" not in merged:
        raise InputError("no model given", hint="--model NAME (see `kvc-trt models`) or --model DIRECTORY")
    return validated(BuildConfig, merged, ", ".join(sources))

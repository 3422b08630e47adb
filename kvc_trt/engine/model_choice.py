"""Choose the model of a build, a preset or a Hugging Face directory, and the source of its weights."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kvc_trt.config import BuildConfig
from kvc_trt.errors import InputError
from kvc_trt.models.checkpoint import Checkpoint
from kvc_trt.models.config import ModelConfig, longest_sequence
from kvc_trt.models.fp8 import as_floats
from kvc_trt.models.random_weights import RandomWeights
from kvc_trt.models.weights import WeightSource, check_weights

DEFAULT_TOKEN_BUDGET = 512
DEFAULT_OUTPUT_LEN = 128
LONGEST_DEFAULT_INPUT = 32768
_SAME_SHAPE = (
    "architecture",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_size",
    "qkv_bias",
    "qk_norm",
    "rotary_base",
    "rotary_scaling",
)


@dataclass(frozen=True)
class ModelChoice:
    """A model with the settings that suit it, chosen before any weights are read."""

    name: str
    config: ModelConfig
    defaults: Mapping[str, Any]
    """Build settings that apply unless the user gives others."""
    directory: Path | None = None
    """The checkpoint directory, if the user gave one."""
    hugging_face_id: str | None = None
    revision: str | None = None
    shipped: Path | None = None
    """The checkpoint that is shipped with the package, if any."""

    @property
    def quantised(self) -> bool:
        """Whether the checkpoint stores its matrices in fp8, the only quantised format that is read."""
        from kvc_trt.models.hugging_face import read_json_object

        if self.directory is None:
            return False
        return read_json_object(self.directory / "config.json").get("quantization_config") is not None


@dataclass(frozen=True)
class ModelSource:
    """Weights and tokenizer of a model; weights are read tensor by tensor."""

    weights: WeightSource
    description: str
    commit: str | None = None
    """Resolved commit of a checkpoint that came from the Hugging Face Hub."""
    tokenizer_files: tuple[Path, ...] = ()
    directory: Path | None = None
    """The checkpoint directory; None for random weights."""


def choose_model(model: str, checkpoint: str | None = None) -> ModelChoice:
    """Find a preset or read a Hugging Face directory's config.json; that of `checkpoint`, if given, wins.

    Raises InputError for an unknown name (suggesting the nearest) and for a checkpoint of another architecture.
    """
    from kvc_trt.models.hugging_face import read_config
    from kvc_trt.models.presets import load_preset

    if is_directory(model):
        if checkpoint is not None:
            raise InputError("--model is a directory already; --checkpoint goes with a preset's name")
        directory = Path(model).absolute()
        return ModelChoice(directory.name, (config := read_config(directory)), _general_defaults(config), directory)
    preset = load_preset(model)
    defaults = {**_general_defaults(preset.config), **preset.defaults}
    choice = ModelChoice(
        model, preset.config, defaults, None, preset.hugging_face_id, preset.revision, preset.checkpoint
    )
    if checkpoint is None:
        return choice
    directory = Path(checkpoint).absolute()
    config = read_config(directory)
    _check_same_model(preset.config, config, model, directory)
    return replace(choice, config=config, directory=directory)


def is_directory(model: str) -> bool:
    """Whether `--model` names a directory rather than a preset."""
    return os.sep in model or Path(model).is_dir()


def open_source(choice: ModelChoice, config: BuildConfig) -> tuple[ModelChoice, ModelSource]:
    """Open the weights: random, from the given checkpoint, from the package, or from the Hugging Face Hub.

    The returned choice has the configuration of the checkpoint that was opened.
    """
    from_hub = config.random_weights is None and choice.directory is None and choice.shipped is None
    if config.revision is not None and not from_hub:
        raise InputError(f"--revision {config.revision}: the weights do not come from the Hugging Face Hub")
    if config.random_weights is not None:
        random = RandomWeights(choice.config, config.random_weights)
        return choice, ModelSource(random, f"random weights, seed {config.random_weights}")
    directory, commit = choice.directory or choice.shipped, None
    if directory is None:
        directory, commit = _fetch(choice, config.revision)
    checkpoint = Checkpoint(directory)
    _check_same_model(choice.config, checkpoint.config, choice.name, directory)
    weights = as_floats(checkpoint)
    check_weights(checkpoint.config, weights)
    opened = replace(choice, config=checkpoint.config, directory=directory)
    description, tokenizer = _described(choice, directory, commit), tuple(checkpoint.tokenizer_files())
    source = ModelSource(weights, description, commit, tokenizer, directory)
    return opened, source


def _described(choice: ModelChoice, directory: Path, commit: str | None) -> str:
    if commit is not None:
        return f"Hugging Face Hub: {choice.hugging_face_id}"
    return "checkpoint shipped with kvc-trt" if directory == choice.shipped else f"checkpoint {directory}"


def _fetch(choice: ModelChoice, revision: str | None) -> tuple[Path, str]:
    from kvc_trt.models.hub import fetch

    if choice.hugging_face_id is None:
        raise InputError(
            f"{choice.name} has no known checkpoint", hint="give --checkpoint DIR or --random-weights SEED"
        )
    return fetch(choice.hugging_face_id, revision or choice.revision)


def _general_defaults(config: ModelConfig) -> dict[str, Any]:
    longest = max(1, longest_sequence(config) - DEFAULT_OUTPUT_LEN)
    return {
        "token_budget": DEFAULT_TOKEN_BUDGET,
        "max_input_len": min(LONGEST_DEFAULT_INPUT, longest),
        "max_output_len": DEFAULT_OUTPUT_LEN,
    }


def _check_same_model(expected: ModelConfig, found: ModelConfig, name: str, directory: Path) -> None:
    for attribute in _SAME_SHAPE:
        wanted, got = getattr(expected, attribute), getattr(found, attribute)
        if wanted != got:
            raise InputError(
                f"{directory}/config.json is not {name}: {attribute} is {got!r}, expected {wanted!r}",
                hint=f"to build that model as it is: --model {directory}",
            )

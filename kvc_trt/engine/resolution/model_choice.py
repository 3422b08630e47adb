"""Choose the model of a build, a preset or a checkpoint, and the source of its weights and tokenizer."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from kvc_trt.config import BuildConfig
from kvc_trt.errors import InputError
from kvc_trt.files.atomic import write_whole
from kvc_trt.files.cache import cache_root
from kvc_trt.models.config import ModelConfig, Yarn, longest_compressible
from kvc_trt.models.formats import (
    AnyCheckpoint,
    int4_layout_of,
    is_file,
    is_path,
    open_checkpoint,
    read_model_config,
    weights_of,
)
from kvc_trt.models.presets import RecommendedPolicy, load_preset
from kvc_trt.models.random_weights import RandomWeights
from kvc_trt.models.sources.checkpoint import Checkpoint
from kvc_trt.models.sources.hub import WAYS_OUT, fetch, fetch_config, is_repository, stored_dtype, ways_out_of
from kvc_trt.models.sources.hugging_face import read_json_object
from kvc_trt.models.sources.package_file import PackageFile
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
    "description",
)


@dataclass(frozen=True)
class ModelChoice:
    """A model with the settings that suit it, chosen before any weights are read."""

    name: str
    config: ModelConfig
    defaults: Mapping[str, Any]
    """Build settings that apply unless the user gives others."""
    path: Path | None = None
    """The checkpoint, a Hugging Face directory or a GGUF file, if the user gave one."""
    hugging_face_id: str | None = None
    revision: str | None = None
    shipped: Path | None = None
    """The checkpoint that is shipped with the package, if any."""
    file: PackageFile | None = None
    """The file of a package that the preset names as its weights, if any."""
    blocks: bool = False
    """True if the weights are a checkpoint whose quantised matrices an engine holds as they are (`--weights keep`)."""
    recommended: RecommendedPolicy | None = None
    dtype_known: bool = True
    """False if nothing says the type of the checkpoint's weights, so that `config` has that of its family."""

    @property
    def quantised(self) -> Literal["fp8", "int4"] | None:
        """The format in which a directory stores its matrices; None where they are floats."""
        if self.path is None or is_file(self.path):
            return None
        if int4_layout_of(self.path) is not None:
            return "int4"
        return "fp8" if read_json_object(self.path / "config.json").get("quantization_config") is not None else None


@dataclass(frozen=True)
class ModelSource:
    """Weights and tokenizer of a model; weights are read tensor by tensor."""

    weights: WeightSource
    description: str
    commit: str | None = None
    """Resolved commit of a checkpoint that came from the Hugging Face Hub."""
    tokenizer_files: tuple[Path, ...] = ()
    path: Path | None = None
    """The checkpoint, a directory or a GGUF file; None for random weights."""


def choose_model(model: str, checkpoint: str | None = None, revision: str | None = None) -> ModelChoice:
    """Find a preset or read the configuration of a checkpoint; that of `checkpoint`, if given, wins.

    A path that exists comes before a preset, and ORGANISATION/NAME is a repository of the Hugging Face Hub, at
    `revision`. Raises InputError for an unknown name (suggesting the nearest) and for a checkpoint of another
    architecture; for a repository as `hub.fetch` does.
    """
    at_path, on_hub = is_path(model), is_repository(model)
    if (at_path or on_hub) and checkpoint is not None:
        raise InputError("--model is a checkpoint already; --checkpoint goes with a preset's name")
    if at_path:
        path = Path(model).absolute()
        config, blocks, known = read_model_config(path)
        name = path.stem if is_file(path) else path.name
        return ModelChoice(name, config, _general_defaults(config), path, blocks=blocks, dtype_known=known)
    if on_hub:
        directory = fetch_config(model, revision)
        config, blocks, known = read_model_config(directory, partial(stored_dtype, model, directory.name))
        name, defaults = model.partition("/")[2], _general_defaults(config)
        return ModelChoice(
            name, config, defaults, hugging_face_id=model, revision=revision, blocks=blocks, dtype_known=known
        )
    preset = load_preset(model)
    defaults = {**_general_defaults(preset.config), **preset.defaults}
    choice = ModelChoice(
        model, preset.config, defaults, None, preset.hugging_face_id, preset.revision, preset.checkpoint, preset.file,
        blocks=preset.file is not None and preset.file.blocks, recommended=preset.recommended,
    )  # fmt: skip
    if checkpoint is None:
        return choice
    path = Path(checkpoint).absolute()
    config, blocks, known = read_model_config(path)
    config = _as_chosen(preset.config, config, model, path)
    return replace(choice, config=config, path=path, blocks=blocks, dtype_known=known)


def open_source(choice: ModelChoice, config: BuildConfig) -> tuple[ModelChoice, ModelSource]:
    """Open the weights: random, from the given checkpoint, from the package, or from the Hugging Face Hub.

    The returned choice has the configuration of the checkpoint that was opened, stretched if the preset stretches it.
    """
    from_hub = config.random_weights is None and choice.hugging_face_id is not None and choice.path is None
    if config.revision is not None and not from_hub:
        raise InputError(f"--revision {config.revision}: the weights do not come from the Hugging Face Hub")
    if config.random_weights is not None:
        random = RandomWeights(choice.config, config.random_weights)
        return choice, ModelSource(random, f"random weights, seed {config.random_weights}")
    path, commit = choice.path or choice.shipped, None
    if choice.file is not None:
        path = _checked(choice.file, path, choice.name)
    elif path is None:
        path, commit = _fetch(choice, config)
    checkpoint = open_checkpoint(path)
    opened = replace(choice, config=_as_chosen(choice.config, checkpoint.config, choice.name, path), path=path)
    weights = weights_of(checkpoint)
    check_weights(opened.config, weights)
    source = ModelSource(weights, _described(choice, path, commit), commit, _tokenizer_files(checkpoint), path)
    return opened, source


def _tokenizer_files(checkpoint: AnyCheckpoint) -> tuple[Path, ...]:
    """The files of a directory; those that a GGUF file's metadata stand for are written into the cache."""
    if isinstance(checkpoint, Checkpoint):
        return tuple(checkpoint.tokenizer_files())
    contents = checkpoint.tokenizer_contents()
    digests = [f"{name}\0{hashlib.sha256(content).hexdigest()}\n" for name, content in sorted(contents.items())]
    directory = cache_root() / "tokenizers" / hashlib.sha256("".join(digests).encode()).hexdigest()
    for name, content in contents.items():
        write_whole(directory / name, content)
    return tuple(directory / name for name in contents)


def _checked(file: PackageFile, given: Path | None, name: str) -> Path:
    """The preset's file, byte for byte: the one that the user gave, else the fetched one. A directory may be given."""
    if given is None:
        return file.found(name)
    if is_file(given):
        try:
            file.check(given)
        except InputError as error:
            hint = f"to build that file as it is: --model {given}"
            raise InputError(error.message, hint=hint) from error
    return given


def _described(choice: ModelChoice, path: Path, commit: str | None) -> str:
    if commit is not None:
        return f"Hugging Face Hub: {choice.hugging_face_id}"
    if choice.file is not None and is_file(path):
        return f"{choice.file.package}: {choice.file.name}"
    return "checkpoint shipped with kvc-trt" if path == choice.shipped else f"checkpoint {path}"


def _fetch(choice: ModelChoice, config: BuildConfig) -> tuple[Path, str]:
    if choice.hugging_face_id is None:
        raise InputError(
            f"{choice.name} has no known checkpoint", hint="give --checkpoint PATH or --random-weights SEED"
        )
    ways_out = ways_out_of(choice.hugging_face_id) if is_repository(config.model) else WAYS_OUT
    return fetch(choice.hugging_face_id, config.revision or choice.revision, ways_out=ways_out)


def _general_defaults(config: ModelConfig) -> dict[str, Any]:
    longest = max(1, longest_compressible(config) - DEFAULT_OUTPUT_LEN)
    return {
        "token_budget": DEFAULT_TOKEN_BUDGET,
        "max_input_len": min(LONGEST_DEFAULT_INPUT, longest),
        "max_output_len": DEFAULT_OUTPUT_LEN,
    }


def _as_chosen(expected: ModelConfig, found: ModelConfig, name: str, path: Path) -> ModelConfig:
    """Return the configuration of a checkpoint, with the YaRN of a preset that stretches a model without it.

    For long texts, model cards have their readers add YaRN to config.json; such a preset stands for the edited file.
    Raises InputError for a checkpoint of another architecture.
    """
    if isinstance(expected.rotary_scaling, Yarn) and found.rotary_scaling is None:
        longest = expected.max_position_embeddings
        found = replace(found, rotary_scaling=expected.rotary_scaling, max_position_embeddings=longest)
    for attribute in _SAME_SHAPE:
        wanted, got = getattr(expected, attribute), getattr(found, attribute)
        if wanted != got:
            raise InputError(
                f"{path} is not {name}: {attribute} is {got!r}, expected {wanted!r}",
                hint=f"to build that model as it is: --model {path}",
            )
    return found

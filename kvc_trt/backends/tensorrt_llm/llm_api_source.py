"""What is exported: the policy of an engine directory, of a build's YAML file, or of an engine's config.json."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvc_trt.config import BuildConfig, layered, read_configuration
from kvc_trt.errors import InputError
from kvc_trt.methods.parameters import PolicyParameters
from kvc_trt.models.config import ModelConfig

CONFIG_FILE = "config.json"
LARGEST_CONFIG = 16 << 20


@dataclass(frozen=True)
class Source:
    """One resolved policy and the model it was resolved for."""

    description: str
    model: ModelConfig
    parameters: PolicyParameters
    max_batch_size: int
    checkpoint: str
    """What TensorRT-LLM would load: a Hugging Face name, a directory, or MODEL where neither is known."""


def read_source(path: Path) -> Source:
    """Read an engine directory, or a build's configuration file; InputError for anything else."""
    if path.is_dir():
        return _from_engine(path)
    settings, recorded = read_configuration(path)
    if recorded:
        return _from_config(json.loads(path.read_bytes()), path)
    return _from_build(layered([(str(path), settings)]), path)


def _from_engine(path: Path) -> Source:
    """Only config.json is read, so it alone is hashed: an engine may hold a hundred gigabytes."""
    from kvc_trt.engine.files import read_bytes
    from kvc_trt.engine.manifest import MANIFEST_FILE, file_records, read_manifest, rebuild_hint

    if not (path / MANIFEST_FILE).exists():
        raise InputError(
            f"{path} is not an engine directory: it has no {MANIFEST_FILE}",
            hint="give an engine directory or a build's YAML file",
        )
    record = file_records(read_manifest(path), path / MANIFEST_FILE).get(CONFIG_FILE)
    content = read_bytes(path / CONFIG_FILE, LARGEST_CONFIG)
    if record is None or _sha256(content) != record.sha256:
        raise InputError(f"{path / CONFIG_FILE} is not the one that was built", hint=rebuild_hint(path))
    return _from_config(json.loads(content), path / CONFIG_FILE)


def _from_config(config: Mapping[str, Any], path: Path) -> Source:
    from kvc_trt.engine.directory import parameters_from
    from kvc_trt.models.pretrained_config import from_pretrained_config
    from kvc_trt.validation import validated

    try:
        model = from_pretrained_config(config["pretrained_config"], str(path))
        parameters = parameters_from(config["kv_compression"]["parameters"], str(path))
        build = validated(BuildConfig, config["build_config"]["kvc_trt"], str(path))
    except (KeyError, TypeError) as error:
        raise InputError(f"{path} is incomplete: {error}") from error
    return Source(str(path), model, parameters, build.max_batch_size, _checkpoint(build))


def _from_build(config: BuildConfig, path: Path) -> Source:
    from kvc_trt.engine.model_choice import choose_model
    from kvc_trt.engine.resolved_build import resolve_parameters, with_defaults

    choice = choose_model(config.model, config.checkpoint)
    filled = with_defaults(config, choice)
    parameters = resolve_parameters(filled, choice.config)
    return Source(str(path), choice.config, parameters, filled.max_batch_size, _checkpoint(config))


def _checkpoint(config: BuildConfig) -> str:
    from kvc_trt.engine.model_choice import is_directory
    from kvc_trt.models.presets import list_presets, load_preset

    if config.checkpoint is not None:
        return config.checkpoint
    if is_directory(config.model):
        return config.model
    preset = load_preset(config.model) if config.model in list_presets() else None
    return preset.hugging_face_id or "MODEL" if preset is not None else "MODEL"


def _sha256(content: bytes) -> str:
    import hashlib

    return hashlib.sha256(content).hexdigest()

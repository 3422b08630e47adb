"""The YAML file of an export.

The policy of an engine directory, of a build's YAML file, or of an engine's config.json is written to a YAML file that
states what it is, what it cannot do and where it differs.
"""

from __future__ import annotations

import hashlib
import textwrap
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from kvc_trt.backends.tensorrt_llm.llm_api import AttentionBackend, Export, LlmApiConfiguration
from kvc_trt.config import BuildConfig, layered, read_configuration
from kvc_trt.engine.configuration import LARGEST_CONFIG, EngineConfig
from kvc_trt.engine.format import CONFIG_FILE
from kvc_trt.engine.manifest import MANIFEST_FILE, read_manifest, rebuild_hint
from kvc_trt.engine.resolution.model_choice import choose_model
from kvc_trt.engine.resolution.resolved_build import resolve_parameters, with_defaults
from kvc_trt.errors import InputError
from kvc_trt.files.inputs import read_input
from kvc_trt.methods.base.parameters import PolicyParameters
from kvc_trt.models.config import ModelConfig
from kvc_trt.models.formats import is_path
from kvc_trt.models.presets import list_presets, load_preset
from kvc_trt.models.sources.hub import is_repository
from kvc_trt.validation import validated
from kvc_trt.version import __version__


@dataclass(frozen=True)
class Source:
    """A resolved policy and its model."""

    description: str
    model: ModelConfig
    parameters: PolicyParameters
    max_batch_size: int
    checkpoint: str
    """The model that TensorRT-LLM would load: a Hugging Face name, a directory, or MODEL if neither is known."""


def read_source(path: Path) -> Source:
    """Read an engine directory, or a build's configuration file; InputError for anything else."""
    if path.is_dir():
        return _from_engine(path)
    settings, recorded = read_configuration(path)
    if recorded:
        return _from_config(read_input(path, LARGEST_CONFIG), path)
    return _from_build(layered([(str(path), settings)]), path)


def _from_engine(path: Path) -> Source:
    """Read config.json and check only its hash: an engine may hold a hundred gigabytes."""
    if not (path / MANIFEST_FILE).exists():
        raise InputError(
            f"{path} is not an engine directory: it has no {MANIFEST_FILE}",
            hint="give an engine directory or a build's YAML file",
        )
    record = read_manifest(path).files.get(CONFIG_FILE)
    content = read_input(path / CONFIG_FILE, LARGEST_CONFIG, follow_links=False)
    if record is None or _sha256(content) != record.sha256:
        raise InputError(f"{path / CONFIG_FILE} is not the one that was built", hint=rebuild_hint(path))
    return _from_config(content, path / CONFIG_FILE)


def _from_config(content: bytes, path: Path) -> Source:
    config = EngineConfig.parse(content, path)
    return Source(str(path), config.model, config.parameters, config.build.max_batch_size, _checkpoint(config.build))


def _from_build(config: BuildConfig, path: Path) -> Source:
    choice = choose_model(config.model, config.checkpoint, config.revision)
    filled = with_defaults(config, choice)
    parameters = resolve_parameters(filled, choice.config)
    return Source(str(path), choice.config, parameters, filled.max_batch_size, _checkpoint(config))


def _checkpoint(config: BuildConfig) -> str:
    if config.checkpoint is not None:
        return config.checkpoint
    if is_path(config.model) or is_repository(config.model):
        return config.model
    preset = load_preset(config.model) if config.model in list_presets() else None
    return preset.hugging_face_id or "MODEL" if preset is not None else "MODEL"


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


WIDTH = 118
_COLUMN = 34


def yaml_text(export: Export, *, source: str, model: str) -> str:
    """Return the file: `source` names the engine or file exported, `model` the model to give trtllm-serve.

    Both appear only in comments, and the text is parsed again before it is returned.
    """
    configuration = export.configuration
    text = "\n".join((*_heading(export, _one_line(source), _one_line(model)), *_settings(configuration), ""))
    if parse(text) != configuration:
        raise AssertionError("the exported YAML does not say what was meant")
    return text


def parse(text: str) -> LlmApiConfiguration:
    """Parse an exported file strictly; InputError for anything that an export does not write."""
    from kvc_trt.files.strict_yaml import parsed_yaml

    return validated(LlmApiConfiguration, parsed_yaml(text, "exported configuration"), "exported configuration")


def _heading(export: Export, source: str, model: str) -> Iterable[str]:
    parameters = export.parameters
    yield from _comment("RocketKV of TensorRT-LLM (LLM API): LLM(...) arguments, and --config of trtllm-serve.")
    yield from _comment(f"  trtllm-serve {model} --config THIS_FILE")
    yield from _comment(
        f"Written by kvc-trt {__version__} from {source}: policy {parameters.policy}, token budget "
        f"{parameters.token_budget}, prompts to {parameters.max_input_len}, answers to {parameters.max_output_len} "
        "tokens. TensorRT-LLM was not run; `kvc-trt verify` does not check its results."
    )
    yield from _section("Differences from the policy's own numbers", (*export.changes, *traffic_lines(export)))
    yield from _section("Limits under any settings", export.limits)
    yield from _section("Differences from the policy's computation", export.differences)
    yield from _section("Warnings", export.warnings)


def traffic_lines(export: Export) -> tuple[str, ...]:
    """Return the traffic of a step before and after, as sentences."""
    traffic = export.traffic
    line = (
        f"a step at a full cache reads {traffic.theirs:.1f} K/V pairs per layer and KV head in the policy's count "
        f"(policy: {traffic.ours:.1f})"
    )
    if traffic.at_most is None:
        return (line,)
    return (f"{line}, up to {traffic.at_most:.0f} counted for its kernels (all channels, whole cache blocks)",)


def _settings(configuration: LlmApiConfiguration) -> Iterable[str]:
    why = _meanings(configuration.attn_backend)
    for name, value in configuration.model_dump().items():
        if not isinstance(value, dict):
            yield _line(f"{name}: {_scalar(value)}", why.get(name))
            continue
        yield f"{name}:"
        for key, inner in value.items():
            yield _line(f"  {key}: {_scalar(inner)}", why.get(key))


def _meanings(attention: AttentionBackend) -> dict[str, str]:
    unit = "pages per KV head and step" if attention == "TRTLLM" else "tokens per KV head and step"
    return {
        "backend": "the only one that has RocketKV",
        "attn_backend": "decides the unit of topk",
        "window_size": "last queries of a prompt, which choose; always kept",
        "kernel_size": "width of the max-pooling over their votes",
        "prompt_budget": "prompt tokens kept per KV head, the window included",
        "page_size": "tokens per page of key bounds, a power of two",
        "topk": unit,
        "topr": "query channels used to score a page; from the head size on, all",
        "kt_cache_dtype": "type of the page bounds",
        "enable_block_reuse": "must be off",
        "enable_chunked_prefill": "must be off",
        "max_seq_len": "longest prompt and answer, for which the budget was divided",
        "max_num_tokens": "holds the longest prompt in one pass",
    }


def _section(title: str, lines: Iterable[str]) -> Iterable[str]:
    lines = tuple(lines)
    if lines:
        yield "#"
        yield from _comment(f"{title}:")
        for line in lines:
            yield from textwrap.wrap(line, WIDTH, initial_indent="#   - ", subsequent_indent="#     ")


def _comment(text: str) -> Iterable[str]:
    indent = "#   " if text.startswith("  ") else "# "
    return textwrap.wrap(text.strip(), WIDTH, initial_indent=indent, subsequent_indent=indent)


def _line(setting: str, meaning: str | None) -> str:
    return setting if meaning is None else f"{setting.ljust(_COLUMN)}  # {meaning}"


def _scalar(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _one_line(text: str) -> str:
    return "".join(character if character.isprintable() else " " for character in " ".join(text.split()))

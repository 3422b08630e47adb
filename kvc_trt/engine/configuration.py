"""config.json: the configuration that an engine was built with.

The file follows from four facts: the model, the numbers of its policy, the settings of its build, and whether it takes
turns. It is written from them. Reading recovers them and refuses a file that says anything else than they give: readers
have typed values, and no recorded state, length or constant contradicts the others.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

from pydantic import FailFast

from kvc_trt import policies
from kvc_trt.config import BuildConfig
from kvc_trt.engine.manifest import rebuild_hint, recorded, strict_json
from kvc_trt.engine.resolution.resolved_build import check_cosines, compute_dtype
from kvc_trt.errors import InputError, describe
from kvc_trt.graph.state import StateTensor, state_tensors
from kvc_trt.methods.base.constants import ADDED_LATER
from kvc_trt.methods.base.parameters import PolicyParameters
from kvc_trt.models.config import ModelConfig, check_length
from kvc_trt.models.pretrained_config import from_pretrained_config, to_pretrained_config
from kvc_trt.models.quantisation import BLOCK
from kvc_trt.validation import OwnSchema, validated_document
from kvc_trt.version import __version__

LARGEST_CONFIG = 8 << 20
QUANTISATION = {"int8": "W8A16", "int4": "W4A16", "keep": "MIXED_PRECISION"}
"""Weight format -> TensorRT-LLM's name of it; the others are not quantised."""


@dataclass(frozen=True)
class EngineConfig:
    """The facts that config.json records, and everything that follows from them."""

    model: ModelConfig
    """The model, with the dtype in which the engine computes."""
    parameters: PolicyParameters
    build: BuildConfig
    turns: bool
    """True if the state is that of the extend graph."""

    @classmethod
    def parse(cls, content: bytes, source: Path) -> EngineConfig:
        """Return the facts that the bytes of a config.json record.

        Raises InputError, naming the key, for a file of another version, of wrong types, or that contradicts itself.
        """
        found = strict_json(content, source, hint=rebuild_hint(source.parent))
        if (version := found.get("version")) != __version__:
            message = f"{source}: version {describe(version)}, expected {__version__!r}"
            raise InputError(message, hint=rebuild_hint(source.parent))
        file = validated_document(_ConfigFile, found, str(source))
        compression = file.kv_compression
        model = from_pretrained_config(file.pretrained_config, f"{source}: pretrained_config")
        turns = any(not tensor.in_step for tensor in compression.state)
        config = cls(model, compression.parameters, file.build_config.kvc_trt, turns)
        try:
            config.check(found["kv_compression"]["parameters"].keys())
        except InputError as error:
            raise InputError(f"{source}: {error.message}", hint=rebuild_hint(source.parent)) from error
        for problem in _contradictions(found, config.to_json(), ""):
            raise InputError(f"{source}: {problem}", hint=rebuild_hint(source.parent))
        return config

    @cached_property
    def state(self) -> tuple[StateTensor, ...]:
        """Every state tensor, in the order of config.json; enough to allocate, bind and count bytes."""
        return state_tensors(self.model, self.parameters, compute_dtype(self.build.weights), turns=self.turns)

    def check(self, recorded_parameters: Collection[str]) -> None:
        """Raise InputError unless every number is recorded, its kinds are known, and it fits model and settings."""
        parameters, needed = self.parameters, {field.name for field in dataclasses.fields(PolicyParameters)}
        if missing := needed.difference(ADDED_LATER, recorded_parameters):
            raise InputError(f"kv_compression.parameters: {', '.join(sorted(missing))} missing")
        for name in ("policy", "max_input_len", "max_output_len"):
            given, found = getattr(self.build, name), getattr(parameters, name)
            if given not in (None, found):
                raise InputError(
                    f"kv_compression.parameters.{name} is {describe(found)}, kvc_trt has {describe(given)}"
                )
        if self.model.dtype != (computed := compute_dtype(self.build.weights)):
            raise InputError(f"dtype is {self.model.dtype}, {self.build.weights} weights compute in {computed}")
        policies.named(parameters.policy)
        parameters.check(self.model)
        check_cosines(self.build, self.model)
        check_length(self.model, parameters.max_sequence_len, parameters.max_output_len)

    def to_json(self) -> dict[str, Any]:
        """Return config.json: TensorRT-LLM's three sections and field names, and the resolved compression."""
        build = {
            "max_input_len": self.parameters.max_input_len,
            "max_seq_len": self.parameters.max_sequence_len,
            "max_batch_size": self.build.max_batch_size,
            "max_beam_width": 1,
            "kv_cache_type": "CONTINUOUS",
            "gather_context_logits": False,
            "gather_generation_logits": False,
            "strongly_typed": True,
            "plugin_config": {},
            "kvc_trt": self.build.stored(),
        }
        compression = {
            "parameters": dataclasses.asdict(self.parameters),
            "state": [dataclasses.asdict(tensor) for tensor in self.state],
        }
        pretrained = self._pretrained()
        sections = {"pretrained_config": pretrained, "build_config": build, "kv_compression": compression}
        return recorded({"version": __version__, **sections})

    def _pretrained(self) -> dict[str, Any]:
        pretrained = to_pretrained_config(self.model)
        algorithm = QUANTISATION.get(self.build.weights)
        if algorithm is not None:
            pretrained["quantization"] = {**pretrained["quantization"], "quant_algo": algorithm, "group_size": BLOCK}
        return pretrained


class _BuildSection(OwnSchema):
    """`build_config`: TensorRT-LLM's fields follow from the others, and are only compared with them."""

    max_input_len: int
    max_seq_len: int
    max_batch_size: int
    max_beam_width: int
    kv_cache_type: str
    gather_context_logits: bool
    gather_generation_logits: bool
    strongly_typed: bool
    plugin_config: dict[str, Any]
    kvc_trt: BuildConfig


class _Compression(OwnSchema):
    """`kv_compression`."""

    parameters: PolicyParameters
    state: Annotated[tuple[StateTensor, ...], FailFast()]


class _ConfigFile(OwnSchema):
    """The file; `pretrained_config` is validated by `from_pretrained_config`."""

    version: str
    pretrained_config: dict[str, Any]
    build_config: _BuildSection
    kv_compression: _Compression


def _contradictions(found: Any, expected: Any, path: str) -> Iterator[str]:
    """Yield the places in which a recorded document contradicts the facts; missing entries have their defaults."""
    if isinstance(found, dict) and isinstance(expected, dict):
        for name, value in found.items():
            below = f"{path}.{name}" if path else name
            if name in expected:
                yield from _contradictions(value, expected[name], below)
            elif value is not None:  # a setting that is not given
                yield f"unknown key '{below}'"
    elif isinstance(found, list) and isinstance(expected, list):
        if len(found) != len(expected):
            yield f"{path} has {len(found)} entries, expected {len(expected)}, which follows from the rest of the file"
        for position, (value, wanted) in enumerate(zip(found, expected, strict=False)):
            yield from _contradictions(value, wanted, f"{path}.{position}")
    elif found != expected or isinstance(found, bool) is not isinstance(expected, bool):
        yield f"{path} is {describe(found)}, expected {describe(expected)}, which follows from the rest of the file"

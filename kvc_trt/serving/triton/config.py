"""Write config.pbtxt of an exported model, complete, so that Triton need not ask the model to complete it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from kvc_trt.errors import InputError, describe
from kvc_trt.serving.triton.config_schema import config_text, new_config
from kvc_trt.serving.triton.settings import ModelSettings, TextSettings
from kvc_trt.serving.triton.tensors import TensorType
from kvc_trt.version import __version__

if TYPE_CHECKING:
    from kvc_trt.engine import EngineDirectory

VERSION = 1
"""The model's only version; its directory holds the whole model."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,127}")
_HEADING = """\
# Written by kvc-trt. One request is one prompt, hence max_batch_size 1; the model itself answers many of them together.
"""


@dataclass(frozen=True)
class WarmupTensor:
    """A tensor of the warm-up request: its type, and its content as Triton reads it from a file."""

    of_type: TensorType
    content: bytes

    @classmethod
    def tokens(cls, ids: list[int], *dims: int) -> WarmupTensor:
        """Return an INT32 tensor of shape `dims`, by default [number of ids]."""
        return cls(TensorType("INT32", dims or (len(ids),)), np.array(ids, np.int32).tobytes())

    @classmethod
    def text(cls, text: str) -> WarmupTensor:
        """Return a STRING tensor of one text: its length in four bytes, and its UTF-8 bytes."""
        encoded = text.encode()
        return cls(TensorType("STRING"), len(encoded).to_bytes(4, "little") + encoded)


@dataclass(frozen=True)
class PythonModel:
    """The configuration of a model whose code is in model.py."""

    name: str
    settings: ModelSettings | TextSettings
    inputs: Mapping[str, TensorType]
    outputs: Mapping[str, TensorType]
    warmup: Mapping[str, WarmupTensor] = field(default_factory=dict)

    def config(self, engine: EngineDirectory) -> str:
        """Return the text of config.pbtxt."""
        config = new_model_config(self.name, self.inputs, self.outputs)
        config.backend = "python"
        # Steps that convert text answer at once; models that run an engine answer later and send several responses.
        config.model_transaction_policy.decoupled = isinstance(self.settings, ModelSettings)
        config.instance_group.add(count=1, kind="KIND_MODEL")
        for name, value in (_said(engine) | self.settings.parameters()).items():
            config.parameters[name].string_value = value
        if self.warmup:
            self._add_warmup(config)
        return finished_config(config)

    def _add_warmup(self, config: Any) -> None:
        warmup = config.model_warmup.add(name="first_answer", batch_size=1, count=1)  # skipped without batch_size
        for name, tensor in self.warmup.items():
            added = warmup.inputs[name]
            added.MergeFrom(type(added)(**_type(tensor.of_type), input_data_file=name))


def check_model_name(name: str) -> str:
    """Return a model's name, which is also its directory's; InputError for one that is unsafe as a directory name."""
    if not _NAME.fullmatch(name) or ".." in name:
        raise InputError(
            f"{describe(name)} is not a name for a model: expected letters, digits, '_', '-' and single dots",
            hint="choose one with --name",
        )
    return name


def new_model_config(name: str, inputs: Mapping[str, TensorType], outputs: Mapping[str, TensorType]) -> Any:
    """Return a ModelConfig message with the fields that every model has.

    A request is one prompt. Every input is optional, because Triton does not always notice a missing one, and the model
    itself does.
    """
    config = new_config()
    config.name, config.max_batch_size = check_model_name(name), 1
    config.version_policy.specific.versions.append(VERSION)
    for tensor, found in inputs.items():
        config.input.add(name=tensor, optional=True, **_type(found))
    for tensor, found in outputs.items():
        config.output.add(name=tensor, **_type(found))
    return config


def finished_config(config: Any) -> str:
    """Return the text of config.pbtxt."""
    return _HEADING + config_text(config)


def _type(found: TensorType) -> dict[str, Any]:
    return {"data_type": f"TYPE_{found.data_type}", "dims": list(found.dims)}


def _said(engine: EngineDirectory) -> dict[str, str]:
    parameters = engine.parameters
    return {
        "kvc_trt_version": __version__,
        "kv_policy": parameters.policy,
        "kv_token_budget": str(parameters.token_budget),
    }

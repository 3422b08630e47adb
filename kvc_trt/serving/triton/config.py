"""config.pbtxt of an exported model: complete, so that Triton need not ask the model for anything that is missing."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from kvc_trt.errors import InputError, describe
from kvc_trt.serving.triton.config_schema import config_text, new_config
from kvc_trt.serving.triton.settings import ModelSettings
from kvc_trt.serving.triton.tensors import INPUTS, OUTPUTS, TensorType
from kvc_trt.version import __version__

if TYPE_CHECKING:
    from kvc_trt.engine import EngineDirectory

VERSION = 1
"""The model's only version, whose directory holds all of it."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,127}")
_HEADING = """\
# Written by kvc-trt. One request is one prompt, hence max_batch_size 1; the model itself answers many of them together.
"""


def check_model_name(name: str) -> str:
    """Return a model's name, which is also its directory's; InputError for one that could be something else there."""
    if not _NAME.fullmatch(name) or ".." in name:
        raise InputError(
            f"{describe(name)} is not a name for a model: expected letters, digits, '_', '-' and single dots",
            hint="choose one with --name",
        )
    return name


def model_config(engine: EngineDirectory, name: str, settings: ModelSettings, warmup: Mapping[str, TensorType]) -> str:
    """Return the text of config.pbtxt; `warmup` are the inputs of the request that comes before all others."""
    config = new_config()
    config.name, config.backend, config.max_batch_size = check_model_name(name), "python", 1
    config.model_transaction_policy.decoupled = True
    config.version_policy.specific.versions.append(VERSION)
    config.instance_group.add(count=1, kind="KIND_MODEL")
    for tensor, found in INPUTS.items():
        config.input.add(name=tensor, optional=True, **_type(found))
    for tensor, found in OUTPUTS.items():
        config.output.add(name=tensor, **_type(found))
    _add_parameters(config, _said(engine) | settings.parameters())
    _add_warmup(config, warmup.items())
    return _HEADING + config_text(config)


def _type(found: TensorType) -> dict[str, Any]:
    return {"data_type": f"TYPE_{found.data_type}", "dims": [found.length]}


def _said(engine: EngineDirectory) -> dict[str, str]:
    parameters = engine.parameters
    return {
        "kvc_trt_version": __version__,
        "kv_policy": parameters.policy,
        "kv_token_budget": str(parameters.token_budget),
    }


def _add_parameters(config: Any, parameters: Mapping[str, str]) -> None:
    for name, value in parameters.items():
        config.parameters[name].string_value = value


def _add_warmup(config: Any, inputs: Iterable[tuple[str, TensorType]]) -> None:
    warmup = config.model_warmup.add(name="first_answer", batch_size=1, count=1)  # without batch_size Triton skips it
    for name, found in inputs:
        added = warmup.inputs[name]
        added.MergeFrom(type(added)(**_type(found), input_data_file=name))

"""model.yaml of TensorRT-LLM's own Triton model (its `llmapi` layout): an export, the model, and Triton's settings.

TensorRT-LLM brings that model's config.pbtxt, model.py and helpers.py; model.yaml is what it leaves to its user.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from kvc_trt.backends.tensorrt_llm.llm_api import Export, LlmApiConfiguration
from kvc_trt.backends.tensorrt_llm.llm_api_file import yaml_text
from kvc_trt.validation import validated

_HOW = """\
# As model.yaml of TensorRT-LLM's Triton model: in its repository triton_backend/all_models/llmapi, as
# tensorrt_llm/1/model.yaml, or elsewhere with LLM_CONFIG_PATH=/path/of/this/file in the server's environment.
"""


class TritonSettings(BaseModel):
    """The model's reading of its config.pbtxt: it takes no batches, and streams only if it is decoupled."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)
    max_batch_size: Literal[0] = 0
    decoupled: Literal[True] = True


class TritonModel(LlmApiConfiguration):
    """All of the file."""

    model: Annotated[str, Field(min_length=1)]
    triton_config: TritonSettings = TritonSettings()


def model_yaml(export: Export, *, source: str, model: str) -> str:
    """Return the file: `source` is what was exported, `model` a Hugging Face name or directory; InputError for none."""
    import yaml

    from kvc_trt.files.strict_yaml import parsed_yaml

    meant = validated(
        TritonModel, {**export.configuration.model_dump(), "model": model}, "the model that Triton is to load"
    )
    added = yaml.safe_dump({"model": model, "triton_config": meant.triton_config.model_dump()}, sort_keys=False)
    text = _HOW + yaml_text(export, source=source, model=model) + added
    if validated(TritonModel, parsed_yaml(text, "exported model.yaml"), "exported model.yaml") != meant:
        raise AssertionError("the exported model.yaml does not say what was meant")
    return text

"""Write an engine as TensorRT-LLM's four models (`model_names.py`), so that their clients work unchanged.

REPO/ensemble/config.pbtxt              what clients ask: the other three, one after the other
REPO/preprocessing/1/tokenizer.json     text to tokens
REPO/tensorrt_llm/1/engine/             the engine, linked or copied
REPO/postprocessing/1/tokenizer.json    tokens to text
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvc_trt.errors import InputError
from kvc_trt.serving.engine import ServingSettings
from kvc_trt.serving.triton.config import PythonModel, WarmupTensor, finished_config, new_model_config
from kvc_trt.serving.triton.family import model_names as family
from kvc_trt.serving.triton.family.model_names import ENGINE_STEP, ENSEMBLE, POSTPROCESSING, PREPROCESSING
from kvc_trt.serving.triton.repository import (
    WARMUP_TEXT,
    WARMUP_TOKENS,
    RepositoryModel,
    engine_files,
    write_models,
)
from kvc_trt.serving.triton.settings import TOKENIZER, ModelSettings, Role, TextSettings

if TYPE_CHECKING:
    from kvc_trt.engine import EngineDirectory
    from kvc_trt.files.held import HeldFile

_LATEST = -1
_PROMPT = {"INPUT_ID": "_input_ids", "REQUEST_INPUT_LEN": "_input_length", "REQUEST_OUTPUT_LEN": "_max_tokens"}
_TEXT = {
    "answer_ids": "_answer_ids",
    "answer_length": "_answer_length",
    "text_range": "_text_range",
    "answer_key": "_answer_key",
}


def export_ensemble(engine: EngineDirectory, repository: Path, settings: ServingSettings | None = None) -> Path:
    """Write the four models into a repository, which is made if it does not exist; return the path of `ensemble`.

    Raises InputError for an engine without a tokenizer, and if one of the names is taken.
    """
    tokenizer = engine.tokenizer
    if tokenizer is None or engine.tokenizer_file is None:
        raise InputError(
            f"{engine.path} has no tokenizer, and preprocessing and postprocessing need one",
            hint="--layout single, which takes input_ids",
        )
    ids = tokenizer.encode(WARMUP_TEXT).ids or [0]
    step_settings = ModelSettings(engine.digest, settings or ServingSettings(), "engine")
    step = PythonModel(ENGINE_STEP, step_settings, family.ENGINE_INPUTS, family.ENGINE_OUTPUTS, _step_warmup(ids))
    models = [
        _text_model(engine, engine.tokenizer_file, "preprocessing", {"QUERY": WarmupTensor.text(WARMUP_TEXT)}),
        RepositoryModel(ENGINE_STEP, step.config(engine), engine_files(engine), step.warmup),
        _text_model(engine, engine.tokenizer_file, "postprocessing", _tokens_warmup(ids)),
        RepositoryModel(ENSEMBLE, ensemble_config()),
    ]
    return write_models(repository, models, "choose another repository")[-1]


def ensemble_config() -> str:
    """Return the text of config.pbtxt of the model to which clients send requests."""
    config = new_model_config(ENSEMBLE, family.ENSEMBLE_INPUTS, family.ENSEMBLE_OUTPUTS)
    config.platform = "ensemble"
    before = {"QUERY": "text_input", "REQUEST_OUTPUT_LEN": "max_tokens"}
    prompt = {"input_ids": "INPUT_ID", "input_lengths": "REQUEST_INPUT_LEN", "request_output_len": "REQUEST_OUTPUT_LEN"}
    asked = {name: _PROMPT[made] for name, made in prompt.items()} | {one.engine: one.ensemble for one in family.NAMES}
    after = dict(zip(family.POSTPROCESSING_INPUTS, _TEXT.values(), strict=True))
    _add_step(config, PREPROCESSING, before, _PROMPT)
    _add_step(config, ENGINE_STEP, asked, _TEXT | {name: name for name in family.ANSWER})
    _add_step(config, POSTPROCESSING, after, {"OUTPUT": "text_output"})
    return finished_config(config)


def _add_step(config: Any, name: str, inputs: Mapping[str, str], outputs: Mapping[str, str]) -> None:
    step = config.ensemble_scheduling.step.add(model_name=name, model_version=_LATEST)
    step.input_map.update(inputs)
    step.output_map.update(outputs)


def _text_model(
    engine: EngineDirectory, tokenizer: HeldFile, role: Role, warmup: Mapping[str, WarmupTensor]
) -> RepositoryModel:
    before = role == "preprocessing"
    lengths = engine.parameters.max_input_len, engine.parameters.max_output_len
    model = PythonModel(
        PREPROCESSING if before else POSTPROCESSING,
        TextSettings(role, str(tokenizer.digest), *lengths),
        family.PREPROCESSING_INPUTS if before else family.POSTPROCESSING_INPUTS,
        family.PREPROCESSING_OUTPUTS if before else family.POSTPROCESSING_OUTPUTS,
        warmup,
    )
    return RepositoryModel(model.name, model.config(engine), {TOKENIZER: tokenizer}, warmup)


def _step_warmup(ids: list[int]) -> dict[str, WarmupTensor]:
    return {
        "input_ids": WarmupTensor.tokens(ids),
        "input_lengths": WarmupTensor.tokens([len(ids)]),
        "request_output_len": WarmupTensor.tokens([WARMUP_TOKENS]),
    }


def _tokens_warmup(ids: list[int]) -> dict[str, WarmupTensor]:
    return {"TOKENS_BATCH": WarmupTensor.tokens(ids, 1, len(ids)), "SEQUENCE_LENGTH": WarmupTensor.tokens([len(ids)])}

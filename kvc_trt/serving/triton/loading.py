"""Load the models of an exported repository for its `model.py`: an engine, or a step with a tokenizer."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvc_trt.errors import KvcError
from kvc_trt.files.lost import report_lost_files
from kvc_trt.serving.engine import ServedEngine
from kvc_trt.serving.errors import ServingError
from kvc_trt.serving.triton.errors import log_to
from kvc_trt.serving.triton.family.engine_step import EngineStep
from kvc_trt.serving.triton.family.text_steps import TextStep
from kvc_trt.serving.triton.model import TritonEngine
from kvc_trt.serving.triton.openai import OpenAiModel
from kvc_trt.serving.triton.settings import ENGINE, ModelSettings, read_settings


def load_model(pb_utils: Any, args: Mapping[str, str]) -> TritonEngine | TextStep:
    """Check the files beside model.py, load them, and return the model that answers Triton's requests.

    `pb_utils` is Triton's module `triton_python_backend_utils`, `args` are the arguments of `initialize`. Raises
    TritonModelException, whose message has no path of this machine, if the model cannot be loaded.
    """
    log_to(pb_utils.Logger)
    report_lost_files()  # the process is Triton's stub for this model alone
    directory = Path(pb_utils.get_model_dir())
    try:
        settings = read_settings(json.loads(args["model_config"]))
        if isinstance(settings, ModelSettings):
            return _engine_model(pb_utils, args, directory, settings)
        return TextStep(pb_utils, directory, settings)
    except (KvcError, ServingError) as error:
        hint = getattr(error, "hint", None)
        message = f"{error.message}; {hint}" if hint else error.message
        # Triton shows this message to every client that may list its models.
        raise pb_utils.TritonModelException(message.replace(f"{directory}/", "")) from None


def _engine_model(pb_utils: Any, args: Mapping[str, str], directory: Path, settings: ModelSettings) -> TritonEngine:
    engine = ServedEngine.open(directory / ENGINE, settings.serving, digest=settings.digest)
    if settings.role == "engine":
        return EngineStep(pb_utils, args, engine)
    return OpenAiModel(pb_utils, args, engine)

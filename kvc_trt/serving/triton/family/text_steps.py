"""`preprocessing` and `postprocessing` of the family (`model_names.py`): text to tokens, and tokens to text."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvc_trt.errors import InputError
from kvc_trt.files.inputs import read_input
from kvc_trt.models.sources.tokenizer import TOKENIZER_FILES
from kvc_trt.models.sources.tokenizer_library import Tokenizer
from kvc_trt.serving.errors import invalid, serving_error
from kvc_trt.serving.fields import FIELDS
from kvc_trt.serving.tokens import token_ids
from kvc_trt.serving.triton.errors import triton_error
from kvc_trt.serving.triton.family.engine_step import refuse_parameters
from kvc_trt.serving.triton.family.model_names import (
    ENGINE_STEP,
    ENSEMBLE_INPUTS,
    POSTPROCESSING_INPUTS,
    PREPROCESSING_INPUTS,
    PREPROCESSING_OUTPUTS,
)
from kvc_trt.serving.triton.settings import TOKENIZER, TextSettings
from kvc_trt.serving.triton.tensors import Outputs, array_of, response, tensors_of
from kvc_trt.serving.values import checked


class TextStep:
    """One loaded text step. It answers each request at once, with one response."""

    def __init__(self, pb_utils: Any, directory: Path, settings: TextSettings) -> None:
        self._pb_utils = pb_utils
        tokenizer = _tokenizer(directory / TOKENIZER, settings.digest)
        steps: dict[str, Callable[[Any], Outputs]] = {
            "preprocessing": lambda request: _preprocessed(request, tokenizer, settings),
            "postprocessing": lambda request: _postprocessed(request, tokenizer),
        }
        self._step = steps[settings.role]
        self._follows = settings.role == "postprocessing"

    def execute(self, requests: Iterable[Any]) -> list[Any]:
        """Return the responses; an error in a request goes to its client alone."""
        return [self._answer(request) for request in requests]

    def close(self) -> None:
        """Do nothing: every request has been answered."""

    def _answer(self, request: Any) -> Any:
        try:
            if self._follows and request.is_cancelled():
                self._cancel(request)
            return response(self._pb_utils, list(self._step(request)))
        except InputError as error:
            found = invalid(error)
        except Exception as error:  # an error must not reach other requests
            found = serving_error(error)
        return self._pb_utils.InferenceResponse(error=triton_error(self._pb_utils, found))

    def _cancel(self, request: Any) -> None:
        """Ask the engine to cancel this answer, whose client has gone (`EngineStep`)."""
        keys = [tensor.as_numpy() for tensor in request.inputs() if tensor.name() == "ANSWER_KEY"]
        for key in keys:
            cancelling = self._pb_utils.InferenceRequest(
                model_name=ENGINE_STEP,
                requested_output_names=["output_ids"],
                inputs=[self._pb_utils.Tensor("cancel_answer", key)],
            )
            for _ in cancelling.exec(decoupled=True):
                pass


def _tokenizer(path: Path, digest: str) -> Tokenizer:
    again = "export the engine again: kvc-trt export --help"
    content = read_input(path, TOKENIZER_FILES["tokenizer.json"], hint=again)
    if (found := hashlib.sha256(content).hexdigest()) != digest:
        raise InputError(
            f"{path} is another tokenizer than the one that was exported: its SHA-256 is {found}, expected {digest}",
            hint=again,
        )
    return Tokenizer(content, str(path))


def _preprocessed(request: Any, tokenizer: Tokenizer, settings: TextSettings) -> Outputs:
    refuse_parameters(request, ENSEMBLE_INPUTS)
    given = tensors_of(request, PREPROCESSING_INPUTS)
    if "QUERY" not in given:
        raise InputError("the prompt is text_input, found none")
    text = checked(FIELDS["text_input"], given["QUERY"])
    if not text:
        raise InputError("the prompt is empty")
    ids = token_ids(tokenizer, text, settings.max_input_len)
    wanted = checked(FIELDS["max_tokens"], given.get("REQUEST_OUTPUT_LEN", settings.max_output_len))
    values: Mapping[str, list[Any]] = {
        "INPUT_ID": list(ids), "REQUEST_INPUT_LEN": [len(ids)], "REQUEST_OUTPUT_LEN": [wanted],
    }  # fmt: skip
    return ((name, array_of([value], PREPROCESSING_OUTPUTS[name])) for name, value in values.items())


def _postprocessed(request: Any, tokenizer: Tokenizer) -> Iterator[tuple[str, NDArray[Any]]]:
    """Yield the text of a response: the range `TEXT_RANGE` (`ENGINE_OUTPUTS`), or all text without it."""
    given: dict[str, Any] = tensors_of(request, POSTPROCESSING_INPUTS)
    if "TOKENS_BATCH" not in given or "SEQUENCE_LENGTH" not in given:
        raise InputError("expected TOKENS_BATCH and SEQUENCE_LENGTH")
    ids = given["TOKENS_BATCH"][: max(given["SEQUENCE_LENGTH"], 0)]
    prompt, first, last = given.get("TEXT_RANGE", (0, 0, None))
    text = _decoded(tokenizer, ids[:prompt]) + _decoded(tokenizer, ids[prompt:])[first:last]
    # One dimension, as clients of this family read it.
    yield "OUTPUT", np.array([text.encode("utf-8")], np.object_)


def _decoded(tokenizer: Tokenizer, ids: list[int]) -> str:
    return str(tokenizer.decode(ids, skip_special_tokens=True)) if ids else ""

"""`tensorrt_llm` of the family (`model_names.py`): a request of tokens, answered with tokens."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Iterator, Mapping
from typing import Any
from weakref import WeakValueDictionary

from typing_extensions import override

from kvc_trt.errors import InputError, describe, did_you_mean
from kvc_trt.serving.engine import ServedEngine
from kvc_trt.serving.errors import LOG, ServingError
from kvc_trt.serving.fields import FIELDS
from kvc_trt.serving.request import ServedRequest, parse_request
from kvc_trt.serving.served_answer import Answer, Piece
from kvc_trt.serving.triton.family.model_names import (
    ENGINE_INPUTS,
    ENGINE_OUTPUTS,
    LENGTH,
    NAMES,
    POSTPROCESSING,
    POSTPROCESSING_INPUTS,
    REFUSED,
)
from kvc_trt.serving.triton.model import TritonEngine
from kvc_trt.serving.triton.tensors import Outputs, WriteOutputs, array_of, parameters_of, tensors_of
from kvc_trt.serving.values import checked

_OURS = {one.engine: one.field.name for one in NAMES if one.field.name in FIELDS}
_OURS |= {"input_ids": "input_ids", "request_output_len": LENGTH}
_THEIRS = {one.engine: one.field for one in NAMES if one.field.name not in FIELDS}
_NO_END = -1
"""The `end_id` that stands for no token: only its length ends the answer."""


class EngineStep(TritonEngine):
    """One loaded engine whose answers `postprocessing` can cancel.

    Triton informs a step of an ensemble that its client has gone only if the step begins after that. `postprocessing`,
    which begins for each response, finds out and sends a request to the engine to cancel the answer.
    """

    def __init__(self, pb_utils: Any, args: Mapping[str, str], engine: ServedEngine) -> None:
        super().__init__(pb_utils, args, engine, read_step)
        self._answers: WeakValueDictionary[int, Answer] = WeakValueDictionary()
        """The answers that have not ended, by their keys."""

    @override
    def execute(self, requests: Iterable[Any]) -> None:
        """Submit requests to the engine, and cancel the answers that `cancel_answer` names."""
        super().execute([request for request in requests if not self._cancelled_by(request)])

    def _cancelled_by(self, request: Any) -> bool:
        for tensor in request.inputs():
            if tensor.name() == "cancel_answer":
                answer = self._answers.get(int(tensor.as_numpy().reshape(-1)[0]))
                if answer is not None:
                    answer.cancel()
                request.get_response_sender().send(flags=self._final)
                return True
        return False

    @override
    async def _fail(self, sender: Any, error: ServingError, begun: bool) -> None:
        """Send the error of an answer that could not be completed; a cancelled answer just ends.

        If a step fails while another one runs, Triton 2.51 loses count of the ensemble's steps and cannot stop. So the
        error of an answer of which a part was sent waits until `postprocessing` has shown that part.
        """
        if error.reason == "cancelled":  # nobody waits for it
            sender.send(flags=self._final)
            return
        if begun:
            await self._all_shown()
        self._refuse(sender, error)

    async def _all_shown(self) -> None:
        """Wait until `postprocessing` has answered everything that was sent to it.

        It answers requests one by one, in their order: this asks for the text of no tokens, and the text comes last.
        """
        no_tokens = {"TOKENS_BATCH": [[[]]], "SEQUENCE_LENGTH": [[0]]}
        arrays = {name: array_of(values, POSTPROCESSING_INPUTS[name]) for name, values in no_tokens.items()}
        try:
            await self._pb_utils.InferenceRequest(
                model_name=POSTPROCESSING,
                requested_output_names=["OUTPUT"],
                inputs=[self._pb_utils.Tensor(name, array) for name, array in arrays.items()],
            ).async_exec()
        except Exception:  # the error must reach its client all the same
            LOG.exception("%s cannot be asked", POSTPROCESSING)

    @override
    def _take(self, request: Any) -> tuple[ServedRequest, WriteOutputs, Answer]:
        asked, write, answer = super()._take(request)
        assert isinstance(write, StepOutputs)
        self._answers[write.key] = answer
        return asked, write, answer


def read_step(request: Any) -> tuple[ServedRequest, WriteOutputs]:
    """Return a request with the function that writes its answer's tensors; InputError if it is wrong."""
    refuse_parameters(request, ENGINE_INPUTS)
    given = tensors_of(request, ENGINE_INPUTS)
    _check_length(given)
    echo = not checked(FIELDS["exclude_input_in_output"], given.pop("exclude_input_in_output", True))
    theirs = {name: checked(field, given[name]) for name, field in _THEIRS.items() if name in given}
    fields = {_OURS[name]: value for name, value in given.items() if name in _OURS}
    if "end_id" in theirs:
        fields["ignore_eos"] = True
        fields["stop_token_ids"] = [] if theirs["end_id"] == _NO_END else [theirs["end_id"]]
    asked = parse_request(fields)
    return asked, StepOutputs(asked, echo)


def refuse_parameters(request: Any, known: Mapping[str, Any]) -> None:
    """Raise InputError for any parameter of a request, that is, for a field that is not a tensor of the model."""
    for name in parameters_of(request):
        if name in REFUSED:
            raise InputError(f"{name} is not supported: {REFUSED[name]}")
        raise InputError(f"unknown parameter {describe(name)}{did_you_mean(name, known)}")


def _check_length(given: dict[str, object]) -> None:
    length, ids = given.pop("input_lengths", None), given.get("input_ids")
    if length is not None and isinstance(ids, list) and length != len(ids):
        raise InputError(f"input_lengths is {length}, and input_ids has {len(ids)} tokens: a request is one prompt")


class StepOutputs:
    """Writes the tensors of one answer. `echo` puts the prompt's tokens before the answer's."""

    def __init__(self, request: ServedRequest, echo: bool) -> None:
        self.key = secrets.randbits(64)
        self._request = request
        self._prompt = list(request.token_ids or ()) if echo else []
        self._answer: list[int] = []
        self._characters = 0
        """The number of characters of the answer's text in earlier responses."""
        self._logprob = 0.0

    def __call__(self, piece: Piece, input_tokens: int) -> Outputs:
        """Return the tensors of the next response."""
        return ((name, array_of(values, ENGINE_OUTPUTS[name])) for name, values in self._named(piece, input_tokens))

    def _named(self, piece: Piece, input_tokens: int) -> Iterator[tuple[str, list[Any]]]:
        returns, prompt, before = self._request.returns, self._prompt, self._characters
        self._answer += piece.token_ids
        self._characters += len(piece.text)
        self._prompt = []
        yield "output_ids", [[[*prompt, *piece.token_ids]]]
        yield "sequence_length", [[len(prompt) + len(piece.token_ids)]]
        yield "answer_ids", [[[*prompt, *self._answer]]]
        yield "answer_length", [[len(prompt) + len(self._answer)]]
        yield "text_range", [[len(prompt), before, self._characters]]
        yield "answer_key", [[self.key]]
        if piece.logprobs is not None:
            self._logprob += sum(piece.logprobs)
            yield "cum_log_probs", [[self._logprob]]
            yield "output_log_probs", [[list(piece.logprobs)]]
        if "num_input_tokens" in returns:
            yield "num_input_tokens", [[input_tokens]]
        if "num_output_tokens" in returns:
            yield "num_output_tokens", [[len(piece.token_ids)]]
        if piece.end is None:
            return
        if "finish_reason" in returns:
            yield "finish_reason", [[piece.end.finish_reason.encode("utf-8")]]
        if "kv_cache_tokens" in returns:
            yield "kv_cache_tokens_kept", [[piece.end.kept_tokens]]
            yield "kv_cache_tokens_total", [[piece.end.logical_tokens]]
            yield "kv_cache_tokens_reused", [[piece.end.reused_tokens]]

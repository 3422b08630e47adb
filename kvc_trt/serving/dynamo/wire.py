"""The messages between our gateway and our workers, which Dynamo's frontend passes on without reading them.

A request is its prompt's token ids, with its rules in an annotation. Its answer is one document for each token, in the
`engine_data` of Dynamo's chunks. So our fields need no counterpart among Dynamo's, and none can be lost there.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from kvc_trt.errors import InputError, describe
from kvc_trt.proof import document_of
from kvc_trt.proof.file import proof_of
from kvc_trt.runtime.answer_rules import RULES, AnswerRule
from kvc_trt.runtime.grammar.grammar import Grammar
from kvc_trt.runtime.kinds import Kind
from kvc_trt.runtime.logprobs import TokenLogprobs
from kvc_trt.runtime.request import Event, FinishReason, Output, Request, request_under
from kvc_trt.serving.errors import Reason, ServingError
from kvc_trt.validation import OwnSchema, validated

RULES_NOTE = "kvc-trt.rules:"
"""The prefix of the annotation that holds a request's rules, as a JSON object by their names in the table of rules."""
OUR_DATA = "engine_data"
"""The field for a worker's own data, in a worker's chunks and in `nvext` of the frontend's."""
OURS = "kvc"
"""The key of our document in that field."""


class _Refused(OwnSchema):
    reason: Reason
    message: str


class _Output(OwnSchema):
    text: str | None
    finish_reason: FinishReason
    logical_length: int
    physical_lengths: list[int]
    reused_tokens: int
    moved_bytes: int | None = None
    kv_proof: dict[str, Any] | None = None


class _Token(OwnSchema):
    """One token of an answer; the last one has `output`."""

    token: int
    text: str
    logprob: float | None = None
    best: list[int] | None = None
    """The ids of the most likely tokens, if their log-probabilities are requested."""
    best_logprobs: list[float] | None = None
    output: _Output | None = None
    refused: _Refused | None = None


def message_of(request: Request, model: str) -> dict[str, Any]:
    """Return the body of the HTTP request that asks Dynamo's frontend for an answer as a stream."""
    return {
        "model": model,
        "prompt": list(request.prompt_token_ids),
        "stream": True,
        "ignore_eos": True,  # the worker ends the answer, and the frontend looks for no end of its own
        "nvext": {"annotations": [_note_of(request)], "extra_fields": [OUR_DATA]},
    }


def is_ours(asked: Mapping[str, Any]) -> bool:
    """Return whether a message to a worker comes from our gateway (`message_of`)."""
    return _note(asked) is not None


def request_in(asked: Mapping[str, Any]) -> Request:
    """Return the request in a message of our gateway; InputError for an invalid message."""
    try:
        rules = json.loads(_note(asked) or "")
    except (ValueError, RecursionError) as error:
        raise InputError("the rules of the annotation are not valid JSON") from error
    if not isinstance(rules, dict):
        raise InputError(f"the rules of the annotation are {describe(rules)}, expected a JSON object")
    for name in rules:
        if name not in RULES:
            raise InputError(f"the rules of the annotation: there is no rule {describe(name)}")
    read = {name: _read(RULES[name], value) for name, value in rules.items()}
    return request_under(list(asked.get("token_ids") or ()), read)


def document_of_event(event: Event) -> dict[str, Any]:
    """Return the document that a worker sends for one token."""
    found: dict[str, Any] = {"token": event.token_id, "text": event.text}
    if event.logprobs is not None:
        found["logprob"] = event.logprobs.logprob
        found["best"] = [token for token, _ in event.logprobs.top]
        found["best_logprobs"] = [logprob for _, logprob in event.logprobs.top]
    if event.output is not None:
        found["output"] = _document_of_output(event.output)
    return found


def document_of_refusal(error: ServingError) -> dict[str, Any]:
    """Return the document that a worker sends for a request that it refuses."""
    return {"token": 0, "text": "", "refused": {"reason": error.reason, "message": error.message}}


class AnswerReader:
    """Turns the documents of one request's answer back into events."""

    def __init__(self, request: Request) -> None:
        self._request = request
        self._token_ids: list[int] = []
        self._logprobs: list[TokenLogprobs] = []

    def read(self, found: object) -> Event:
        """Return the event of the next document; ServingError if it is a refusal, InputError if it is invalid."""
        said = validated(_Token, found, "a worker's answer")
        if said.refused is not None:
            raise ServingError(said.refused.reason, said.refused.message)
        top = tuple(zip(said.best or (), said.best_logprobs or (), strict=False))
        logprobs = None if said.logprob is None else TokenLogprobs(said.logprob, top)
        self._token_ids.append(said.token)
        if logprobs is not None:
            self._logprobs.append(logprobs)
        output = None if said.output is None else self._output(said.output)
        return Event(0, said.token, said.text, output, logprobs)

    def _output(self, said: _Output) -> Output:
        return Output(
            prompt_token_ids=tuple(self._request.prompt_token_ids),
            token_ids=tuple(self._token_ids),
            text=said.text,
            finish_reason=said.finish_reason,
            logical_length=said.logical_length,
            physical_lengths=tuple(said.physical_lengths),
            reused_tokens=said.reused_tokens,
            logprobs=None if self._request.logprobs is None else tuple(self._logprobs),
            kv_proof=None if said.kv_proof is None else proof_of(said.kv_proof, "a worker's answer"),
            moved_bytes=said.moved_bytes,
        )


def _note_of(request: Request) -> str:
    rules = {}
    for rule in RULES.values():
        value = getattr(request.sampling if rule.of_sampling else request, rule.name)
        if value != rule.default:
            rules[rule.name] = asdict(value) if rule.kind is Kind.GRAMMAR else value
    return RULES_NOTE + json.dumps(rules, ensure_ascii=False, separators=(",", ":"))


def _note(asked: Mapping[str, Any]) -> str | None:
    """Return the JSON text of the rules among a message's annotations; None without rules.

    Without our gateway in front of Dynamo, annotations are the client's own.
    """
    annotations = asked.get("annotations")
    for one in annotations if isinstance(annotations, (list, tuple)) else ():
        if isinstance(one, str) and one.startswith(RULES_NOTE):
            return one[len(RULES_NOTE) :]
    return None


def _read(rule: AnswerRule, value: Any) -> Any:
    """Convert a rule's value from JSON to the type in `Request`: a grammar, or biases by integer token ids."""
    try:
        if rule.kind is Kind.GRAMMAR:
            return Grammar(**value)
        return {int(token): bias for token, bias in value.items()} if rule.kind is Kind.BIASES else value
    except (TypeError, ValueError, AttributeError) as error:
        raise InputError(f"the rules of the annotation: {rule.name} is {describe(value)}") from error


def _document_of_output(output: Output) -> dict[str, Any]:
    found: dict[str, Any] = {
        "text": output.text,
        "finish_reason": output.finish_reason,
        "logical_length": output.logical_length,
        "physical_lengths": list(output.physical_lengths),
        "reused_tokens": output.reused_tokens,
    }
    if output.moved_bytes is not None:
        found["moved_bytes"] = output.moved_bytes
    if output.kv_proof is not None:
        found["kv_proof"] = document_of(output.kv_proof)
    return found

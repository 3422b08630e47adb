"""One answer as an entry of `choices`: its chunks in a stream, and the complete choice, made of the same parts."""

from __future__ import annotations

from statistics import mean
from typing import Any, TypeAlias

from kvc_trt.proof import document_of
from kvc_trt.runtime.request import Event, Output, Request
from kvc_trt.serving.protocol.fields import Endpoint
from kvc_trt.serving.protocol.logprobs import AnswerToken, chat_logprobs, completion_logprobs
from kvc_trt.serving.protocol.model import ServedModel
from kvc_trt.serving.protocol.tools import chunk_of, message_of
from kvc_trt.tool_calls.deltas import Delta
from kvc_trt.tool_calls.reader import CallMarks, Reader

REASONS = {"stop": "stop", "length": "length", "capacity": "length", "interrupted": "stop"}
"""Our finish reasons -> OpenAI's, which has none for a full cache (`capacity`). An answer is `interrupted` after the
only tool call that it may have."""

Part: TypeAlias = dict[str, Any]
"""An entry of `choices` in a chunk of a stream."""


class Choice:
    """Choice `index` of a response: the answer to `request`, with the text `opening` before it.

    `prompt` is the index of its prompt among the prompts of the client's request.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        index: int,
        request: Request,
        model: ServedModel,
        *,
        prompt: int = 0,
        opening: str = "",
        reader: Reader | None = None,
    ) -> None:
        """Make a choice without tokens; `reader` finds tool calls and reasoning in a chat's answer."""
        self.index, self.prompt = index, prompt
        self.output: Output | None = None
        """The complete answer; None until it is over."""
        self._chat, self._request, self._model = endpoint is Endpoint.CHAT, request, model
        self._opening = opening
        self._ends = model.end_token_ids | frozenset(request.stop_token_ids)
        self._offset = len(opening)
        """The number of characters before the next token whose log-probability is written."""
        self._texts: list[str] = []
        self._reader = reader or Reader(CallMarks())
        special = {mark: model.special_tokens.get(mark) for mark in self._reader.looks_for}
        self._marks = {token: mark for mark, token in special.items() if token is not None and token not in self._ends}
        self._deltas: list[Delta] = []
        self._drawn: list[AnswerToken] = []

    @property
    def wants_no_more(self) -> bool:
        """True once the rest of the answer would be ignored: it has the only tool call that it may have.

        False under a grammar, which ends the answer there itself, after the same number of tokens on every server.
        """
        return self._reader.is_done and self._request.grammar is None

    def begin(self) -> list[Part]:
        """Return the parts of a stream before the first token."""
        if self._chat:
            return [self._part({"role": "assistant", "content": ""})]
        return [self._part(self._opening)] if self._opening else []

    def push(self, event: Event) -> list[Part]:
        """Add one token, and return the parts of a stream that it completes; often none, until a character is whole."""
        drawn = self._drawn_by(event)
        self._drawn += drawn
        said = self._said(event)
        if drawn and not said:
            said = [{"content": ""} if self._chat else ""]
        parts = [self._part(one, self._logprobs(drawn) if place == 0 else None) for place, one in enumerate(said)]
        if event.output is not None:
            self.output = event.output
            parts.append({**self._part({} if self._chat else ""), **self._end(event.output)})
        return parts

    def whole(self) -> dict[str, Any]:
        """Return the complete choice for a response; the answer must be over."""
        assert self.output is not None, "the answer is over"
        self._offset = len(self._opening)
        logprobs = None if self._request.logprobs is None else self._logprobs(self._drawn)
        said: dict[str, Any] = {"text": "".join((self._opening, *self._texts))}
        if self._chat:
            said = {"message": {**message_of(self._deltas), "refusal": None}}
        return {"index": self.index, **said, "logprobs": logprobs, **self._end(self.output)}

    def _said(self, event: Event) -> list[dict[str, Any] | str]:
        """Return the new content that an event makes final: a completion's text, or a chat's deltas."""
        if not self._chat:
            text = self._after_opening(event)
            self._texts += [text] if text else []
            return [text] if text else []
        # A mark may be a special token, which has no text. The event's text was held back before it, so it goes first.
        new = self._reader.feed(event.text + self._marks.get(event.token_id, ""))
        if event.output is not None:
            new += self._reader.finish()
        self._deltas += new
        return [chunk_of(delta) for delta in new]

    def _after_opening(self, event: Event) -> str:
        """Return an event's text; the answer's first one gets its token's leading space if `opening` precedes it."""
        begins = bool(event.text and self._opening and not self._texts and event.text[0] != " ")
        space = " " if begins and self._model.spelling.text(event.token_id).startswith(" ") else ""
        return space + event.text

    def _drawn_by(self, event: Event) -> list[AnswerToken]:
        """Return the event's token if its log-probability is requested; the token that ends an answer is left out."""
        ended = event.output is not None and event.output.finish_reason == "stop" and event.token_id in self._ends
        return [] if event.logprobs is None or ended else [AnswerToken(event.token_id, event.logprobs)]

    def _logprobs(self, drawn: list[AnswerToken]) -> dict[str, Any] | None:
        if self._request.logprobs is None:
            return None
        if self._chat:
            return chat_logprobs(drawn, self._model.spelling)
        found = completion_logprobs(drawn, self._model.spelling, self._offset)
        self._offset += sum(map(len, found["tokens"]))
        return found

    def _part(self, said: dict[str, Any] | str, logprobs: dict[str, Any] | None = None) -> Part:
        return {
            "index": self.index,
            "delta" if self._chat else "text": said,
            "logprobs": logprobs,
            "finish_reason": None,
        }

    def _end(self, output: Output) -> dict[str, Any]:
        called = self._reader.has_calls and REASONS[output.finish_reason] == "stop"
        return {"finish_reason": "tool_calls" if called else REASONS[output.finish_reason], "kvc": kept_by(output)}


def kept_by(output: Output) -> dict[str, Any]:
    """Return the numbers of tokens at an answer's end (read, and kept per cache), the bytes received, and the proof."""
    kept: dict[str, Any] = {
        "logical_tokens": output.logical_length,
        "kept_tokens_per_cache": round(mean(output.physical_lengths), 1),
    }
    if output.moved_bytes is not None:
        kept["moved_bytes"] = output.moved_bytes
    return kept if output.kv_proof is None else {**kept, "kv_proof": document_of(output.kv_proof)}

"""Responses and stream chunks in the form of OpenAI's API, made of choices."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from typing import Any

from kvc_trt.runtime.request import Output
from kvc_trt.serving.protocol.choices import Choice, Part
from kvc_trt.serving.protocol.fields import Endpoint
from kvc_trt.serving.protocol.model import ServedModel

_NAMES = {
    Endpoint.CHAT: ("chatcmpl", "chat.completion", "chat.completion.chunk"),
    Endpoint.COMPLETIONS: ("cmpl", "text_completion", "text_completion"),
}
"""The prefix of ids, the type of a response, and that of a chunk, by endpoint."""


class Documents:
    """Makes the JSON documents of one response, which share its id."""

    def __init__(self, endpoint: Endpoint, model: ServedModel) -> None:
        prefix, self._whole, self._chunk = _NAMES[endpoint]
        self._common = {
            "id": f"{prefix}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": model.name,
            "system_fingerprint": model.fingerprint,
        }

    def response(self, choices: Sequence[Choice]) -> dict[str, Any]:
        """Return the complete response; all answers must be over."""
        written = [choice.whole() for choice in choices]
        return {**self._common, "object": self._whole, "choices": written, "usage": usage(choices)}

    def chunk(self, parts: Sequence[Part], *, with_usage: bool) -> dict[str, Any]:
        """Return a chunk; `with_usage` adds a null `usage`, which a stream needs if its last chunk has the usage."""
        chunk = {**self._common, "object": self._chunk, "choices": list(parts)}
        return {**chunk, "usage": None} if with_usage else chunk

    def usage_chunk(self, choices: Sequence[Choice]) -> dict[str, Any]:
        """Return the last chunk of a stream, which has the usage and no choices."""
        return {**self._common, "object": self._chunk, "choices": [], "usage": usage(choices)}


def usage(choices: Sequence[Choice]) -> dict[str, Any]:
    """Return the numbers of prompt and answer tokens; a prompt counts once, however many answers it has."""
    outputs: list[Output] = [choice.output for choice in choices if choice.output is not None]
    by_prompt = {choice.prompt: choice.output for choice in choices if choice.output is not None}
    read = sum(len(output.prompt_token_ids) for output in by_prompt.values())
    drawn = sum(len(output.token_ids) for output in outputs)
    return {
        "prompt_tokens": read,
        "completion_tokens": drawn,
        "total_tokens": read + drawn,
        "prompt_tokens_details": {"cached_tokens": sum(output.reused_tokens for output in by_prompt.values())},
    }

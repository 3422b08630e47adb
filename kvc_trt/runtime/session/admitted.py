"""A request that a session has admitted, from its checks until its row is made."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from kvc_trt.errors import InputError, describe
from kvc_trt.proof import Recorder
from kvc_trt.runtime.answer_rules import RULES
from kvc_trt.runtime.context import Context
from kvc_trt.runtime.executor import Answer, Limits, Prefilled
from kvc_trt.runtime.kinds import listed
from kvc_trt.runtime.request import Request, check_token_ids
from kvc_trt.runtime.sampling.banned import TokenIds


@dataclass(eq=False)
class Admitted:
    """A checked request, the start of its row, and the model's output after its prompt once that has been read.

    A row starts from a prefill of its prompt, or from a stored `context`: the request's own, or a shared one whose text
    is the beginning of the prompt.
    """

    request: Request
    label: str
    """The beginning of each error about the request, such as "prompt 3"."""
    prompt: list[int]
    continuation: list[int]
    max_new_tokens: int
    ends: frozenset[int] = frozenset()
    """The tokens that end the answer: the request's own, and the model's unless they are ignored."""
    banned: Sequence[TokenIds] = ()
    recorder: Recorder | None = None
    """The recorder of the tokens that the row's caches keep and read, if its answer has a proof."""
    context: Context | None = None
    unread: list[int] = field(default_factory=list)
    """The tokens of the prompt that are not in the context."""
    reads_at_once: bool = False
    """True if the unread tokens are read as a turn; otherwise they are fed one decode step each."""
    answer: Answer | None = None
    """The model's output after the prompt; None until the prompt has been read."""
    cache_lengths: NDArray[np.int64] | None = None
    """[caches]: the number of tokens stored per cache; None until the prompt has been read."""

    @classmethod
    def of(cls, request: Request, limits: Limits, label: str) -> Admitted:
        """Admit a request within the engine's limits; InputError, beginning with `label`, for an invalid one."""
        if not isinstance(request, Request):
            raise InputError(f"{label} is {describe(request)}, expected a Request")
        prompt = _prompt(request, limits, label)
        max_new_tokens = limits.max_output_len if request.max_new_tokens is None else request.max_new_tokens
        RULES["max_new_tokens"].check(max_new_tokens, f"{label}: ")
        RULES["min_tokens"].check(request.min_tokens, f"{label}: ", at_most=max_new_tokens)
        RULES["logprobs"].check(request.logprobs, f"{label}: ")
        for token, bias in (request.logit_bias or {}).items():
            if token >= limits.vocab_size:
                raise InputError(
                    f"{label}: logit_bias has token {token}, expected ids from 0 to {limits.vocab_size - 1}"
                )
            RULES["logit_bias"].check(bias, f"{label}: ", name=f"logit_bias of token {token}")
        if not all(request.stop_strings):
            raise InputError(f"{label}: a stop string is empty")
        continuation = check_token_ids(request.continuation_token_ids, limits, f"{label}: continuation")
        return cls(request, label, prompt, continuation, max_new_tokens)

    def error(self, message: str, hint: str | None = None) -> InputError:
        """Return an InputError about this request, which begins with its label."""
        return InputError(f"{self.label}: {message}", hint=hint)

    def start_from(self, context: Context, unread: list[int], *, at_once: bool) -> None:
        """Let the row start from a stored context, and read the tokens `unread` after it."""
        self.context, self.unread, self.reads_at_once = context, unread, at_once
        self.answer = context.logits
        self.cache_lengths = np.array(context.cache_lengths, np.int64)

    def read(self, prefilled: Prefilled, source: int) -> None:
        """Take the model's output after the prompt from row `source` of a prefill."""
        self.answer = prefilled.logits[source]
        self.cache_lengths = prefilled.cache_lengths[:, source].copy()


def _prompt(request: Request, limits: Limits, label: str) -> list[int]:
    given = request.prompt_token_ids
    if request.context is not None:
        return check_token_ids(given, limits, label)
    count = listed(given)
    if count == 0:
        raise InputError(f"{label} is empty, expected 1 to {limits.max_input_len} tokens")
    if count is not None and count > limits.max_input_len:  # before all of them are checked one by one
        raise InputError(
            f"{label} has {count} tokens, expected at most {limits.max_input_len} (the engine's max_input_len)",
            hint=limits.way_out(count, "shorten it"),
        )
    return check_token_ids(given, limits, label)


def label_of(index: int, count: int) -> str:
    """Return the label of request `index` of `count` that are made together."""
    return f"prompt {index}" if count > 1 else "prompt"

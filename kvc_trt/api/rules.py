"""The rules of an answer, which every way of asking an engine takes by the same names."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, TypedDict

if TYPE_CHECKING:
    from kvc_trt.proof import ProofKind
    from kvc_trt.runtime import Context, Request, Sampling


class AnswerRules(TypedDict, total=False):
    """How each answer is drawn and where it ends; all may be left out."""

    max_new_tokens: int | None
    """None is the engine's max_output_len."""
    sampling: Sampling | None
    """None always takes the best token."""
    stop: Sequence[str] | str
    """Texts that end the answer; they are not part of it."""
    ignore_eos: bool
    """Go on past the model's own end tokens."""
    min_tokens: int
    """Let nothing end the answer before it has so many tokens."""
    bad_words: Sequence[str] | str
    """Texts that the answer may not contain, as the tokenizer writes them."""
    kv_proof: ProofKind | None
    """Give a proof of what the caches kept and read: "digest", or "lists" with the lists (docs/proof.md). The engine
    must have been opened with `proofs`."""
    logprobs: int | None
    """With each token, give its log-probability and so many of the most likely ones (0 to 20)."""


class PromptRules(AnswerRules, total=False):
    """The rules of an answer to a prompt."""

    context: Context | None
    """Every prompt continues this stored text as a turn (of an engine without turns: one decode step per token), and
    may be empty."""


def requests_of(prompts: Iterable[Sequence[int]], rules: PromptRules | AnswerRules) -> list[Request]:
    """Return one request for each prompt, all under the same rules; TypeError for a rule that there is not."""
    rule = _request(**rules)
    return [replace(rule, prompt_token_ids=ids) for ids in prompts]


def _request(
    *,
    max_new_tokens: int | None = None,
    sampling: Sampling | None = None,
    stop: Sequence[str] | str = (),
    ignore_eos: bool = False,
    min_tokens: int = 0,
    bad_words: Sequence[str] | str = (),
    kv_proof: ProofKind | None = None,
    logprobs: int | None = None,
    context: Context | None = None,
) -> Request:
    from kvc_trt.runtime import Request, Sampling

    return Request(
        (),
        max_new_tokens,
        context=context,
        sampling=sampling or Sampling(),
        stop_strings=_texts(stop),
        ignore_eos=ignore_eos,
        min_tokens=min_tokens,
        bad_words=_texts(bad_words),
        kv_proof=kv_proof,
        logprobs=logprobs,
    )


def _texts(given: Sequence[str] | str) -> tuple[str, ...]:
    return (given,) if isinstance(given, str) else tuple(given)

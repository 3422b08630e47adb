"""The rules of an answer, which every way of asking an engine takes by the same names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypedDict

from kvc_trt.errors import InputError, did_you_mean
from kvc_trt.runtime import Grammar
from kvc_trt.runtime.answer_rules import RULES, Client, rules_of
from kvc_trt.runtime.request import request_under

if TYPE_CHECKING:
    from kvc_trt.proof import ProofKind
    from kvc_trt.runtime import Context, Request, Sampling
    from kvc_trt.runtime.grammar.grammar import Schema


class AnswerRules(TypedDict, total=False):
    """How each answer is drawn and where it ends; all may be left out."""

    max_new_tokens: int | None
    """None is the engine's max_output_len."""
    temperature: float
    """0 always takes the most likely token."""
    top_k: int
    """Draw from the k best tokens; 0 from all."""
    top_p: float
    """Draw from the best tokens that reach this probability."""
    min_p: float
    """Draw from tokens with this share of the best probability."""
    seed: int | None
    """Equal seeds draw equal answers, alone and in a batch."""
    repetition_penalty: float
    """Above 1: fewer tokens that the prompt or the answer already has."""
    presence_penalty: float
    """Above 0: fewer tokens that the answer already has."""
    frequency_penalty: float
    """Above 0: fewer tokens that the answer has often, by their count."""
    sampling: Sampling | None
    """The eight before it as one object, in place of them."""
    stop: Sequence[str] | str
    """Texts that end the answer; they are not part of it."""
    bad_words: Sequence[str] | str
    """Texts that the answer may not contain, as the tokenizer writes them."""
    min_tokens: int
    """Do not end the answer before it has this many tokens."""
    ignore_eos: bool
    """Continue past the model's own end tokens."""
    schema: Grammar | Schema | None
    """Answer with JSON that this schema allows: a mapping, JSON text, or a class of pydantic's models; or with a text
    that a `kvc_trt.Grammar` allows (docs/grammars.md)."""
    logit_bias: Mapping[int, float] | None
    """Numbers from -100 to 100 by token id, added to the model's logits."""
    logprobs: int | None
    """With each token, give its log-probability and those of this many of the most likely ones (0 to 20)."""
    kv_proof: ProofKind | None
    """Give a proof of what the caches kept and read: "digest", or "lists" with the lists (docs/proof.md). The engine
    must have been opened with `proofs`."""


class PromptRules(AnswerRules, total=False):
    """The rules of an answer to a prompt."""

    context: Context | None
    """Every prompt continues this stored text as a turn (of an engine without turns: one decode step per token), and
    may be empty."""


def requests_of(prompts: Iterable[Sequence[int]], rules: PromptRules | AnswerRules) -> list[Request]:
    """Return one request for each prompt, all under the same rules.

    TypeError for a keyword that nobody knows, with the nearest; InputError for a value that cannot be right.
    """
    rule = _request(dict(rules))
    return [replace(rule, prompt_token_ids=ids) for ids in prompts]


def _request(given: dict[str, Any]) -> Request:
    known = rules_of(Client.PYTHON)
    sampling, context = given.pop("sampling", None), given.pop("context", None)
    for name in given:
        if name not in known:
            raise TypeError(f"unknown keyword {name!r}{_nearest(name, (*known, 'sampling', 'context'))}")
    drawn = [name for name in given if known[name].of_sampling]
    if drawn and sampling is not None:
        raise InputError(f"sampling and {drawn[0]} are both given; expected Sampling({drawn[0]}=...), or no sampling")
    if given.get("schema") is not None:
        given["schema"] = Grammar.of(given["schema"])
    request = request_under((), {known[name].name: value for name, value in given.items()})
    return replace(request, sampling=request.sampling if sampling is None else sampling, context=context)


def _nearest(name: str, known: Sequence[str]) -> str:
    """Say which keyword was meant: by another client's name of the rule, or by how it is spelled."""
    for rule in RULES.values():
        if name in (rule.name, *rule.names.values()) and (own := rule.named(Client.PYTHON)) is not None:
            return f"; did you mean '{own}'?"
    return did_you_mean(name, known) or f", expected one of {', '.join(known)}"

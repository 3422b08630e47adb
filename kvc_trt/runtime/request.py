"""The request that starts a row, the events it sends while it runs, and its output."""

from __future__ import annotations

import json
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from kvc_trt.errors import InputError, describe
from kvc_trt.proof import PromptRecord, Proof, ProofKind
from kvc_trt.runtime.answer_rules import RULES
from kvc_trt.runtime.context import Context
from kvc_trt.runtime.executor import Limits
from kvc_trt.runtime.grammar.grammar import Grammar
from kvc_trt.runtime.kinds import Kind, is_integer, listed, tokens_in
from kvc_trt.runtime.logprobs import TokenLogprobs

FinishReason = Literal["stop", "length", "capacity", "interrupted"]
"""stop: an end token or a stop string. length: `max_new_tokens`. capacity: no room in a cache. interrupted: the caller
wanted no more tokens."""


@dataclass(frozen=True)
class Sampling:
    """The rules for drawing the next token; temperature 0 is greedy (lowest id among equal logits)."""

    temperature: float = 0.0
    top_k: int = 0
    """The number of best tokens to draw from; 0 draws from all."""
    top_p: float = 1.0
    """Applied after top_k: keep the smallest set of best tokens whose probability reaches top_p."""
    seed: int | None = None
    """Equal seeds draw equal tokens, alone and in any batch. None seeds from the operating system."""
    repetition_penalty: float = 1.0
    """Positive logits of tokens that occur in prompt or answer are divided by it, negative ones multiplied."""
    presence_penalty: float = 0.0
    """Subtracted from the logits of tokens that occur in the answer."""
    frequency_penalty: float = 0.0
    """Subtracted from the logits of tokens that occur in the answer, once for each time."""
    min_p: float = 0.0
    """Applied after top_p: keep tokens whose probability is at least this share of the best one's."""

    def __post_init__(self) -> None:
        _make_plain(self, of_sampling=True)
        for rule in RULES.values():
            if rule.of_sampling:
                rule.check(getattr(self, rule.name))


@dataclass(frozen=True)
class Request:
    """One row: a prompt and the rules for its continuation."""

    prompt_token_ids: Sequence[int]
    max_new_tokens: int | None = None
    """None means the engine's max_output_len. A row whose cache fills up earlier ends with `capacity`."""
    context: Context | None = None
    """A stored context that the prompt continues. The prompt is then read as a turn, or fed through decode by an engine
    without turns, and may be empty."""
    context_token_ids: Sequence[int] = ()
    """The tokens of `context`, which itself holds only their digest. A repetition penalty and banned sequences look
    back at them, and are refused without."""
    keep_logits: bool = False
    """Bring the logits of every step to the host, so that `Session.take` can store the row at any time."""
    keep_context: bool = False
    """Store the caches after the prompt, before the first token of the answer, as the `context` of the `Ticket`."""
    continuation_token_ids: Sequence[int] = ()
    """Tokens fed through decode after compaction and before sampling: a question asked after eviction."""
    sampling: Sampling = field(default_factory=Sampling)
    stop_token_ids: Sequence[int] = ()
    """Tokens that end the row, in addition to the model's own end tokens."""
    stop_strings: Sequence[str] = ()
    min_tokens: int = 0
    """The number of tokens that the answer has before an end token, a stop token or a stop string may end it."""
    bad_words: Sequence[str] = ()
    """Texts that the answer must not complete: their last token is not drawn after the ones before it. Each text is
    banned in two spellings, its tokens without and with a space before it."""
    banned_token_ids: Sequence[Sequence[int]] = ()
    """Sequences of token ids that the answer must not complete: the last id is not drawn after the ones before it."""
    grammar: Grammar | None = None
    """The texts that the answer may be. The answer ends, with reason `stop`, as soon as nothing can follow, and end
    tokens and stop tokens are drawn only where the grammar may end. Each answer of the row begins the grammar anew."""
    logit_bias: Mapping[int, float] | None = None
    """Numbers from -100 to 100 by token id, added to the logits before anything else changes them."""
    logprobs: int | None = None
    """Return the log-probability of each token, and of this many of the most likely ones; None returns none."""
    ignore_eos: bool = False
    """Do not stop at the model's own end tokens."""
    kv_proof: ProofKind | None = None
    """Return a proof of the tokens that the caches kept and read for the answer, as digests or also as lists
    (docs/proof.md). The whole prompt is then read: no shared prefix is reused, and no drafts are checked."""
    kv_proof_prompt: PromptRecord | None = None
    """The record of the row that read the text of `context`. With it, and all of the text in `context_token_ids`, an
    answer from a context has a proof too."""
    stay: bool = False
    """After its answer, the row stays in the session and waits for `Session.turn` or `remove`."""

    def __post_init__(self) -> None:
        """Check the types of all fields, except for token ids, which the session checks against the engine."""
        _make_plain(self, of_sampling=False)
        for name in ("keep_logits", "keep_context", "stay"):
            object.__setattr__(self, name, Kind.SWITCH.plain(getattr(self, name), name))
        for name, kind in (("context", Context), ("kv_proof_prompt", PromptRecord)):
            if getattr(self, name) is not None:
                _check_type(self, name, kind)
        _check_type(self, "sampling", Sampling)
        for name in ("prompt_token_ids", "context_token_ids", "continuation_token_ids", "banned_token_ids"):
            if listed(getattr(self, name)) is None:
                raise InputError(f"{name} is {describe(getattr(self, name))}, expected a list of token ids")


def _make_plain(owner: Request | Sampling, *, of_sampling: bool) -> None:
    """Replace the values of the fields that hold rules by plain ones; InputError for a value of a wrong kind."""
    for rule in RULES.values():
        if rule.of_sampling is of_sampling:
            object.__setattr__(owner, rule.name, rule.plain(getattr(owner, rule.name)))


def _check_type(owner: Request, name: str, kind: type) -> None:
    value = getattr(owner, name)
    if not isinstance(value, kind):
        raise InputError(f"{name} is {describe(value)}, expected a {kind.__name__}")


def request_under(prompt_token_ids: Sequence[int], rules: Mapping[str, Any]) -> Request:
    """Return the request for a prompt with rules by their names in the table (`answer_rules.py`)."""
    sampling = {name: value for name, value in rules.items() if RULES[name].of_sampling}
    others = {name: value for name, value in rules.items() if name not in sampling}
    return Request(prompt_token_ids, sampling=Sampling(**sampling), **others)


@dataclass(frozen=True)
class Output:
    """The result of a finished row."""

    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    """All sampled tokens, including the stop token."""
    text: str | None
    """The decoded tokens without the stop token or stop string; None if the engine has no tokenizer."""
    finish_reason: FinishReason
    logical_length: int
    """The number of tokens that the model has seen. The last sampled token is not fed, so it does not count."""
    physical_lengths: tuple[int, ...]
    """The number of tokens stored in each cache."""
    reused_tokens: int = 0
    """The number of tokens in the stored context from which the row started; they were not computed again."""
    logprobs: tuple[TokenLogprobs, ...] | None = None
    """Log-probabilities for each of `token_ids`; None if the request does not ask for them."""
    kv_proof: Proof | None = None
    """The proof of the tokens that the caches kept and read; None if the request does not ask for it."""
    moved_bytes: int | None = None
    """The bytes of the prompt's caches sent by the process that read the prompt; None if this process read it."""

    def json(self) -> Any:
        """Return the answer's text parsed as JSON; InputError if it is not JSON, for example if it was cut short."""
        try:
            return json.loads(self.text or "")
        except (ValueError, RecursionError) as error:
            ended = f"ended after {len(self.token_ids)} tokens ({self.finish_reason})"
            raise InputError(
                f"the answer {ended} and is not JSON: {error}",
                hint=None if self.finish_reason == "stop" else "let it be longer: max_new_tokens",
            ) from error


@dataclass(frozen=True)
class Event:
    """One sampled token of one row."""

    row: int
    token_id: int
    text: str
    """New text that can no longer change or become part of a stop string; may be empty."""
    output: Output | None = None
    """The row's output in the last event of an answer; None in earlier ones. The row has then left the session, unless
    it stays for a turn."""
    logprobs: TokenLogprobs | None = None
    """The token's log-probabilities; None if the request does not ask for them."""


def check_token_ids(ids: object, limits: Limits, what: str) -> list[int]:
    """Return the ids as plain integers; InputError names the first that is not a token id of the model.

    A list with more tokens than the engine has positions is refused, and an iterator is read only that far.
    """
    checked: list[int] = []
    for position, value in enumerate(tokens_in(ids, limits.max_sequence_len, what)):
        if not is_integer(value):
            raise InputError(f"{what}: token {position} is {describe(value)}, expected an integer token id")
        token = operator.index(value)
        if not 0 <= token < limits.vocab_size:
            raise InputError(
                f"{what}: token {position} is {describe(token)}, expected an id from 0 to {limits.vocab_size - 1}"
            )
        checked.append(token)
    return checked

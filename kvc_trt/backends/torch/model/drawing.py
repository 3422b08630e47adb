"""Draw tokens from logits on the device, by the rules of their rows, in fixed memory that a CUDA graph can replay.

The operations are those of `Sampler`, in its order and with its random numbers: adjusted logits and the tokens that may
be drawn have equal bits, and probabilities and sums are float64 as on the host. A token can differ from the host's only
where a random number is within a rounding error of a sum; where the rows of a batch differ, no row's token depends on
the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from kvc_trt.runtime.executor import NO_DRAW, NONE_ALLOWED, NOT_FINITE, Drawn
from kvc_trt.runtime.logprobs import LEAST, MOST, TokenLogprobs
from kvc_trt.runtime.sampling.token_bits import WORD_BITS, words_of

if TYPE_CHECKING:
    from kvc_trt.backends.torch.model.capturer import Body, Capturer
    from kvc_trt.runtime.sampling.draw_rules import DrawRules

CHANGES = 1024
"""The most tokens that biases and the penalties of an answer change; rows with more are drawn on the host."""
NUMBERS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "uniform")


@dataclass(frozen=True)
class DrawVariant:
    """The parts of a draw that a batch needs; leaving out the others saves time and draws the same tokens."""

    changes_logits: bool
    filters: bool
    """True if some row has top-k or top-p, which need sorted logits."""
    logprobs: bool


class DeviceDrawRules:
    """The rules of n draws over `vocab` tokens in the memory of one device."""

    def __init__(self, draws: int, vocab: int, device: torch.device, *, pinned: bool = False) -> None:
        def zeros(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(*shape, dtype=dtype, device=device, pin_memory=pinned)

        self.numbers = zeros(draws, len(NUMBERS), dtype=torch.float64)
        self.words = zeros(2, draws, words_of(vocab), dtype=torch.int32)
        """The sets of tokens that were read, and of those that are allowed."""
        self.changed = zeros(draws, CHANGES, dtype=torch.int64)
        self.amounts = zeros(2, draws, CHANGES, dtype=torch.float32)
        """The amounts to add to the logits before the repetition penalty, and after it."""

    def fill(self, rules: Sequence[DrawRules | None]) -> None:
        """Write the rules of all draws on the host; a draw with None takes the best token."""
        numbers, words, changed, amounts = (
            part.numpy() for part in (self.numbers, self.words, self.changed, self.amounts)
        )
        for place, rule in enumerate(rules):
            if rule is None:
                numbers[place] = 0.0
                continue
            count = len(rule.changed)
            numbers[place] = [getattr(rule, name) for name in NUMBERS]
            words.view(np.uint32)[0, place] = 0 if rule.read is None else rule.read
            words.view(np.uint32)[1, place] = 0xFFFFFFFF if rule.allowed is None else rule.allowed
            changed[place], amounts[:, place] = 0, 0.0
            changed[place, :count] = rule.changed
            amounts[0, place, :count] = rule.added
            np.negative(rule.subtracted, out=amounts[1, place, :count])

    def copy_(self, other: DeviceDrawRules, *, changes_logits: bool) -> None:
        """Queue a copy of `other` into these rules; without `changes_logits`, only the numbers are copied."""
        self.numbers.copy_(other.numbers, non_blocking=True)
        if changes_logits:
            self.words.copy_(other.words, non_blocking=True)
            self.changed.copy_(other.changed, non_blocking=True)
            self.amounts.copy_(other.amounts, non_blocking=True)

    def number(self, name: str) -> Tensor:
        """Return one of the numbers of every draw, float64 [n,1]."""
        place = NUMBERS.index(name)
        return self.numbers[:, place : place + 1]


class DrawResults:
    """The tokens of n draws, and their log-probabilities if requested, in the memory of one device."""

    def __init__(self, draws: int, vocab: int, device: torch.device, *, pinned: bool = False) -> None:
        shown = min(MOST, vocab)
        options: dict[str, Any] = {"device": device, "pin_memory": pinned}
        self.tokens = torch.zeros(1 + shown, draws, dtype=torch.int64, **options)
        """The drawn token of each draw, then the most likely ones."""
        self.logprobs = torch.zeros(1 + shown, draws, dtype=torch.float64, **options)

    def drawn(self, rules: Sequence[DrawRules | None]) -> list[Drawn]:
        """Return the draws; NO_DRAW for those without a rule."""
        found, tokens = [], self.tokens.numpy()
        for place, rule in enumerate(rules):
            if rule is None:
                found.append(NO_DRAW)
                continue
            token, logprobs = int(tokens[0, place]), None
            if rule.logprobs is not None and token >= 0:
                own, ids = self.logprobs[:, place].tolist(), tokens[1 : 1 + rule.logprobs, place].tolist()
                top = tuple((one, value) for one, value in zip(ids, own[1:], strict=False) if np.isfinite(value))
                logprobs = TokenLogprobs(max(own[0], LEAST), top)
            found.append(Drawn(token, logprobs))
        return found


class StaticDrawing:
    """Draws from `logits` [n,vocab], which a step writes, with graphs that are captured on their first use."""

    def __init__(self, logits: Tensor, capturer: Capturer) -> None:
        (draws, vocab), device = logits.shape, logits.device
        on_gpu, cpu = device.type == "cuda", torch.device("cpu")
        self._logits, self._capturer, self._device = logits, capturer, device
        self._rules = DeviceDrawRules(draws, vocab, device)
        self._results = DrawResults(draws, vocab, device)
        self._staging = DeviceDrawRules(draws, vocab, cpu, pinned=True) if on_gpu else self._rules
        self._host_results = DrawResults(draws, vocab, cpu, pinned=True) if on_gpu else self._results
        self._replays: dict[DrawVariant, Body] = {}

    def run(self, rules: Sequence[DrawRules | None]) -> list[Drawn]:
        """Wait for the step, draw, and return the first len(rules) draws; NO_DRAW for those without a rule."""
        given = [rule for rule in rules if rule is not None]
        variant = DrawVariant(
            any(rule.changes_logits for rule in given),
            any(rule.filters for rule in given),
            any(rule.logprobs is not None for rule in given),
        )
        self._staging.fill(rules)
        if self._staging is not self._rules:
            self._rules.copy_(self._staging, changes_logits=variant.changes_logits)
        self.prepare(variant)
        self._replays[variant]()
        if self._host_results is not self._results:
            self._host_results.tokens.copy_(self._results.tokens, non_blocking=True)
            if variant.logprobs:
                self._host_results.logprobs.copy_(self._results.logprobs, non_blocking=True)
            torch.cuda.current_stream(self._device).synchronize()
        return self._host_results.drawn(rules)

    def prepare(self, variant: DrawVariant) -> None:
        """Capture a variant now, so that the first draw does not wait for it."""
        if variant not in self._replays:
            self._replays[variant] = self._capturer.capture(lambda: self._body(variant))

    def _body(self, variant: DrawVariant) -> None:
        with torch.inference_mode():
            tokens = drawn_tokens(self._logits, self._rules, variant)
            self._results.tokens[0].copy_(tokens)
            if variant.logprobs:
                values, ids = most_likely(self._logits, tokens)
                self._results.logprobs.copy_(values)
                self._results.tokens[1:].copy_(ids)


def drawn_tokens(logits: Tensor, rules: DeviceDrawRules, variant: DrawVariant) -> Tensor:
    """Return a token for each row of logits float32 [n,vocab], or NOT_FINITE or NONE_ALLOWED: int64 [n]."""
    vocab = logits.shape[1]
    scores = logits
    nothing: Tensor | None = None
    if variant.changes_logits:
        read, allowed = (unpacked(words, vocab) for words in rules.words)
        scores, nothing = adjusted(logits, rules, read, allowed), ~allowed.any(dim=1)
    best = scores.max(dim=1)
    temperature = rules.number("temperature")
    weights = weights_of(scores, best.values, temperature)
    # As on the host, the draw goes through the tokens in the order of their ids, or under top-p best first.
    order: Tensor | None = None
    if variant.filters:
        weights, order = filtered(scores, best.values, weights, rules)
    weights = torch.where(weights >= rules.number("min_p"), weights, 0.0)  # the best one's weight is 1
    sums = weights.cumsum(dim=1)
    place = (sums <= rules.number("uniform") * sums[:, -1:]).sum(dim=1, keepdim=True)
    # A product that was rounded up to the sum is past the last token that has a probability.
    last = (torch.arange(vocab, device=logits.device) * (weights > 0)).amax(dim=1, keepdim=True)
    token = torch.minimum(place, last)
    if order is not None:
        token = torch.where(rules.number("top_p") < 1.0, order.gather(1, token), token)
    tokens = torch.where(temperature[:, 0] > 0.0, token[:, 0], best.indices)
    if nothing is not None:
        tokens = torch.where(nothing, NONE_ALLOWED, tokens)
    return torch.where(logits.amax(dim=1).isfinite(), tokens, NOT_FINITE)


def unpacked(words: Tensor, vocab: int) -> Tensor:
    """Return bool [n,vocab] of packed bits int32 [n,words]."""
    bits = words[:, :, None] >> torch.arange(WORD_BITS, device=words.device, dtype=torch.int32)
    return (bits & 1).flatten(1)[:, :vocab].bool()


def adjusted(logits: Tensor, rules: DeviceDrawRules, read: Tensor, allowed: Tensor) -> Tensor:
    """Return the logits after biases, penalties and bans, given the masks of `read` and `allowed` tokens [n,vocab]."""
    scores = logits.scatter_add(1, rules.changed, rules.amounts[0])
    penalty = rules.number("repetition_penalty").float()
    scores = torch.where(read, torch.where(scores < 0, scores * penalty, scores / penalty), scores)
    scores = scores.scatter_add(1, rules.changed, rules.amounts[1])
    scores = torch.where(allowed, scores, -torch.inf)
    # The model excludes all others, and a ban still holds, so all these are equal.
    excluded = scores.amax(dim=1, keepdim=True) == -torch.inf
    return torch.where(excluded & allowed, 0.0, scores)


def weights_of(scores: Tensor, highest: Tensor, temperature: Tensor) -> Tensor:
    """Return probabilities divided by the best one's, float64; temperature 0, with which none is drawn, counts as 1."""
    divisor = torch.where(temperature > 0.0, temperature, 1.0)
    return ((scores.double() - highest[:, None].double()) / divisor).exp()


def filtered(scores: Tensor, highest: Tensor, weights: Tensor, rules: DeviceDrawRules) -> tuple[Tensor, Tensor]:
    """Return the weights that top-k and top-p leave, and the tokens best first, both [n,vocab].

    A row's weights are in the order of the ids, or best first if it has top-p.
    """
    ranked, order = scores.sort(dim=1, descending=True, stable=True)
    top_k, top_p = rules.number("top_k"), rules.number("top_p")
    sorted_weights = weights_of(ranked, highest, rules.number("temperature"))
    among = (top_k == 0.0) | (torch.arange(scores.shape[1], device=scores.device) < top_k)
    sorted_weights = torch.where(among, sorted_weights, 0.0)
    shares = sorted_weights / sorted_weights.sum(dim=1, keepdim=True)
    before = functional.pad(shares.cumsum(dim=1), (1, -1))
    nucleus = torch.where(before < top_p, sorted_weights, 0.0)
    by_id = torch.zeros_like(weights).scatter(1, order, sorted_weights)
    return torch.where(top_p < 1.0, nucleus, by_id), order


def most_likely(logits: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Return log-probabilities [1+m,n] of each row's token and of its m likeliest tokens, and their ids [m,n]."""
    ranked, order = logits.sort(dim=1, descending=True, stable=True)
    total = logits.double().logsumexp(dim=1)
    shown = min(MOST, logits.shape[1])
    values = torch.cat([logits.gather(1, tokens.clamp(min=0)[:, None]), ranked[:, :shown]], dim=1)
    return (values.double() - total[:, None]).T, order[:, :shown].T

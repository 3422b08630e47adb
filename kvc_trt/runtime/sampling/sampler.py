"""Choose the next token of one row from its logits.

In this order: biases and penalties change the logits; tokens that a grammar or a ban forbids are removed; temperature,
top-k, top-p and min-p turn the remaining logits into the probabilities to draw from.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from copy import copy

import numpy as np
from numpy.typing import NDArray

from kvc_trt.errors import InputError
from kvc_trt.runtime.executor import NONE_ALLOWED
from kvc_trt.runtime.grammar.matcher import Matcher
from kvc_trt.runtime.logprobs import best_ids
from kvc_trt.runtime.request import Sampling
from kvc_trt.runtime.sampling.banned import Banned
from kvc_trt.runtime.sampling.draw_rules import DrawRules
from kvc_trt.runtime.sampling.penalties import Penalties
from kvc_trt.runtime.sampling.token_bits import packed, words_of


class Uniforms:
    """The random numbers of one row, one for each token that is drawn; `look` returns later ones without using them."""

    def __init__(self, seed: int | None) -> None:
        self._random = np.random.default_rng(seed)
        self._known: deque[float] = deque()

    def look(self, ahead: int = 0) -> float:
        """Return the number of the draw that is `ahead` draws after the next, and use up none."""
        while len(self._known) <= ahead:
            self._known.append(self._random.random())
        return self._known[ahead]

    def take(self) -> float:
        """Return the number of the next draw and use it up."""
        found = self.look()
        self._known.popleft()
        return found


class Sampler:
    """Draws the tokens of one row from its own random numbers and its own text, so other rows do not change the result.

    The row reports its text: `read` for each token that was fed, `begin_answer` where another answer begins. `choose`
    draws from logits on the host. An executor may draw by `rules` instead, with the same random number, and the row
    then reports the result (`take`): both give the same token but for the rounding of sums.
    """

    def __init__(
        self,
        sampling: Sampling,
        banned: Banned | None = None,
        biases: Mapping[int, float] | None = None,
        *,
        label: str = "row",
    ) -> None:
        self._sampling = sampling
        self._uniforms = Uniforms(sampling.seed)
        self._ahead: int | None = None
        """The number of draws that are only assumed, in a copy made by `ahead`; None in the row's own sampler."""
        self._owns_matcher = True
        self._banned = banned or Banned()
        biases = biases or {}
        self._biased = np.fromiter(biases.keys(), np.int64, len(biases))
        self._biases = np.fromiter(biases.values(), np.float32, len(biases))
        self._penalties = Penalties(sampling)
        self._matcher: Matcher | None = None
        self._label = label

    @property
    def is_greedy(self) -> bool:
        """True if each token is the one with the largest of the model's logits, which nothing changes."""
        return self._sampling.temperature == 0.0 and not self._changes_logits

    @property
    def is_complete(self) -> bool:
        """True if the answer has a grammar, and it allows no further token."""
        return self._matcher is not None and self._matcher.is_complete

    def constrain(self, matcher: Matcher | None) -> None:
        """Constrain the next answer by the grammar of `matcher`; None lifts the constraint."""
        self._matcher = matcher

    def read(self, token_ids: Sequence[int]) -> None:
        """Record tokens that were added to the text."""
        self._banned.read(token_ids)
        self._penalties.read(token_ids)

    def begin_answer(self) -> None:
        """Begin another answer in the same text: counts, penalties and grammar of the answer start anew."""
        self._banned.begin_answer()
        self._penalties.begin_answer()
        if self._matcher is not None:
            self._matcher.begin_answer()

    def prepare(self) -> None:
        """Start computing the grammar's next mask on another thread."""
        if self._matcher is not None:
            self._matcher.prepare()

    def forced(self) -> list[int]:
        """Return the tokens that the grammar forces next, whatever the logits; none where it leaves a choice."""
        return [] if self._matcher is None else self._matcher.forced()

    def possible(self, tokens: list[int], *, after: list[int]) -> list[int]:
        """Return the longest prefix of `tokens` that the grammar allows after `after`."""
        if self._matcher is None:
            return tokens
        return tokens[: max(0, self._matcher.prefix([*after, *tokens]) - len(after))]

    def choose(self, logits: NDArray[np.float32]) -> int:
        """Draw and record the next token, and return its id; `logits` [vocab], finite or -inf, are not changed."""
        token = self._draw(self._adjusted(logits) if self._changes_logits else logits)
        self.take(token)
        return token

    def take(self, token: int) -> None:
        """Record the token that was drawn; InputError for NONE_ALLOWED, which stands for no token."""
        if token == NONE_ALLOWED:
            raise self._nothing_allowed()
        if self._sampling.temperature > 0.0:
            if self._ahead is None:
                self._uniforms.take()
            else:
                self._ahead += 1
        self._banned.answered()
        self._penalties.answered(token)
        if self._matcher is not None:
            if self._ahead is not None and not self._owns_matcher:
                self._matcher, self._owns_matcher = self._matcher.copy(), True
            self._matcher.advance(token)

    def ahead(self) -> Sampler:
        """Return a copy for tokens that are only assumed to follow; this sampler and its random numbers stay as is."""
        other = copy(self)
        other._ahead = self._ahead or 0
        other._banned, other._penalties = self._banned.copy(), self._penalties.copy()
        other._owns_matcher = False  # most copies only draw the next token, and need no matcher of their own
        return other

    def rules(self, vocab_size: int, logprobs: int | None = None) -> DrawRules:
        """Return the rules of the next draw, for an executor that draws itself; the same InputErrors as `choose`."""
        ids, subtracted = self._penalties.subtracted()
        biased, zeros = self._biased, np.zeros
        allowed = self._allowed(vocab_size)
        sampling = self._sampling
        return DrawRules(
            sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p, sampling.repetition_penalty,
            self._uniforms.look(self._ahead or 0) if sampling.temperature > 0.0 else 0.0,
            changed=np.concatenate([biased, ids]),
            added=np.concatenate([self._biases, zeros(len(ids), np.float32)]),
            subtracted=np.concatenate([zeros(len(biased), np.float32), subtracted]),
            read=self._penalties.read_words(words_of(vocab_size)),
            allowed=None if allowed is None else packed(allowed),
            logprobs=logprobs,
        )  # fmt: skip

    @property
    def _changes_logits(self) -> bool:
        return bool(len(self._biased) or self._matcher or self._banned.is_active or self._penalties.is_active)

    def _adjusted(self, logits: NDArray[np.float32]) -> NDArray[np.float32]:
        adjusted: NDArray[np.float32] = logits.copy()
        adjusted[self._biased] += self._biases
        self._penalties.apply(adjusted)
        allowed = self._allowed(len(logits))
        if allowed is None:
            allowed = np.ones(len(logits), np.bool_)
        adjusted[~allowed] = -np.inf
        if np.isneginf(adjusted.max()):  # the model gives every allowed token -inf: treat them as equal
            adjusted[allowed] = 0.0
            if not allowed.any():
                raise self._nothing_allowed()
        return adjusted

    def _allowed(self, vocab_size: int) -> NDArray[np.bool_] | None:
        """Return a mask [vocab], True for each token that may be drawn next; None if all may."""
        banned = self._banned.token_ids()
        if self._matcher is None and not banned:
            return None
        allowed = np.ones(vocab_size, np.bool_) if self._matcher is None else self._matcher.allowed()
        allowed[banned] = False
        return allowed

    def _nothing_allowed(self) -> InputError:
        return InputError(f"{self._label}: bans leave no token that the grammar allows")

    def _draw(self, logits: NDArray[np.float32]) -> int:
        if self._sampling.temperature == 0.0:
            return int(np.argmax(logits))
        ids, probabilities = candidates(logits, self._sampling)
        cumulative = np.cumsum(probabilities)
        drawn = int(np.searchsorted(cumulative, self._uniforms.look() * cumulative[-1], side="right"))
        # Rounding can make the product equal to the sum: then take the last token whose probability is not zero.
        return int(ids[drawn if drawn < len(ids) else np.flatnonzero(probabilities)[-1]])


def candidates(logits: NDArray[np.float32], sampling: Sampling) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Return the token ids that may be drawn and their probabilities (float64, not renormalised after top-p).

    Top-k comes first, then top-p over the renormalised rest, then min-p. Among equal logits the lowest id is kept.
    """
    ids = np.arange(len(logits), dtype=np.int64)
    if 0 < sampling.top_k < len(ids):
        ids = best_ids(logits, sampling.top_k)
    scores = logits[ids].astype(np.float64)
    # The maximum is subtracted before the division: a tiny temperature then gives -inf, never inf - inf.
    with np.errstate(over="ignore"):
        probabilities = np.exp((scores - scores.max()) / sampling.temperature)
    probabilities /= probabilities.sum()
    if sampling.top_p < 1.0:
        chosen = _nucleus(probabilities, sampling.top_p)
        ids, probabilities = ids[chosen], probabilities[chosen]
    if sampling.min_p > 0.0:
        likely = probabilities >= sampling.min_p * probabilities.max()
        ids, probabilities = ids[likely], probabilities[likely]
    return ids, probabilities


def _nucleus(probabilities: NDArray[np.float64], top_p: float) -> NDArray[np.int64]:
    """Return the positions of the smallest set of best probabilities that reaches `top_p`, best first."""
    # All values below (1 - top_p) / n together sum to less than 1 - top_p: the set never needs them, so skip the sort.
    worth_sorting = np.flatnonzero(probabilities >= (1.0 - top_p) / len(probabilities))
    order = worth_sorting[np.argsort(-probabilities[worth_sorting], kind="stable")]
    reached = int(np.searchsorted(np.cumsum(probabilities[order]), top_p, side="left"))
    return order[: reached + 1]

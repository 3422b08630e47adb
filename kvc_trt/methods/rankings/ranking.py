"""The ranking of a kind: the order of the entries it chooses from, and proofs that rounding may have changed a choice.

A kind of prompt eviction or of decode selection brings its own ranking, in its own file. Verification compares lists
and counts; where a list differs from the reference's, it asks the ranking to explain the difference in float64.
`rounding.py` has the bounds that all rankings use.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from kvc_trt.methods.rankings.rounding import Float64, Int64
from kvc_trt.reference.softmax import PLAIN, Observed, Softmax

if TYPE_CHECKING:
    from torch import Tensor

Array = NDArray[Any]
Inputs = TypeVar("Inputs")


@dataclass(frozen=True)
class ChosenList:
    """One executor's list of chosen tokens, where it differs from the expected list."""

    row: int
    head: int
    """The number of the list within its row."""
    lists: int
    """The number of lists per row: one per KV head, or one per query head."""
    taken: Int64
    """All tokens of the list, ascending."""
    extra: Int64
    """Tokens of the list that are not expected."""
    missing: Int64
    """Expected tokens that are not in the list, as many as `extra`."""

    def instead(self, did: str, problem: str | None) -> str | None:
        """Return a problem with the tokens it is about: "kept [5] instead of [3]: ..."; None if there is none."""
        if problem is None:
            return None
        return f"{did} {few(self.extra)} instead of {few(self.missing)}: {problem}"


def few(values: NDArray[np.integer]) -> str:
    """Return the first of some tokens, for a message."""
    shown = ", ".join(str(v) for v in values[:4])
    return f"[{shown}{', ...' if values.size > 4 else ''}]"


@dataclass(frozen=True)
class Prompts:
    """Everything that prompt eviction ranks by, for a batch of prompts."""

    observed: tuple[Array, ...]
    """The tensors that the kind's `observe` returns, [B,H,...]; usually one, the last queries [B,H,W,D]."""
    keys: Array
    """[B,G,S,D]"""
    values: Array
    """[B,G,S,D]"""
    lengths: Array
    """[B]"""
    texts: Array | None = None
    """[B]: tokens of the conversation, where not all are stored; None: `lengths`."""
    softmax: Softmax = PLAIN
    """The softmax that the layer's attention applies to its logits."""

    @classmethod
    def of_tensors(
        cls, observed: Any, keys: Tensor, values: Tensor, lengths: Tensor, texts: Tensor | None = None
    ) -> Prompts:
        """Take the arguments of `PromptEviction.compact`, and the lengths of the texts of a turn."""
        softmax = PLAIN
        if isinstance(observed, Observed):
            observed, softmax = observed
        parts = observed if isinstance(observed, tuple) else (observed,)
        keys_of, values_of, stored = (table.numpy() for table in (keys, values, lengths))
        own = None if texts is None else texts.numpy()
        return cls(tuple(part.numpy() for part in parts), keys_of, values_of, stored, own, softmax)

    def softmax_of(self, chosen: ChosenList) -> Softmax:
        """Return the softmax of the query heads that chose the list."""
        return softmax_of_list(self.softmax, chosen)

    def tokens_of(self, chosen: ChosenList) -> int:
        """Return the number of tokens of the list's text."""
        return int((self.lengths if self.texts is None else self.texts)[chosen.row])

    def observed_by(self, chosen: ChosenList) -> tuple[Float64, ...]:
        """Return the part [g,...] of each observed tensor that belongs to the list's head."""
        return tuple(part_of_head(table[chosen.row], chosen.head, chosen.lists) for table in self.observed)

    def keys_of(self, chosen: ChosenList) -> Float64:
        """Return the keys [n,D] that the list's tokens were chosen from."""
        return self.keys[chosen.row, chosen.head, : self.lengths[chosen.row]].astype(np.float64)

    def values_of(self, chosen: ChosenList) -> Float64:
        """Return the values [n,D] that the list's tokens were chosen from."""
        return self.values[chosen.row, chosen.head, : self.lengths[chosen.row]].astype(np.float64)


@dataclass(frozen=True)
class Step:
    """Everything that decode selection ranks by, for one step of a batch."""

    query: Array
    """[B,H,D]"""
    keys: Array
    """[B,G,C,D], with the current token stored."""
    lengths: Array
    """[B], with the current token counted."""
    softmax: Softmax = PLAIN
    """The softmax that the layer's attention applies to its logits."""

    @classmethod
    def of_tensors(cls, query: Tensor, keys: Tensor, lengths: Tensor, softmax: Softmax = PLAIN) -> Step:
        """Take tensors of these shapes."""
        return cls(query.numpy(), keys.numpy(), lengths.numpy(), softmax)

    def softmax_of(self, chosen: ChosenList) -> Softmax:
        """Return the softmax of the query heads that chose the list."""
        return softmax_of_list(self.softmax, chosen)

    def stored(self, chosen: ChosenList) -> int:
        """Return the number of tokens in the list's row."""
        return int(self.lengths[chosen.row])

    def queries_of(self, chosen: ChosenList) -> Float64:
        """Return the queries [g,D] that chose the list."""
        return part_of_head(self.query[chosen.row], chosen.head, chosen.lists)

    def keys_of(self, chosen: ChosenList) -> Float64:
        """Return the stored keys [m,D] that the list's tokens were chosen from."""
        kv_head = chosen.head * self.keys.shape[1] // chosen.lists
        return self.keys[chosen.row, kv_head, : self.stored(chosen)].astype(np.float64)


def softmax_of_list(softmax: Softmax, chosen: ChosenList) -> Softmax:
    """Return the softmax of the query heads [g] that chose a list."""
    if softmax.sinks is None:
        return softmax
    share = len(softmax.sinks) // chosen.lists
    return softmax.of_heads(range(chosen.head * share, (chosen.head + 1) * share))


def part_of_head(table: Array, head: int, heads: int) -> Float64:
    """Return the part [g,...] of `table` [H,...] that belongs to one of `heads` heads, in float64."""
    part: Float64 = table.reshape(heads, -1, *table.shape[1:])[head].astype(np.float64)
    return part


class Ranking(ABC, Generic[Inputs]):
    """The order in which a kind chooses among entries, and the judge of other executors' choices."""

    proves_equal_inputs = False
    """True if `explain_on_equal_inputs` judges lists that were chosen from the reference's own inputs.

    Otherwise such lists must equal those of the reference in float32 or in float64."""

    @abstractmethod
    def explain(self, inputs: Inputs, chosen: ChosenList, slack: float) -> str | None:
        """Return why no rounding explains a list; None if rounding does.

        `inputs` are the reference's. The executor's own differ from them by rounding in earlier layers, which `slack`
        measures, in multiples of the tolerance of a near-tie. Copies of one score need not tie there.
        """

    def explain_on_equal_inputs(self, inputs: Inputs, chosen: ChosenList, *, truncates: bool) -> str | None:
        """Return why no rounding explains a list that was chosen from exactly these inputs; None if rounding does.

        Copies of one score tie there, and the lower index wins. `truncates`: tensor cores have summed the products,
        which cut off more than float32 does (`rounding.truncated_share`).
        """
        raise NotImplementedError(f"{type(self).__name__} does not judge lists on equal inputs")


class PromptRanking(Ranking[Prompts]):
    """The order in which prompt eviction chooses among the tokens of a prompt."""

    ranks_turns_alike = False
    """True if a turn's last queries rank stored and new tokens as a prompt's last queries rank the prompt.

    Otherwise the lists that are kept after a turn are counted, and not judged."""


class StepRanking(Ranking[Step]):
    """The order in which decode selection chooses among the tokens of a cache."""

    def scored_by(self, step: Step, explained: Sequence[ChosenList], slack: float) -> Any:
        """Return the facts about a choice that `DecodeSelection.output_of` needs beyond its lists; usually none.

        `explained` are the lists that differ from the reference's and that `explain` has explained.
        """
        return None

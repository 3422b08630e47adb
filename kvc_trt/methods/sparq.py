"""SparQ attention: score every token by the query's largest channels, read the best (arXiv 2312.04985).

Nothing is evicted. Each step scores every cached token on the `top_r` channels where the group's summed |q| is largest,
attends exactly to the current token and the `top_k` best others, and gives the mean value of the cache the remaining
share of attention. Keys are stored a second time, channel by channel, so that only r channels are read. A turn of a
conversation attends exactly to everything and is appended.

Shapes: query [B,H,D], keys and values [B,G,C,D]; `selected` is [B,G,k+1].

Deviations: the original has no grouped queries; heads of a group share channels and tokens, chosen by the sums over the
group of |q| and of the tempered scores. Budget as in RocketKV, appendix A.3: r D-th parts of m keys are t/2 pairs and
k = floor(t/2); where S > D t even r = 1 exceeds that. Dense when it fits; scores are float32.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from typing_extensions import override

from kvc_trt import reference
from kvc_trt.methods.base.constants import Constants
from kvc_trt.methods.base.decode_selection import DecodeSelection, Rebuild
from kvc_trt.methods.base.graph_context import PromptLayer
from kvc_trt.methods.base.inputs import EVERY_POLICY, PolicyInputs, constants
from kvc_trt.methods.base.isolated_runs import Array
from kvc_trt.methods.base.parameters import PolicyParameters
from kvc_trt.methods.base.policy import Formula, Policy
from kvc_trt.methods.full import NOTHING
from kvc_trt.methods.rankings.channels import OnChannels, possible_channels
from kvc_trt.methods.rankings.ranking import ChosenList, Step, StepRanking
from kvc_trt.methods.rankings.rounding import BoundedScores, Float64, Int64, off_by
from kvc_trt.operators.attention.sparq_attention import SPARQ_ATTENTION
from kvc_trt.operators.cached_vectors import cached_vectors
from kvc_trt.operators.schema import part_names
from kvc_trt.operators.tensors import K_CACHE, V_CACHE
from kvc_trt.operators.turns.append_block import APPEND_CHANNELS
from kvc_trt.operators.vectors import Vectors

if TYPE_CHECKING:
    from torch import Tensor

    from kvc_trt.methods.base.graph_context import TurnLayer
    from kvc_trt.reference import LayerCache, Selection


@dataclass(frozen=True)
class ByChannels(StepRanking):
    """Cached tokens ranked by their keys on the query's largest channels; the current one is always read."""

    top_r: int

    @override
    def explain(self, inputs: Step, chosen: ChosenList, slack: float) -> str | None:
        """Judge the list by every set of channels that rounding may have chosen."""
        newest = inputs.stored(chosen) - 1
        if chosen.taken[-1] != newest:
            return f"the current token, {newest}, must be read"
        _, problem = self._explained(inputs, chosen, slack)
        return chosen.instead("read", problem)

    @override
    def scored_by(self, step: Step, explained: Sequence[ChosenList], slack: float) -> Tensor:
        """Return the channels [B,G,r] that score the tokens: the reference's, or others where they explain a list."""
        import torch

        from kvc_trt.reference.methods.sparq import channels_of

        used = channels_of(torch.from_numpy(step.query), step.keys.shape[1], self.top_r)
        for chosen in explained:
            channels, _ = self._explained(step, chosen, slack)
            if channels is not None:
                used[chosen.row, chosen.head] = torch.from_numpy(channels)
        return used

    def _explained(self, step: Step, chosen: ChosenList, slack: float) -> tuple[Int64 | None, str | None]:
        """Return the first channels that explain a list, or the problem under the exact ones."""
        query, keys = step.queries_of(chosen), step.keys_of(chosen)
        first_problem: str | None = None
        for channels in possible_channels(query, self.top_r, slack):
            scores = self.scores(query, keys, channels, slack)
            problem = scores.without_last().unexplained(chosen.taken[:-1])
            if problem is None:
                return channels, None
            first_problem = first_problem or problem
        return None, first_problem

    def scores(self, query: Float64, keys: Float64, channels: Int64, slack: float) -> BoundedScores:
        """Score the tokens of one KV head on some channels [r]: query [g, D], keys [m, D].

        A score is the sum over the heads of s = q.x / T. With e and f for how far q and x are off, it moves by the sum
        over the heads of e |slope of s in q|, and by f |sum over the heads of q / T on the channels|.
        """
        used, heads = keys[:, channels], [OnChannels(q, channels) for q in query]
        logits = [head.logits(used) for head in heads]
        moves = np.linalg.norm(sum(head.direction for head in heads)) * off_by(keys, slack)
        for head, s, e in zip(heads, logits, off_by(query, slack), strict=True):
            moves += e * head.slopes(used, s)
        return BoundedScores.within(np.sum(logits, axis=0), moves)


class LargestChannels(DecodeSelection):
    """Select the current token and the best others on the query's largest channels; the mean value is the rest."""

    name = "sparq"
    operators = (SPARQ_ATTENTION,)
    reads_a_part = True
    reads_beside = 1
    sums = ("value_sum",)

    @override
    def select(self, query: Tensor, cache: LayerCache, rule: Constants) -> Selection:
        read = reference.sparq_attention(
            query, cache.keys, cache.values, cache.lengths,
            top_r=rule.top_r, top_k=rule.top_k, token_budget=rule.token_budget,
            dense_until=rule.dense_until, reallocate=rule.reallocate,
        )  # fmt: skip
        return reference.Selection(*read)

    @override
    def complete(self, prompt: PromptLayer) -> None:
        """Write the keys a second time, channel by channel, and the sum of the values."""
        emit, form = prompt.emit, prompt.rule.cache_format
        channels, total = prompt.named(("channels", "value_sum"))
        keys, values = (
            Vectors(tuple(prompt.named(part_names(tensor, vector))), vector)
            for tensor, vector in ((K_CACHE, form.keys), (V_CACHE, form.values))
        )
        emit.Transpose(keys.codes(emit), perm=[0, 1, 3, 2], outputs=[channels])
        emit.ReduceSum(values.widened(emit), [2], keepdims=0, outputs=[total])

    @override
    def append_turn(self, turn: TurnLayer) -> None:
        """Write the new keys a second time, channel by channel, and add the new values to the sum."""
        inputs = {
            "k_new": turn.keys, "v_new": turn.values,
            "channels": turn.state("channels"), "value_sum": turn.state("value_sum"),
            "cache_lengths": turn.entries, "lengths": turn.batch.lengths,
        }  # fmt: skip
        names = {f"{tensor}_out": turn.updated(tensor) for tensor in ("channels", "value_sum")}
        turn.call(APPEND_CHANNELS, inputs, names)

    @override
    def take_back(
        self, state: Mapping[str, Array], saved: Mapping[str, Array], before: int, steps: range, rule: Constants
    ) -> None:
        """Add the values of the steps that stay to the sum once more, one by one as these steps did."""
        total = saved["value_sum"].copy()
        fed = cached_vectors(state, V_CACHE, rule.cache_format).map(lambda part: part[:, before : steps.start])
        for value in fed.values().swapaxes(0, 1):
            total += value.astype(np.float32)
        state["value_sum"][...] = total

    @override
    def pairs_to_choose(self, rule: Constants, entries: int, head_size: int) -> float:
        """Count `top_r` channels of every key, and the mean of all values."""
        return entries * rule.top_r / (2 * head_size) + 0.5

    @override
    def numbers_to_choose(self, rule: Constants, entries: int, head_size: int) -> int:
        """Count the scale, and the minimum, of each group that may hold one of the `top_r` channels of every key."""
        keys = rule.cache_format.keys
        return 0 if keys is None else entries * min(rule.top_r, keys.groups(head_size)) * keys.number_bytes

    @override
    def describe(self, rule: Constants) -> str:
        mean = ", the mean value in place of the others" if rule.reallocate else ""
        return f"and the current one, scored by {rule.top_r} of each key's channels{mean}"

    @override
    def ranking(self, rule: Constants) -> ByChannels:
        """Return the ranking by the keys' values on the query's largest channels."""
        return ByChannels(rule.top_r)

    @override
    def output_of(
        self, attended: Tensor, query: Tensor, cache: LayerCache, selected: Tensor, rule: Constants,
        scored_by: Tensor | None,
    ) -> Tensor:  # fmt: skip
        """Give the mean value the weight of unread tokens; `scored_by` are the channels, if others than usual."""
        from kvc_trt.reference.methods.sparq import channels_of, reallocated

        if not rule.reallocate:
            return attended
        channels = channels_of(query, cache.keys.shape[1], rule.top_r) if scored_by is None else scored_by
        return reallocated(
            attended, query, cache.keys, cache.values, cache.lengths, selected, channels,
            dense_limit=max(rule.top_k + self.reads_beside, rule.token_budget, rule.dense_until),
        )  # fmt: skip

    @property
    @override
    def rebuilt(self) -> Mapping[str, Rebuild]:
        """Return the channels; the sum of the values depends on the order of its terms."""
        return {"channels": lambda keys, *_: np.ascontiguousarray(keys.codes().swapaxes(2, 3))}

    @override
    def state_of(self, keys: Array, values: Array, lengths: Array, rule: Constants) -> dict[str, Array]:
        """Make channels and value sum, with zeros in unused slots."""
        total = values.sum(axis=2, dtype=np.float64).astype(np.float32)
        return {**super().state_of(keys, values, lengths, rule), "value_sum": total}


def resolve(inputs: PolicyInputs) -> PolicyParameters:
    """Derive r = D t/S, rounded to the nearest channel, at least one."""
    head_size, sequence = inputs.model.head_size, inputs.sequence
    nearest = (2 * head_size * inputs.budget + sequence) // (2 * sequence)
    return constants(
        inputs, NOTHING, LARGEST_CHANNELS,
        capacity=sequence,
        top_r=inputs.value("top_r", min(max(nearest, 1), head_size)),
        top_k=inputs.value("top_k", inputs.budget // 2),
        dense_until=inputs.value("dense_until", inputs.budget),
        reallocate=inputs.choice("reallocate", True),
    )  # fmt: skip


LARGEST_CHANNELS = LargestChannels()
SPARQ = Policy(
    name="sparq",
    summary="keep every token, score all of them by a few channels, read the best",
    source="SparQ, arXiv 2312.04985",
    eviction=NOTHING,
    selection=LARGEST_CHANNELS,
    resolve=resolve,
    overrides=("top_r", "top_k", "dense_until", "reallocate", *EVERY_POLICY),
    published=Formula(lambda c: 2.0, lambda c: 1 / c),
)

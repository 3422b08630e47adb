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

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
from typing_extensions import override

from kvc_trt.methods.base.constants import Constants
from kvc_trt.methods.base.decode_selection import DecodeSelection, Rebuild
from kvc_trt.methods.base.graph_context import PromptLayer
from kvc_trt.methods.base.inputs import EVERY_POLICY, PolicyInputs, constants
from kvc_trt.methods.base.isolated_runs import Array, ByChannels
from kvc_trt.methods.base.parameters import PolicyParameters
from kvc_trt.methods.base.policy import Formula, Policy
from kvc_trt.methods.full import NOTHING
from kvc_trt.operators.attention.sparq_attention import SPARQ_ATTENTION
from kvc_trt.operators.shapes import float32
from kvc_trt.operators.turns.append_block import APPEND_CHANNELS

if TYPE_CHECKING:
    from torch import Tensor

    from kvc_trt.methods.base.turn_context import TurnLayer
    from kvc_trt.reference import LayerCache, Selection


class LargestChannels(DecodeSelection):
    """Select the current token and the best others on the query's largest channels; the mean value is the rest."""

    name = "sparq"
    operators = (SPARQ_ATTENTION,)
    reads_a_part = True
    reads_beside = 1
    sums = ("value_sum",)

    @override
    def select(self, query: Tensor, cache: LayerCache, rule: Constants) -> Selection:
        from kvc_trt import reference

        read = reference.sparq_attention(
            query, cache.keys, cache.values, cache.lengths,
            top_r=rule.top_r, top_k=rule.top_k, token_budget=rule.token_budget,
            dense_until=rule.dense_until, reallocate=rule.reallocate,
        )  # fmt: skip
        return reference.Selection(*read)

    @override
    def complete(self, prompt: PromptLayer) -> None:
        """Write the keys a second time, channel by channel, and the sum of the values."""
        emit, name = prompt.emit, prompt.name
        emit.Transpose(f"k_cache.{name}", perm=[0, 1, 3, 2], outputs=[f"channels.{name}"])
        emit.ReduceSum(float32(emit, f"v_cache.{name}"), [2], keepdims=0, outputs=[f"value_sum.{name}"])

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
        for slot in range(before, steps.start):
            total += state["v_cache"][:, slot].astype(np.float32)
        state["value_sum"][...] = total

    @override
    def pairs_to_choose(self, rule: Constants, entries: int, head_size: int) -> float:
        """Count `top_r` channels of every key, and the mean of all values."""
        return entries * rule.top_r / (2 * head_size) + 0.5

    @override
    def describe(self, rule: Constants) -> str:
        mean = ", the mean value in place of the others" if rule.reallocate else ""
        return f"and the current one, scored by {rule.top_r} of each key's channels{mean}"

    def ranking(self, rule: Constants) -> ByChannels:
        """Return the ranking by the keys' values on the query's largest channels."""
        return ByChannels(rule.top_r)

    @property
    @override
    def rebuilt(self) -> Mapping[str, Rebuild]:
        """Return the channels; the sum of the values depends on the order of its terms."""
        return {"channels": lambda keys, lengths, rule: np.ascontiguousarray(keys.swapaxes(2, 3))}

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

"""Long keys: a throw-away method of new kinds, in one file as docs/policies/README.md describes it. No paper.

Of a prompt, the tokens of the longest keys stay; a step reads the newest `top_k` tokens. Rotary embedding turns keys
and keeps their lengths, so in the first layer all copies of a token nearly tie: only rounding decides between them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvc_trt.methods.base.constants import Constants
from kvc_trt.methods.base.decode_selection import DecodeSelection
from kvc_trt.methods.base.inputs import EVERY_POLICY, PolicyInputs, constants
from kvc_trt.methods.base.parameters import PolicyParameters
from kvc_trt.methods.base.policy import Policy
from kvc_trt.methods.base.prompt_eviction import PromptEviction
from kvc_trt.methods.rankings.ranking import ChosenList, PromptRanking, Prompts, Step, StepRanking
from kvc_trt.methods.rankings.rounding import BoundedScores, Float64, off
from kvc_trt.operators.attention.attend import attend
from kvc_trt.operators.attention.selective import append, ascending, attend_all_or
from kvc_trt.operators.compaction.keep_best import among_row, keep_best
from kvc_trt.operators.schema import INT32, Attribute, Operator, Tensor
from kvc_trt.operators.shapes import Layout, count_to, float32, size
from kvc_trt.operators.tensors import (
    CACHE_LENGTHS,
    CAPACITY,
    DENSE_UNTIL,
    INDICES,
    K_CACHE,
    OUTPUT,
    PROMPT_KEYS,
    PROMPT_LENGTHS,
    PROMPT_VALUES,
    STEP,
    STORED_LENGTHS,
    TOKEN_BUDGET,
    TOP_K,
    V_CACHE,
    updated,
)

if TYPE_CHECKING:
    import torch

    from kvc_trt.operators.emitter import Emitter, Value
    from kvc_trt.reference import Compacted, LayerCache, Selection


def _write_compact(emit: Emitter, layout: Layout) -> Mapping[str, Value]:
    def rank(branch: Emitter) -> Value:
        keys, columns = float32(branch, "k"), count_to(branch, size(branch, "k", 2))
        squares = branch.ReduceSum(branch.Mul(keys, keys), [3], keepdims=0)
        return among_row(branch, squares, branch.Less(columns, branch.Reshape("prompt_lengths", [-1, 1, 1])))

    return keep_best(emit, layout, rank).outputs


def _write_step(emit: Emitter, layout: Layout) -> Mapping[str, Value]:
    _, step = append(emit, layout)

    def sparse(branch: Emitter) -> list[Value]:
        lengths = branch.Squeeze(step.lengths, [3])
        wanted = branch.Where(branch.LessOrEqual(lengths, step.limit), lengths, branch.Min(lengths, emit_top_k))
        back = branch.Range(1, branch.Add(branch.ReduceMax(wanted, keepdims=0), 1), 1)
        taken = branch.LessOrEqual(back, wanted)
        tokens = branch.Max(branch.Sub(lengths, back), 0)
        each = branch.Expand(tokens, [1, layout.shape.fixed_kv_heads, 1])
        keys, values = step.gather(branch, step.rows(branch, each))
        attended = attend(branch, step.query, keys, values, branch.Unsqueeze(taken, [2]))
        return [attended, branch.Where(taken, each, -1)]

    emit_top_k = emit.attribute("top_k")
    output, read = attend_all_or(emit, step, sparse, lists=layout.shape.fixed_kv_heads)
    selected = ascending(emit, read, emit.Max(step.limit, emit_top_k))
    return {"output": output, **step.caches(), "selected": selected}


COMPACT_LONG_KEYS = Operator(
    name="KvcCompactLongKeys",
    summary="Keep the tokens of the longest keys of a prompt.",
    inputs=(PROMPT_KEYS, PROMPT_VALUES, PROMPT_LENGTHS),
    outputs=(K_CACHE, V_CACHE, STORED_LENGTHS, INDICES),
    attributes=(Attribute("prompt_budget", at_most="capacity"), CAPACITY),
    formulas={"C": "capacity"},
    write=_write_compact,
)
NEWEST_ATTENTION = Operator(
    name="KvcNewestAttention",
    summary="Append one token, attend to the newest ones.",
    inputs=(*STEP, CACHE_LENGTHS),
    outputs=(OUTPUT, updated(K_CACHE), updated(V_CACHE), Tensor("selected", INT32, ("B", "G", "K"))),
    attributes=(TOP_K, TOKEN_BUDGET, DENSE_UNTIL),
    formulas={"K": "max(top_k, token_budget, dense_until)"},
    write=_write_step,
)


@dataclass(frozen=True)
class ByLength(PromptRanking):
    """Prompt tokens ranked by the squared lengths of their keys."""

    def explain(self, inputs: Prompts, chosen: ChosenList, slack: float) -> str | None:
        """Judge the list by the lengths."""
        return chosen.instead("kept", self.scores(inputs.keys_of(chosen), slack).unexplained(chosen.taken))

    def scores(self, keys: Float64, slack: float) -> BoundedScores:
        """Score keys [n, D]: a square moves by twice the length times how far the key is off."""
        squares = (keys**2).sum(-1)
        return BoundedScores.within(squares, off(slack) * squares)


@dataclass(frozen=True)
class ByAge(StepRanking):
    """Cached tokens ranked by their age, which no rounding changes."""

    def explain(self, inputs: Step, chosen: ChosenList, slack: float) -> str | None:
        """Refuse every list that differs."""
        return chosen.instead("read", f"the newest {chosen.taken.size} tokens must be read")


class LongKeys(PromptEviction):
    """The longest keys of each KV head."""

    name = "long-keys"
    operators = (COMPACT_LONG_KEYS,)

    def compact(
        self, observed: Any, keys: torch.Tensor, values: torch.Tensor, prompt_lengths: torch.Tensor, rule: Constants
    ) -> Compacted:
        """Literally so."""
        from kvc_trt.reference.kept import everything, gather_kept
        from kvc_trt.reference.selection import best_ascending, sum_in_order

        chosen, budget = [], rule.prompt_budget
        for row, n in enumerate(prompt_lengths.tolist()):
            squares = sum_in_order(keys[row, :, :n] ** 2, 2)
            chosen.append(everything(keys, n) if n <= budget else best_ascending(squares, budget))
        return gather_kept(keys, values, chosen, min(budget, keys.shape[2]))

    def ranking(self, rule: Constants) -> ByLength:
        """Return the ranking by length."""
        return ByLength()


class Newest(DecodeSelection):
    """The newest tokens."""

    name = "newest"
    operators = (NEWEST_ATTENTION,)
    reads_a_part = True

    def select(self, query: torch.Tensor, cache: LayerCache, rule: Constants) -> Selection:
        """Literally so."""
        import torch

        from kvc_trt import reference

        width = max(rule.top_k, rule.token_budget, rule.dense_until)
        selected = torch.full((*cache.keys.shape[:2], width), -1, dtype=torch.int32)
        output = torch.empty_like(query)
        for row, m in enumerate(cache.lengths.tolist()):
            read = m if m <= max(rule.token_budget, rule.dense_until) else min(rule.top_k, m)
            selected[row, :, :read] = torch.arange(m - read, m)
            keys, values = (table[row : row + 1, :, m - read : m] for table in (cache.keys, cache.values))
            output[row] = reference.dense_attention(query[row : row + 1], keys, values, torch.tensor([read]))[0]
        return reference.Selection(output, selected)

    def describe(self, rule: Constants) -> str:
        """Describe which they are."""
        return "the newest"

    def ranking(self, rule: Constants) -> ByAge:
        """Return the ranking by age."""
        return ByAge()


def resolve(inputs: PolicyInputs) -> PolicyParameters:
    """The budget is the prompt's; half of it is read."""
    kept = min(inputs.budget, inputs.max_input_len)
    return constants(
        inputs, LONG_KEYS, NEWEST,
        capacity=kept + inputs.max_output_len,
        prompt_budget=kept,
        window=1,
        top_k=inputs.budget // 2,
        dense_until=inputs.value("dense_until", 0),
    )  # fmt: skip


LONG_KEYS, NEWEST = LongKeys(), Newest()
POLICY = Policy(
    name="long-keys",
    summary="throw-away: keep the longest keys, read the newest",
    source="a test",
    eviction=LONG_KEYS,
    selection=NEWEST,
    resolve=resolve,
    overrides=("dense_until", *EVERY_POLICY),
)
